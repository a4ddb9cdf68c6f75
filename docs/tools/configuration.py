"""The reference of settings, generated from the models that check experiment files.

python docs/tools/configuration.py prints the page; `make site` builds it as reference/configuration.md.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from pydantic import BaseModel

from vajra_py.config.choices import registered_backends, workload_annotation
from vajra_py.config.schema import ExperimentConfig
from vajra_py.contract import Layer, PolicyConfig
from vajra_py.contract.facts import FACTS
from vajra_py.contract.routing import RoutingPartChoice
from vajra_py.plugins import load_registry, parameters_of
from vajra_py.workload.options import WorkloadOptions
from vajra_py.workload.sessions import Sessions
from vajra_py.workload.synthetic import Lengths

OWN_PACKAGE = "vajra-py"

INTRODUCTION = """\
# Settings

Every key of an experiment file with its type, limits and default, generated from the schema. The rules that hold
throughout are in [Write an experiment file](../configuration.md#rules).
"""

TITLES = {
    "AdmissionConfig": "Admission",
    "BackendConfig": "Backend",
    "ClosedLoop": "Arrivals: `closed_loop`",
    "DeviceConfig": "Device",
    "EngineConfig": "Backend: `engine`",
    "VllmBackendConfig": "Backend: `vllm`",
    "ExperimentConfig": "The file",
    "HandOffConfig": "Hand-off",
    "KvParallelConfig": "KV parallelism",
    "Lengths": "Prompt and output lengths",
    "LinksConfig": "Links",
    "LognormalPart": "Part of a mixture",
    "MemoryConfig": "KV memory",
    "MigrationConfig": "Migration",
    "OutputConfig": "Output",
    "Piece": "Piece of a rate",
    "PolicyChoice": "A policy",
    "PoolConfig": "A pool",
    "PoolSimulatorConfig": "Backend: a simulated pool",
    "PrefixCacheConfig": "Prefix cache",
    "PriorityShare": "A priority",
    "ReplicaConfig": "Replica",
    "ReplicasetConfig": "A replicaset",
    "ReplicasetEngineConfig": "Backend: a replicaset of the engine",
    "ReplicasetSimulatorConfig": "Backend: a simulated replicaset",
    "RouteConfig": "Backend: `route`",
    "SamplingConfig": "Sampling",
    "SchedulingConfig": "Scheduling",
    "ServerConfig": "Backend: a server of `route`",
    "SelectConfig": "Selection of requests",
    "Sessions": "Sessions",
    "SimulatorConfig": "Backend: `simulator`",
    "SloClassConfig": "A class of service",
    "SystemPrompts": "System prompts",
    "TenantShares": "Tenants",
    "WorkloadOptions": "Workload",
}
FAMILIES = {
    "vajra_py.workload.config": "Workload",
    "vajra_py.workload.arrivals": "Arrivals",
    "vajra_py.workload.distributions": "Lengths",
    "vajra_py.latency.config": "Latency",
}
"""What models with a `type` are, by the module that defines them."""
KINDS = {
    "vajra_py.workload.config": "one kind of workload",
    "vajra_py.workload.arrivals": "one kind of arrivals",
    "vajra_py.workload.distributions": "one kind of lengths",
}
"""What a union of many models is called, by the module that defines them."""
MANY = 5
PARENTS: Mapping[type[BaseModel], str] = {
    WorkloadOptions: "the options of [Workload](#workload)",
    Lengths: "[Prompt and output lengths](#prompt-and-output-lengths)",
    Sessions: "[Sessions](#sessions)",
}
"""Models whose fields others take over; they are described once."""
PLACES = {
    (ExperimentConfig, "workload"): "[workload](#workload)",
    (ExperimentConfig, "observers"): "list of names or `{type: NAME, …}`",
    (ExperimentConfig, "sweep"): "mapping or list of mappings, see [sweeps](../experiments.md#sweeps), or null",
    ("SimulatorConfig", "latency"): "[latency model](#latency-models)",
    ("SimulatorConfig", "predictions"): "[latency model](#latency-models) or null",
    ("SimulatorConfig", "output_length"): "[predictor](#output-length-predictors)",
    ("ReplicasetSimulatorConfig", "latency"): "[latency model](#latency-models) or null",
    ("ReplicasetSimulatorConfig", "predictions"): "[latency model](#latency-models) or null",
    ("PoolSimulatorConfig", "latency"): "[latency model](#latency-models) or null",
    ("PoolSimulatorConfig", "predictions"): "[latency model](#latency-models) or null",
    ("EngineConfig", "latency"): "[latency model](#latency-models)",
    ("VllmBackendConfig", "latency"): "[latency model](#latency-models)",
    ("VllmBackendConfig", "output_length"): "[predictor](#output-length-predictors)",
    ("ReplicasetEngineConfig", "latency"): "[latency model](#latency-models) or null",
    ("EngineConfig", "output_length"): "[predictor](#output-length-predictors)",
    ("RouteConfig", "latency"): "[latency model](#latency-models) or null",
    ("RouteConfig", "output_length"): "[predictor](#output-length-predictors)",
}
"""Fields whose content is checked elsewhere, so that their annotation does not say it."""
PLAIN = {int: "int", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "anything"}


def page() -> str:
    """The whole page."""
    models = list(reachable([ExperimentConfig]))
    models += [one for one in reachable([WorkloadOptions, workload_annotation()]) if one not in models]
    models += [Lengths, Sessions]
    models += [one for one in reachable([Sessions, *registered_backends().values()]) if one not in models]
    models = [one for one in dict.fromkeys(models) if one.__name__ != "TypedChoice"]
    sections = [section(model) for model in sorted(models, key=lambda one: order(one, models))]
    parts = [INTRODUCTION, *sections, *offered_sections(), policies(), facts()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def order(model: type[BaseModel], models: Sequence[type[BaseModel]]) -> tuple[int, int]:
    """Sections of one kind stand together."""
    kinds = ("The file", "Replica", "Workload", "Arrivals", "Lengths", "Backend", "Output")
    title = title_of(model)
    family = title.partition(":")[0]
    if model.__module__.startswith("vajra_py.workload") and family not in kinds:
        family = "Workload" if model.__module__.endswith("options") else "Lengths"
    if model.__name__ == "Piece":
        family = "Arrivals"
    if model.__name__ == "SamplingConfig":
        family = "Backend"
    rank = kinds.index(family) if family in kinds else 1
    if model.__name__ in ("SchedulingConfig", "PolicyChoice"):
        rank = 0
    return rank, models.index(model)


def reachable(annotations: Sequence[Any]) -> Iterator[type[BaseModel]]:
    """The models that fields of these annotations may hold, each once, in order of first mention."""
    seen: dict[type[BaseModel], None] = {}

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation in seen:
                return
            seen[annotation] = None
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for argument in typing.get_args(annotation):
            visit(argument)

    for annotation in annotations:
        visit(annotation)
    return iter(seen)


def title_of(model: type[BaseModel]) -> str:
    """The heading of a model's section."""
    if model.__name__ in TITLES:
        return TITLES[model.__name__]
    kind = model.model_fields.get("type")
    names = typing.get_args(kind.annotation) if kind is not None else ()
    if names and home(model) in FAMILIES:
        return f"{FAMILIES[home(model)]}: `{names[0]}`"
    return model.__name__.removesuffix("Config")


def home(model: Any) -> str:
    """The module by which a model's family is named: one for all kinds of workload, which have modules of their own."""
    if isinstance(model, type) and issubclass(model, WorkloadOptions):
        return "vajra_py.workload.config"
    return str(getattr(model, "__module__", ""))


def anchor(title: str) -> str:
    """The fragment that leads to a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def link(model: type[BaseModel]) -> str:
    """A link to a model's section."""
    title = title_of(model)
    text = title.partition(": ")[2] or title.lower().replace("kv ", "KV ")
    return f"[{text}](#{anchor(title)})"


def section(model: type[BaseModel], title: str | None = None) -> str:
    """One model: what it is for, then its keys."""
    lines = [f"## {title or title_of(model)}", "", documentation(model), ""]
    inherited = [parent for parent in PARENTS if parent is not model and issubclass(model, parent)]
    if inherited:
        lines += [f"Takes {' and '.join(PARENTS[parent] for parent in inherited)}, and:", ""]
    skipped = {name for parent in inherited for name in parent.model_fields}
    table = rows(model, skipped)
    lines += table or (["Nothing else." if inherited else "No parameters."])
    return "\n".join(lines)


def documentation(model: type[BaseModel]) -> str:
    """The model's docstring, its examples of code as code."""
    text = inspect.getdoc(model) or ""
    return " ".join(text.split("\n\n")[0].split())


def rows(model: type[BaseModel], skipped: Set[str] = frozenset()) -> list[str]:
    """The table of a model's keys."""
    found = [
        row(model, one.name, one.limits, one.description)
        for one in parameters_of(model)
        if one.name not in skipped and not is_discriminator(model, one.name)
    ]
    if model.__name__ == "BackendConfig":
        for name, backend in registered_backends().items():
            found.append(f"| `{name}` | {link(backend)} | null | {documentation(backend)} |")
    return ["| key | type | default | meaning |", "|---|---|---|---|", *found] if found else []


def is_discriminator(model: type[BaseModel], name: str) -> bool:
    """Whether the heading says this key's only value already."""
    annotation = model.model_fields[name].annotation
    return name == "type" and typing.get_origin(annotation) is typing.Literal and len(typing.get_args(annotation)) == 1


def row(model: type[BaseModel], name: str, limits: str, description: str) -> str:
    """One key."""
    field = model.model_fields[name]
    place = PLACES.get((model, name)) or PLACES.get((model.__name__, name))
    kind = place or type_text(field.annotation)
    if limits:
        kind += f", {limits}"
    if field.is_required():
        default = "required"
    elif field.default_factory is not None and isinstance(field.get_default(call_default_factory=True), BaseModel):
        default = "as there"
    else:
        default = value_text(field.get_default(call_default_factory=True))
    return f"| `{name}` | {cell(kind)} | {cell(default)} | {cell(description)} |"


def value_text(value: Any) -> str:
    """A default as it would be written in YAML."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value, default=str)}`" if value is not None else "null"


def type_text(annotation: Any) -> str:
    """A type in words, models as links to their sections."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, RoutingPartChoice):
        return "[part of a router](../routing.md#the-parts)"
    if isinstance(annotation, type) and issubclass(annotation, PolicyConfig):
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return link(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (typing.Union, types.UnionType):
        family = family_text(arguments)
        if family:
            return family
        return " or ".join(dict.fromkeys(type_text(one) for one in arguments))
    if origin in (list, tuple):
        return f"list of {type_text(arguments[0])}"
    if origin in (dict, collections.abc.Mapping):
        return f"mapping of {type_text(arguments[0])} to {type_text(arguments[1])}"
    return str(getattr(annotation, "__name__", annotation))


def family_text(members: Sequence[Any]) -> str:
    """What a union of all models of one kind is called: a link to the first of them; empty for other unions."""
    models = [one for one in members if one is not type(None)]
    modules = {home(one) for one in models}
    if len(models) < MANY or not modules <= {*KINDS, "vajra_py.workload.synthetic"}:
        return ""
    kind = next(KINDS[home(one)] for one in models if home(one) in KINDS)
    first = f"[{kind}](#{anchor(title_of(models[0]))})"
    return f"{first} or null" if len(models) < len(members) else first


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def offered_sections() -> Iterator[str]:
    """Latency models and predictors: what is built in of what plug-ins can add to."""
    registry = load_registry()
    yield (
        "## Latency models\n\nUnder `backend.simulator.latency`: `{type: NAME, …}`. The"
        " [reference of latency models](latency-models.md) has their formulas.\n"
    )
    for name, offer in registry.latency_models.items():
        if offer.package == OWN_PACKAGE:
            yield section(offer.spec.config, f"Latency: `{name}`")
    own = [offer.spec.config for offer in registry.latency_models.values() if offer.package == OWN_PACKAGE]
    for model in reachable(own):
        if model not in own:
            yield section(model)
    yield (
        "## Output length predictors\n\nUnder `backend.simulator.output_length`: `{type: NAME, …}`. Policies see these predictions,"
        " never the true length.\n"
    )
    for name, offer_ in registry.output_lengths.items():
        if offer_.package == OWN_PACKAGE:
            yield section(offer_.spec.config, f"Predictor: `{name}`")


def policies() -> str:
    """The parameters of the built-in policies."""
    registry = load_registry()
    lines = [
        "## Parameters of policies",
        "",
        "Under `scheduling.<layer>.params`. The rules are in the [policy reference](policies.md).",
        "",
        "| layer | policy | parameter | type | default | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for layer in Layer:
        for name, offer in sorted(registry.policies(layer).items()):
            if offer.package != OWN_PACKAGE:
                continue
            parameters = parameters_of(offer.spec.config)
            if not parameters:
                lines.append(f"| {layer.value} | `{name}` | none | | | |")
            for one in parameters:
                parts = row(offer.spec.config, one.name, one.limits, one.description)
                lines.append(f"| {layer.value} | `{name}` {parts}")
    for name, admission in registry.admission_policies.items():
        if admission.package == OWN_PACKAGE:
            for one in parameters_of(admission.spec.config):
                parts = row(admission.spec.config, one.name, one.limits, one.description)
                lines.append(f"| admission | `{name}` {parts}")
    own = [one.spec.config for one in registry.admission_policies.values() if one.package == OWN_PACKAGE]
    nested = [section(model) for model in reachable(own) if model not in own]
    return "\n".join([*lines, "", *nested]) + ("" if nested else "\n")


def facts() -> str:
    """Return the table of what clients may state of a request, with the names in every format."""
    lines = [
        "## Facts of a request",
        "",
        "What a client may state of its request, with the name in every format.",
        "",
        "- Columns of CSV files and keys of JSON lines and recordings have the fact's own name. A list is separated by `;` in a",
        "  CSV cell, by commas in a header.",
        "- Over HTTP, durations are in milliseconds, at least a microsecond. A header takes precedence over the body's field,",
        "  and the first header over the second.",
        "- In vLLM, facts are `extra_args` (`vllm_xargs` over HTTP).",
        "- Views and the requests table have the last name.",
        "",
        "| fact | type | default | meaning | HTTP body | HTTP headers | vLLM | view, table |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fact in FACTS:
        kind = f"{fact.kind.value} or null" if fact.is_optional else fact.kind.value
        headers = ", ".join(f"`{one}`" for one in fact.headers)
        extra = f"`vajra_{fact.name}`" if fact.has_extra_arg else ""
        seen = f"`{fact.seen_as}`" if fact.seen_as else ""
        default = "empty" if fact.default in ("", ()) else value_text(fact.default)
        lines.append(
            f"| `{fact.name}` | {kind} | {default} | {cell(fact.meaning)} | `{fact.body}` | {headers} | {extra} | {seen} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
