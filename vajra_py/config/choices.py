"""Validate the parts of a file that plug-ins define: policies, latency models, observers, workloads, backends.

Each part is replaced by its validated model (with defaults written out), or by a stand-in if it is wrong. The schema
then checks only the rest of the file, and no mistake is reported twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from vajra_py.config.explain import explain, show
from vajra_py.config.places import Entries, Finding, KeyPath, dotted, get, has, locate, plain
from vajra_py.config.sections import PolicyChoice, TypedChoice
from vajra_py.contract import Layer, RoutingPartChoice, RoutingPartKind
from vajra_py.contract.hookspecs import LatencyModelSpec, ObserverSpec, OutputLengthSpec
from vajra_py.errors import ConfigError, PluginError, UnknownNameError, VajraError, did_you_mean
from vajra_py.plugins import ADMISSION, RETENTION, SCALER, AnyOffer, Kind, Offer, Registry, kind_of

STAND_IN = "stand-in"

_BESIDE: tuple[Kind[Any], ...] = (SCALER, RETENTION)
"""Kinds of policies that a replicaset may have in addition to the policies of the three layers."""

_BACKENDS: dict[str, type[BaseModel]] = {}

_LATE_BACKENDS: Mapping[str, str] = {
    "engine": "vajra_py.engine.config",
    "route": "vajra_py.route.config",
    "vllm": "vajra_py.vllm.config",
}
"""Modules of this package that register backends, by the backend's name; a module is imported when its backend is
needed.
"""


def register_backend(name: str, model: type[BaseModel]) -> None:
    """Make `backend: {name: …}` available in addition to `simulator`.

    The package that implements the backend calls this before a file is loaded.
    """
    if name == "simulator" or _BACKENDS.get(name, model) is not model:
        raise ValueError(f"backend {name!r} is registered already")
    _BACKENDS[name] = model


def registered_backends() -> Mapping[str, type[BaseModel]]:
    """Return the models of all backends except the simulator, by backend name."""
    for name in _LATE_BACKENDS:
        _registered(name)
    return dict(_BACKENDS)


def _registered(name: str) -> type[BaseModel] | None:
    if name not in _BACKENDS and name in _LATE_BACKENDS:
        importlib.import_module(_LATE_BACKENDS[name])
    return _BACKENDS.get(name)


class PluginParts:
    """Checks and completes the parts of one tree that plug-ins define.

    After `check`, `data` is the completed tree in ordinary dicts and lists.
    """

    def __init__(self, root: Entries, registry: Registry, base_folder: Path | None = None) -> None:
        """Store the tree to check.

        Args:
            base_folder: folder of the file; models that resolve relative paths receive it as validation context.
        """
        self._root = root
        self._registry = registry
        self._base_folder = base_folder
        self.data: dict[str, Any] = plain(root)
        self.findings: list[Finding] = []

    def check(self) -> None:
        """Check every part."""
        replicasets = _mapping(self.data.get("replicasets"))
        self._scheduling((), self.data, optional=bool(replicasets))
        self._pools((), self.data)
        self._tiers((), self.data)
        self._drafts((), self.data)
        for name, replicaset in replicasets.items():
            if isinstance(replicaset, dict):
                self._refuse_admission(("replicasets", name, "scheduling"), replicaset.get("scheduling"))
                self._scheduling(("replicasets", name), replicaset)
                self._pools(("replicasets", name), replicaset)
                self._tiers(("replicasets", name), replicaset)
                self._drafts(("replicasets", name), replicaset)
        self._backend()
        observers = self.data.get("observers")
        if isinstance(observers, list):
            for index, value in enumerate(observers):
                observers[index] = self._typed(("observers", index), value, self._registry.observers, "an observer")
        self._workload()

    def _found(self, path: KeyPath, message: str, allowed: str | None = None) -> None:
        self.findings.append(Finding(locate(self._root, path), path, message, allowed))

    # -- policies -----------------------------------------------------------------------------------------------------

    def _scheduling(self, path: KeyPath, section: dict[str, Any], optional: bool = False) -> None:
        """Complete the policies of the three layers.

        With `optional`, layers may be missing, because each replicaset may name its own.
        """
        scheduling = section.get("scheduling")
        if scheduling is None:
            scheduling = section["scheduling"] = {}
        if not isinstance(scheduling, dict):
            return
        admission = None if path else scheduling.pop(ADMISSION.key, None)
        if admission is not None:
            admission = self._beside(ADMISSION, ("scheduling", ADMISSION.key), admission)
        complete = True
        for layer in Layer:
            if optional and scheduling.get(layer.value) is None:
                complete = False
                continue
            choice = self._policy(layer, (*path, "scheduling", layer.value), scheduling.get(layer.value))
            scheduling[layer.value] = choice or PolicyChoice(policy=STAND_IN)
        for kind in _BESIDE:
            if scheduling.get(kind.key) is not None:
                choice = self._beside(kind, (*path, "scheduling", kind.key), scheduling[kind.key])
                scheduling[kind.key] = choice or PolicyChoice(policy=STAND_IN)
        if not complete:
            known = {"preset", *(kind.key for kind in _BESIDE), *(layer.value for layer in Layer)}
            for key in [each for each in scheduling if each not in known]:
                self._found((*path, "scheduling", key), "unknown key", did_you_mean(key, known))
            section["scheduling"] = None
        if admission is not None:
            section["scheduling"] = {**(section["scheduling"] or {}), ADMISSION.key: admission}

    def _refuse_admission(self, path: KeyPath, scheduling: Any) -> None:
        if isinstance(scheduling, dict) and scheduling.pop(ADMISSION.key, None) is not None:
            message = "one admission policy serves the whole system; a replicaset cannot have its own"
            self._found((*path, ADMISSION.key), message, "Allowed: scheduling.admission at the top of the file")

    def _pools(self, path: KeyPath, section: dict[str, Any]) -> None:
        """Complete the replica schedulers and retention policies that pools define for themselves."""
        key = Layer.REPLICA_SCHEDULER.value
        for name, pool in _mapping(section.get("pools")).items():
            if isinstance(pool, dict) and pool.get(key) is not None:
                choice = self._policy(Layer.REPLICA_SCHEDULER, (*path, "pools", name, key), pool[key])
                pool[key] = choice or PolicyChoice(policy=STAND_IN)
            if isinstance(pool, dict) and pool.get(RETENTION.key) is not None:
                choice = self._beside(RETENTION, (*path, "pools", name, RETENTION.key), pool[RETENTION.key])
                pool[RETENTION.key] = choice or PolicyChoice(policy=STAND_IN)

    def _tiers(self, path: KeyPath, section: dict[str, Any]) -> None:
        """Complete the retention policy of each memory tier of a replicaset and of its pools."""
        owners = [(path, section)]
        owners += [((*path, "pools", name), pool) for name, pool in _mapping(section.get("pools")).items()]
        for where, owner in owners:
            memory = _mapping(_mapping(_mapping(owner).get("replica")).get("memory"))
            at: KeyPath = (*where, "replica", "memory", "tiers")
            levels = memory.get("tiers")
            if isinstance(levels, dict):
                levels, at = levels.get("levels"), (*at, "levels")
            for index, level in enumerate(levels if isinstance(levels, list) else ()):
                given = _mapping(level).get(RETENTION.key)
                if given is None:
                    continue
                choice = {"policy": given} if isinstance(given, str) else given
                named = self._beside(RETENTION, (*at, index, RETENTION.key), choice)
                level[RETENTION.key] = named or PolicyChoice(policy=STAND_IN)

    def _drafts(self, path: KeyPath, section: dict[str, Any]) -> None:
        """Report numbers of drafts that do not fit into the model's longest sequence, or exceed the number of
        acceptance rates.
        """
        simulator = _mapping(_mapping(self.data.get("backend")).get("simulator"))
        rates = _mapping(simulator.get("drafts")).get("rates")
        owners = [(path, section)]
        owners += [((*path, "pools", name), pool) for name, pool in _mapping(section.get("pools")).items()]
        for where, owner in owners:
            replica = _mapping(_mapping(owner).get("replica"))
            longest = replica.get("max_model_len")
            for key in ("num_tokens", "max_tokens"):
                given = _mapping(replica.get("draft")).get(key)
                if not isinstance(given, int):
                    continue
                at: KeyPath = (*where, "replica", "draft", key)
                if isinstance(longest, int) and given >= longest > 0:
                    message = f"a sequence of the model has no room for as many drafts (got {given})"
                    self._found(at, message, f"Allowed: 0 to {longest - 1}")
                elif isinstance(rates, list) and given > len(rates):
                    message = f"backend.simulator.drafts.rates has fewer positions (got {given})"
                    self._found(at, message, f"Allowed: 0 to {len(rates)}")

    def _policy(self, layer: Layer, path: KeyPath, choice: Any) -> PolicyChoice | None:
        """Return the choice of a layer's policy with complete parameters; None if the choice is wrong."""
        known = self._registry.policy_names(layer)
        if choice is None:
            self._found(path, "is missing", did_you_mean("", known))
            return None
        found = self._named_choice(path, choice, known)
        if found is None:
            return None
        name, params = found
        try:
            offer = self._registry.policy(layer, name)
        except UnknownNameError:
            self._unknown_policy(layer, name, (*path, "policy"))
            return None
        return self._with_params(path, offer, params)

    def _beside(self, kind: Kind[Any], path: KeyPath, choice: Any) -> PolicyChoice | None:
        """Return the completed choice of a policy that belongs to no layer; None if it is wrong."""
        offers = self._registry.beside_layers[kind.key]
        found = self._named_choice(path, choice, offers)
        if found is None:
            return None
        name, params = found
        if name not in offers:
            message = f"no installed package offers {kind} of that name (got {name!r})"
            self._found((*path, "policy"), message, did_you_mean(name, offers))
            return None
        return self._with_params(path, offers[name], params)

    def _named_choice(self, path: KeyPath, choice: Any, known: Collection[str]) -> tuple[str, Mapping[str, Any]] | None:
        """Return the name and parameters of a choice; None if it does not have the form of a choice."""
        if not isinstance(choice, dict):
            self._found(path, f"must be a policy's name, or a mapping of policy and params (got {show(choice)})")
            return None
        for key in [each for each in choice if each not in ("policy", "params")]:
            self._found((*path, key), "unknown key", did_you_mean(key, ("policy", "params")))
        name = choice.get("policy")
        if not isinstance(name, str):
            state = f"must be a name (got {show(name)})" if "policy" in choice else "is missing"
            self._found((*path, "policy"), state, did_you_mean(str(name or ""), known))
            return None
        params = choice.get("params")
        if params is not None and not isinstance(params, dict):
            self._found((*path, "params"), f"must be a mapping (got {show(params)})")
            return None
        return name, params or {}

    def _with_params(self, path: KeyPath, offer: AnyOffer, params: Mapping[str, Any]) -> PolicyChoice | None:
        model = self._validated(offer.spec.config, params, (*path, "params"), str(offer.source))
        if model is None:
            return None
        num_before = len(self.findings)
        model = self._with_parts(model, (*path, "params"))
        if len(self.findings) > num_before:
            return None
        return PolicyChoice.of_validated({"policy": offer.spec.name, "params": _dumped(model)}, model)

    def _with_parts(self, value: Any, path: KeyPath) -> Any:
        """Return a model (or a list or mapping of models) in which all routing parts have complete parameters."""
        if isinstance(value, RoutingPartChoice):
            return self._part(value, path)
        if isinstance(value, BaseModel):
            fields = type(value).model_fields
            own = {name: getattr(value, name) for name in fields}
            completed = {
                name: self._with_parts(each, (*path, fields[name].alias or name)) for name, each in own.items()
            }
            changed = {name: each for name, each in completed.items() if each is not own[name]}
            return value.model_copy(update=changed) if changed else value
        if isinstance(value, list | tuple):
            parts = [self._with_parts(each, (*path, index)) for index, each in enumerate(value)]
            same = all(each is before for each, before in zip(parts, value, strict=True))
            return value if same else type(value)(parts)
        if isinstance(value, dict):
            filled = {key: self._with_parts(each, (*path, key)) for key, each in value.items()}
            return value if all(filled[key] is value[key] for key in value) else filled
        return value

    def _part(self, choice: RoutingPartChoice, path: KeyPath) -> RoutingPartChoice:
        """Return the choice of a routing part with complete parameters; a wrong choice is returned unchanged."""
        kind = choice.kind
        offers = self._registry.routing_parts(kind)
        offer = offers.get(choice.name)
        if offer is None:
            others = [other.value for other in RoutingPartKind if choice.name in self._registry.routing_parts(other)]
            hint = f"; it is a {others[0]}" if others else ""
            message = f"no installed package offers a {kind.value} of that name{hint} (got {choice.name!r})"
            at = (*path, kind.value) if has(get(self._root, *path), kind.value) else path
            self._found(at, message, did_you_mean(choice.name, offers))
            return choice
        model = self._validated(offer.spec.config, choice.params, (*path, "params"), str(offer.source))
        return choice if model is None else choice.model_copy(update={"params": _dumped(model)})

    def _unknown_policy(self, layer: Layer, name: str, path: KeyPath) -> None:
        elsewhere = [other.value for other in Layer if name in self._registry.policy_names(other)]
        hint = f"; it is one for {elsewhere[0]}" if elsewhere else ""
        message = f"no installed package offers a {kind_of(layer)} of that name{hint} (got {name!r})"
        allowed = did_you_mean(name, self._registry.policy_names(layer))
        if not elsewhere and name in self._registry.presets:
            allowed = f"It is a whole system: write `preset: {name}` in place of the layers"
        self._found(path, message, allowed)

    # -- objects with a `type` -------------------------------------------------------------------------------------------

    def _typed(
        self,
        path: KeyPath,
        given: Any,
        offers: Mapping[str, Offer[LatencyModelSpec]]
        | Mapping[str, Offer[OutputLengthSpec]]
        | Mapping[str, Offer[ObserverSpec]],
        noun: str,
    ) -> TypedChoice:
        """Return the completed choice `{type: name, …}`, or a stand-in if the choice is wrong."""
        if not isinstance(given, dict):
            self._found(path, f"must be the name of {noun}, or a mapping with type (got {show(given)})")
            return TypedChoice(type=STAND_IN)
        name = given.get("type")
        if not isinstance(name, str) or name not in offers:
            missing = name is None
            message = "is missing" if missing else f"no installed package offers {noun} of that name (got {show(name)})"
            self._found((*path, "type"), message, did_you_mean(str(name or ""), offers))
            return TypedChoice(type=STAND_IN)
        config = offers[name].spec.config
        params = {key: each for key, each in given.items() if key != "type" or "type" in config.model_fields}
        model = self._validated(config, params, path, str(offers[name].source))
        return (
            TypedChoice(type=STAND_IN)
            if model is None
            else TypedChoice.of_validated({**_dumped(model), "type": name}, model)
        )

    # -- backends and workloads ---------------------------------------------------------------------------------------

    def _backend(self) -> None:
        backend = self.data.get("backend")
        if not isinstance(backend, dict):
            return
        known = {"simulator", *_BACKENDS, *_LATE_BACKENDS}
        for name in list(backend):
            path = ("backend", name)
            if name not in known:
                self._found(path, "no such backend", did_you_mean(name, known))
                backend[name] = STAND_IN
            elif name != "simulator" and backend[name] is not None:
                self._predictions(path, backend[name])
                backend[name] = self._validated(_registered(name), backend[name], path) or STAND_IN
        simulator = backend.get("simulator")
        if not isinstance(simulator, dict):
            return
        path = ("backend", "simulator")
        self._predictions(path, simulator)
        if "latency" not in simulator:
            self._found((*path, "latency"), "is missing", did_you_mean("", self._registry.latency_models))
            simulator["latency"] = {"type": STAND_IN}
        simulator.setdefault("output_length", {"type": "none"})
        for name, own in _mapping(simulator.get("replicasets")).items():
            self._predictions((*path, "replicasets", name), own)
            self._known_replicaset((*path, "replicasets", name))
            pools = _mapping(_mapping(self._replicaset(name)).get("pools"))
            for pool, section in _mapping(_mapping(own).get("pools")).items():
                self._predictions((*path, "replicasets", name, "pools", pool), section)
                if pool not in pools:
                    self._found((*path, "replicasets", name, "pools", pool), "no such pool", did_you_mean(pool, pools))

    def _replicaset(self, name: str) -> Any:
        replicasets = _mapping(self.data.get("replicasets"))
        return replicasets.get(name) if replicasets else self.data

    def _known_replicaset(self, path: KeyPath) -> None:
        known = list(_mapping(self.data.get("replicasets"))) or ["default"]
        if path[-1] not in known:
            self._found(path, "no such replicaset", did_you_mean(str(path[-1]), known))

    def _predictions(self, path: KeyPath, section: Any) -> None:
        """Complete the latency models and the output-length predictor that a backend's section names."""
        if not isinstance(section, dict):
            return
        for key in ("latency", "predictions"):
            if section.get(key) is not None:
                offers = self._registry.latency_models
                section[key] = self._typed((*path, key), section[key], offers, "a latency model")
        if section.get("output_length") is not None:
            lengths, given = self._registry.output_lengths, section["output_length"]
            section["output_length"] = self._typed(
                (*path, "output_length"), given, lengths, "an output-length predictor"
            )

    def _workload(self) -> None:
        if "workload" not in self.data:
            return
        if self.data["workload"] is None:
            self._found(("workload",), "must be a mapping (got nothing)")
        else:
            self.data["workload"] = self._validated_workload(self.data["workload"]) or STAND_IN

    def _validated_workload(self, given: Any) -> Any:
        """Return the workload as an instance of its model; None if it is wrong.

        The class for the workload's `type` is tried first. Building the union of all classes takes as long as reading a
        file, so it is built only to explain the mistake in a wrong workload.
        """
        from vajra_py.workload.kinds import kind_of_workload

        own = kind_of_workload(given.get("type")) if isinstance(given, dict) else None
        if own is not None:
            with suppress(ValidationError):
                return own.model_validate(given, context={"base_folder": self._base_folder})
        return self._validated(workload_annotation(), given, ("workload",))

    def _validated(self, annotation: Any, value: Any, path: KeyPath, plugin: str = "") -> Any:
        """Return `value` as an instance of `annotation`, or None if it is wrong.

        Raises `PluginError` if the model of the plug-in `plugin` raises anything but a validation error.
        """
        try:
            return _adapter(annotation).validate_python(value, context={"base_folder": self._base_folder})
        except ValidationError as error:
            self.findings += explain(error, annotation, self._root, path)
        except ConfigError as error:
            for problem in error.problems:
                self._found(path, f"{problem.where}: {problem.message}", problem.allowed)
        except Exception as error:
            if not plugin or isinstance(error, VajraError):
                raise
            reason = f"checking {dotted(path)} raised {type(error).__name__} ({error})"
            raise PluginError(plugin, reason) from error
        return None


def workload_annotation() -> Any:
    """Return the union of the models of all workloads. The models are imported by this call, when a file is loaded."""
    from vajra_py.workload.config import WorkloadConfig

    return WorkloadConfig


@lru_cache(maxsize=32)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _dumped(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
