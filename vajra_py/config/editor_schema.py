"""JSON schema with which editors complete and check experiment files, including the installed plug-ins' parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter

from vajra_py.config.choices import registered_backends, workload_annotation
from vajra_py.config.load import EXPERIMENT_KEYS
from vajra_py.config.schema import ExperimentConfig
from vajra_py.contract import Layer, PolicySpec
from vajra_py.contract.hookspecs import LatencyModelSpec, ObserverSpec, OutputLengthSpec
from vajra_py.contract.routing import PART_CHOICES
from vajra_py.plugins import ADMISSION, RETENTION, Offer, OffersBeside, Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]


def json_schema(registry: Registry) -> Schema:
    """Return the JSON schema (draft 2020-12) of experiment and system files as users write them.

    It allows short forms, presets and sweeps.
    """
    schema = ExperimentConfig.model_json_schema(mode="validation")
    definitions: Schema = schema["$defs"]
    properties: Schema = schema["properties"]
    presets = {
        "enum": [*registry.presets, None],
        "description": "Named settings of a whole system; explicit keys win over it.",
    }
    for layer in Layer:
        described = definitions["SchedulingConfig"]["properties"][layer.value].get("description", "")
        definitions["SchedulingConfig"]["properties"][layer.value] = {
            "description": described,
            "oneOf": [
                _short(registry.policy_names(layer)),
                *_policy_variants(registry.policies(layer), definitions),
            ],
        }
    layers: Schema = definitions["SchedulingConfig"]["properties"]
    for key, offers in registry.beside_layers.items():
        if key in layers:
            layers[key] = _beside(layers[key].get("description", ""), offers, definitions)
    scheduler = definitions["SchedulingConfig"]["properties"][Layer.REPLICA_SCHEDULER.value]
    own_scheduler: Schema = definitions["PoolConfig"]["properties"]
    own_scheduler["replica_scheduler"] = _in_place_of(own_scheduler["replica_scheduler"], scheduler)
    own_scheduler[RETENTION.key] = _in_place_of(own_scheduler[RETENTION.key], layers[RETENTION.key])
    _tiers(definitions, layers[RETENTION.key])
    properties["preset"] = definitions["SchedulingConfig"]["properties"]["preset"] = presets
    properties["scheduling"] = _with_admission(properties["scheduling"], registry, definitions)
    simulator: Schema = definitions["SimulatorConfig"]["properties"]
    latency = _typed(registry.latency_models, definitions, simulator["latency"])
    length = _typed(registry.output_lengths, definitions, simulator["output_length"])
    typed = {"latency": latency, "predictions": latency, "output_length": length}
    properties["observers"] = {
        "type": "array",
        "description": properties["observers"].get("description", ""),
        "items": _typed(registry.observers, definitions, {}),
    }
    properties["workload"] = {
        **_embedded(TypeAdapter(workload_annotation()), definitions),
        "description": properties["workload"].get("description", ""),
    }
    backend: Schema = definitions["BackendConfig"]
    for name, model in registered_backends().items():
        backend["properties"][name] = _embedded(TypeAdapter(model), definitions)
    backend.update(additionalProperties=False, minProperties=1, maxProperties=1)
    # Typed choices occur in backends, and in the definitions of the simulator, its replicasets and its pools.
    for definition in (*backend["properties"].values(), *definitions.values()):
        own: Schema = definition.get("properties", {})
        own.update({key: _in_place_of(own[key], typed[key]) for key in typed if "TypedChoice" in str(own.get(key))})
    _name_routing_parts(registry, definitions)
    for name in ("PolicyChoice", "TypedChoice"):
        definitions.pop(name, None)
    for name in ("SchedulingConfig", "SystemSchedulingConfig", "ReplicasetConfig"):
        definitions[name].pop("required", None)  # no key is required: a preset or the top of the file may supply it
    schema["required"] = ["version", "backend"]
    schema["dependentRequired"] = {key: ["workload"] for key in EXPERIMENT_KEYS if key != "workload"}
    return {"$schema": DIALECT, **schema, "title": "vajra-py experiment"}


def _with_admission(scheduling: Schema, registry: Registry, definitions: Schema) -> Schema:
    """Return the schema of the top-level `scheduling`, which may also name an admission policy."""
    definitions["SystemSchedulingConfig"] = whole = copy.deepcopy(definitions["SchedulingConfig"])
    whole["title"] = "SystemSchedulingConfig"
    question = "Admission policy of the whole system; without one every request is accepted."
    whole["properties"][ADMISSION.key] = _beside(question, registry.admission_policies, definitions)
    old, new = "#/$defs/SchedulingConfig", "#/$defs/SystemSchedulingConfig"
    variants = [{"$ref": new} if one.get("$ref") == old else one for one in scheduling["anyOf"]]
    return {**scheduling, "anyOf": variants}


def _tiers(definitions: Schema, retention: Schema) -> None:
    """Allow memory tiers to name installed retention policies, and `tiers` to be a list."""
    tier: Schema = definitions["TierConfig"]["properties"]
    variants = [one for one in retention["oneOf"] if one != {"type": "null"}]
    tier[RETENTION.key] = {"description": tier[RETENTION.key].get("description", ""), "oneOf": variants}
    tiers: Schema = definitions["MemoryConfig"]["properties"]["tiers"]
    tiers["anyOf"] = [*tiers["anyOf"], definitions["TiersConfig"]["properties"]["levels"]]


def _beside(
    description: str,
    offers: OffersBeside,
    definitions: Schema,
) -> Schema:
    """Return the schema for choosing a policy that belongs to no layer; null selects none."""
    return {
        "description": description,
        "oneOf": [_short(offers), *_policy_variants(offers, definitions), {"type": "null"}],
    }


def _policy_variants(
    offers: Mapping[str, Offer[PolicySpec]] | OffersBeside,
    definitions: Schema,
) -> Iterable[Schema]:
    for name, offer in offers.items():
        params = _embedded(TypeAdapter(offer.spec.config), definitions)
        required = ["policy", "params"] if _has_required(offer.spec.config) else ["policy"]
        yield {
            "type": "object",
            "title": name,
            "description": _summary(offer.spec.summary, offer.package, offer.version),
            "properties": {"policy": {"enum": [name, *getattr(offer.spec, "aliases", ())]}, "params": params},
            "required": required,
            "additionalProperties": False,
        }


def _name_routing_parts(registry: Registry, definitions: Schema) -> None:
    """Restrict each choice of a routing part to the installed parts of its kind, with their parameters."""
    for choice in PART_CHOICES:
        general = definitions.get(choice.__name__)
        if general is None:
            continue
        kind, offers = choice.kind.value, registry.routing_parts(choice.kind)
        variants = [_short(name for name, offer in offers.items() if not _has_required(offer.spec.config))]
        for name, offer in offers.items():
            own = {"params": _embedded(TypeAdapter(offer.spec.config), definitions), kind: {"const": name}}
            variants.append(
                {
                    "type": "object",
                    "title": name,
                    "description": _summary(offer.spec.summary, offer.package, offer.version),
                    "properties": {**general["properties"], **own},
                    "required": [kind, "params"] if _has_required(offer.spec.config) else [kind],
                    "additionalProperties": False,
                }
            )
        definitions[choice.__name__] = {"description": general.get("description", ""), "oneOf": variants}


def _in_place_of(general: Schema, typed: Schema) -> Schema:
    """Return the schema `typed` with the description of the schema `general`; it allows null if `general` does."""
    nothing = [{"type": "null"}] if {"type": "null"} in general.get("anyOf", []) else []
    return {"description": general.get("description", ""), "oneOf": [*typed["oneOf"], *nothing]}


def _typed(
    offers: Mapping[str, Offer[LatencyModelSpec]]
    | Mapping[str, Offer[OutputLengthSpec]]
    | Mapping[str, Offer[ObserverSpec]],
    definitions: Schema,
    replaced: Mapping[str, Any],
) -> Schema:
    """Return a schema that allows `{type: name, parameters…}` for every offer, and the name alone for offers without
    required parameters.
    """
    variants: list[Schema] = [_short(name for name, offer in offers.items() if not _has_required(offer.spec.config))]
    for name, offer in offers.items():
        body = _embedded(TypeAdapter(offer.spec.config), definitions)
        body = dict(_resolved(body, definitions))
        body["properties"] = {
            "type": {"const": name},
            **{k: v for k, v in body.get("properties", {}).items() if k != "type"},
        }
        body["required"] = ["type", *(key for key in body.get("required", []) if key != "type")]
        body.update(title=name, description=_summary(offer.spec.summary, offer.package, offer.version))
        variants.append(body)
    schema: Schema = {"oneOf": variants}
    if "description" in replaced:
        schema["description"] = replaced["description"]
    return schema


def _short(names: Iterable[str]) -> Schema:
    return {"type": "string", "title": "by name alone", "enum": [*names]}


def _has_required(config: type[BaseModel]) -> bool:
    return any(field.is_required() for name, field in config.model_fields.items() if name != "type")


def _summary(summary: str, package: str, version: str) -> str:
    return f"{summary} ({package} {version})"


def _embedded(adapter: TypeAdapter[Any], definitions: Schema) -> Schema:
    """Return a model's schema without its definitions, which are moved into `definitions`.

    If `definitions` already has a different definition under any of their names, all of the model's definitions are
    renamed, since they may refer to one another.
    """
    schema = adapter.json_schema(mode="validation")
    inner: Schema = schema.pop("$defs", {})
    renamed = {name: name for name in inner}
    bodies = inner
    while any(definitions.get(name, body) != body for name, body in bodies.items()):
        renamed = {name: target + "_" for name, target in renamed.items()}
        bodies = {renamed[name]: _with_refs(body, renamed) for name, body in inner.items()}
    definitions.update(bodies)
    result: Schema = _with_refs(schema, renamed)
    return result


def _with_refs(value: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: _new_ref(child, renamed) if key == "$ref" and isinstance(child, str) else _with_refs(child, renamed)
            for key, child in value.items()
        }
    if isinstance(value, list):
        return [_with_refs(child, renamed) for child in value]
    return _new_ref(value, renamed) if isinstance(value, str) and value.startswith("#/$defs/") else value


def _new_ref(reference: str, renamed: Mapping[str, str]) -> str:
    name = reference.removeprefix("#/$defs/")
    return f"#/$defs/{renamed.get(name, name)}"


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    return schema
