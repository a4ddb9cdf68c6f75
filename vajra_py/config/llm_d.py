"""Read an `EndpointPickerConfig` of llm-d as a scheduling section.

A plug-in that exists as a routing part in vajra keeps its type as its name; names of parameters change from `camelCase`
to `snake_case`. Settings without a counterpart are listed with the reason; a mistake in the file raises `ConfigError`
with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from vajra_py.config.explain import explain, show
from vajra_py.config.llm_d_plugins import ALIASES, MEANINGLESS, UNUSED_PARAMETERS, UNUSED_SECTIONS
from vajra_py.config.places import Entries, Finding, Items, KeyPath, Place, Step, in_order, locate, plain, put
from vajra_py.config.yaml_file import read_mapping
from vajra_py.contract import Layer, RoutingPartKind
from vajra_py.contract.facts import is_number
from vajra_py.errors import ConfigError, did_you_mean
from vajra_py.plugins import Registry

KIND = "EndpointPickerConfig"
API_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
POLICY = "endpoint_picker"
PRESET = "vllm-v1"
"""Preset for the servers to which llm-d routes."""
_SINGLE, _DISAGGREGATED = "single-profile-handler", ("disagg-profile-handler", "pd-profile-handler")
_STAGES = ("decode", "prefill", "encode")
_BY_STAGE = ("profiles", "deciders")
"""Parameters of a disaggregating handler that are mappings from stages to names; its other parameters are names."""
_NAMES = (
    *("stageOrder", "decodeProfile", "prefillProfile", "encodeProfile"),
    *("prefillDeciderPluginName", "encodeDeciderPluginName", "deciderPluginName"),
)
_PRECISE_SCORER, _PRECISE_PRODUCER = "precise-prefix-cache-scorer", "precise-prefix-cache-producer"
"""Scorer of earlier versions of llm-d, and the producer that was part of this scorer."""
_IN_PROFILES = (RoutingPartKind.FILTER, RoutingPartKind.SCORER, RoutingPartKind.PICKER)
_PRODUCER_NAME = "_producer_name"
"""Suffix of the names of parameters whose value is a producer's name."""


@dataclass(frozen=True, slots=True)
class Unused:
    """Setting of the file that has no counterpart in vajra."""

    line: int
    """Line of the file, from 1."""
    where: str
    """File, line and path of the setting, as shown in messages."""
    name: str
    reason: str

    def __str__(self) -> str:
        """Return the setting and the reason as one line."""
        return f"{self.where}: {self.name} has no meaning here: {self.reason}"


@dataclass(frozen=True, slots=True)
class LlmDConfig:
    """Contents of an llm-d file in terms of this project."""

    preset: str
    scheduling: Mapping[str, Any]
    """Section `scheduling:` with the replicaset scheduler; the preset supplies the other layers."""
    unused: Sequence[Unused]


@dataclass(frozen=True, slots=True)
class _Plugin:
    """Entry of `plugins`, with the parameters under their names in vajra."""

    name: str
    type: str
    path: KeyPath
    params: Mapping[str, Any]
    is_meaningless: bool = False


def read_llm_d(path: str | Path, registry: Registry) -> LlmDConfig:
    """Read an llm-d file as a scheduling section.

    Raises `ConfigError` with every mistake in the file, and `UnknownNameError` if the composable router is not
    installed.
    """
    reader = _Reader(read_mapping(path), registry)
    config = reader.read()
    if reader.findings:
        raise ConfigError(in_order(reader.findings))
    assert config is not None
    offer = registry.policy(Layer.REPLICASET_SCHEDULER, POLICY)
    offer.spec.config.model_validate(config.scheduling[Layer.REPLICASET_SCHEDULER.value]["params"])
    return config


@dataclass
class _Reader:
    """Reads one tree; collects mistakes and unused settings."""

    root: Entries
    registry: Registry
    findings: list[Finding] = field(default_factory=list)
    unused: list[Unused] = field(default_factory=list)
    plugins: dict[str, _Plugin] = field(default_factory=dict)

    def read(self) -> LlmDConfig | None:
        """Return the configuration; None if there are mistakes."""
        self._head()
        self._plugins()
        profiles = self._profiles()
        params = None if self.findings else self._params(profiles)
        if params is None or self.findings:
            return None
        producers = [one for one in self.plugins.values() if self._is(one, RoutingPartKind.PRODUCER)]
        if producers:
            params = {"producers": self._unique(producers), **params}
        scheduler = {"policy": POLICY, "params": params}
        unused = sorted(self.unused, key=lambda one: one.line)
        return LlmDConfig(PRESET, {Layer.REPLICASET_SCHEDULER.value: scheduler}, unused)

    # -- the file -----------------------------------------------------------------------------------------------------

    def _found(self, path: KeyPath, message: str, allowed: str | None = None) -> None:
        self.findings.append(Finding(locate(self.root, path), path, message, allowed))

    def _no_use(self, path: KeyPath, name: str, reason: str) -> None:
        place = locate(self.root, path)
        self.unused.append(Unused(place.line or 1, place.where(path), name, reason))

    def _head(self) -> None:
        known = {"apiVersion", "kind", "plugins", "schedulingProfiles", *UNUSED_SECTIONS}
        for key in self.root:
            if key not in known:
                self._found((key,), "unknown key", did_you_mean(key, known))
        for key, allowed in (("apiVersion", API_VERSIONS), ("kind", (KIND,))):
            if self.root.get(key) not in allowed:
                state = f"is not known (got {show(self.root[key])})" if key in self.root else "is missing"
                self._found((key,), state, f"Allowed: {', '.join(allowed)}")
        for key, reason in UNUSED_SECTIONS.items():
            if self.root.get(key):
                self._no_use((key,), key, reason)

    def _entries(self, path: KeyPath, tree: Any, known: Sequence[str]) -> Iterator[tuple[KeyPath, Entries]]:
        """Yield each mapping in a list, with its path; report items that are no mappings, and unknown keys."""
        if not isinstance(tree, Items):
            self._found(path, f"must be a list (got {show(tree)})")
            return
        for index, one in enumerate(tree):
            at = (*path, index)
            if not isinstance(one, Entries):
                self._found(at, f"must be a mapping (got {show(one)})", f"Keys: {', '.join(known)}")
                continue
            for key in one:
                if key not in known:
                    self._found((*at, key), "unknown key", did_you_mean(key, known))
            yield at, one

    def _text(self, path: KeyPath, entry: Mapping[str, Any], key: str) -> str:
        value = entry.get(key)
        if isinstance(value, str) and value:
            return value
        state = f"must be a name (got {show(value)})" if key in entry else "is missing"
        self._found((*path, key), state)
        return ""

    # -- plug-ins -----------------------------------------------------------------------------------------------------

    def _plugins(self) -> None:
        if "plugins" not in self.root:
            self._found(("plugins",), "is missing")
            return
        entries = list(self._entries(("plugins",), self.root["plugins"], ("name", "type", "parameters")))
        types = {
            str(one.get("name") or one.get("type")): ALIASES.get(str(one.get("type")), str(one.get("type")))
            for _, one in entries
        }
        for path, entry in entries:
            kind = self._text(path, entry, "type")
            if not kind:
                continue
            name = self._text(path, entry, "name") if entry.get("name") else kind
            if name in self.plugins:
                self._found((*path, "name" if "name" in entry else "type"), f"is given twice (got {name!r})")
                continue
            self.plugins[name] = self._plugin(path, name, kind, entry, types)

    def _plugin(self, path: KeyPath, name: str, kind: str, entry: Entries, types: Mapping[str, str]) -> _Plugin:
        type_ = ALIASES.get(kind, kind)
        if type_ in MEANINGLESS:
            self._no_use(path, type_ if name == kind else f"{name} ({type_})", MEANINGLESS[type_])
            return _Plugin(name, type_, path, {}, is_meaningless=True)
        given = entry.get("parameters")
        if given is not None and not isinstance(given, Entries):
            self._found((*path, "parameters"), f"must be a mapping (got {show(given)})")
            given = None
        if type_ == _PRECISE_SCORER:
            for key in given or ():
                self._no_use((*path, "parameters", key), f"{key} of {name}", UNUSED_PARAMETERS[_PRECISE_PRODUCER]["*"])
            return _Plugin(name, "prefix-cache-scorer", path, {f"prefix_match_info{_PRODUCER_NAME}": _PRECISE_PRODUCER})
        plugin = _Plugin(name, type_, path, {})
        if type_ == _SINGLE:
            return plugin
        if type_ in _DISAGGREGATED:
            return replace(plugin, params=self._handler_params(plugin, given or {}))
        kinds = [one for one in RoutingPartKind if type_ in self.registry.routing_parts(one)]
        if not kinds:
            known = {*MEANINGLESS, *ALIASES, _SINGLE, *_DISAGGREGATED, _PRECISE_SCORER}
            known |= {each for one in RoutingPartKind for each in self.registry.routing_parts(one)}
            self._found((*path, "type"), f"is no plug-in that is known here (got {kind!r})", did_you_mean(kind, known))
            return replace(plugin, is_meaningless=True)
        return self._with_params(plugin, kinds[0], given or Entries({}, locate(self.root, path)), types)

    def _handler_params(self, plugin: _Plugin, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters of a disaggregating handler that name something; report the others."""
        path, unused = (*plugin.path, "parameters"), UNUSED_PARAMETERS[_DISAGGREGATED[0]]
        params: dict[str, Any] = {}
        for key, value in given.items():
            if key in unused:
                self._no_use((*path, key), f"{key} of {plugin.name}", unused[key])
            elif key not in (*_BY_STAGE, *_NAMES):
                self._found((*path, key), "unknown key", did_you_mean(key, (*_BY_STAGE, *_NAMES)))
            elif value is not None and key in _BY_STAGE:
                params[key] = self._by_stage((*path, key), value)
            elif value is not None:
                params[key] = self._text(path, given, key)
        return params

    def _by_stage(self, path: KeyPath, given: Any) -> Mapping[str, str]:
        if not isinstance(given, Entries):
            self._found(path, f"must be a mapping (got {show(given)})", f"Keys: {', '.join(_STAGES)}")
            return {}
        for stage in given:
            if stage not in _STAGES:
                self._found((*path, stage), "unknown key", did_you_mean(stage, _STAGES))
        return {stage: self._text(path, given, stage) for stage in _STAGES if given.get(stage) is not None}

    def _with_params(self, plugin: _Plugin, kind: RoutingPartKind, given: Entries, types: Mapping[str, str]) -> _Plugin:
        path = (*plugin.path, "parameters")
        ignored = UNUSED_PARAMETERS.get(plugin.type, {})
        for key in given:
            if key in ignored or "*" in ignored:
                self._no_use((*path, key), f"{key} of {plugin.name}", ignored.get(key, ignored.get("*", "")))
        used = Entries({}, given.place) if "*" in ignored else given.without(*ignored)
        if plugin.type.startswith("session-affinity") and isinstance(used.get("sessionIdConfig"), Entries):
            inner = used["sessionIdConfig"]
            kept = inner.without(*(key for key in inner if key != "evictionTtlSeconds"))
            used = used.without("sessionIdConfig").completed(kept)
        ours = _snake_keys(used)
        for key in [one for one in ours if one.endswith(_PRODUCER_NAME)]:
            ours = self._named_producer(ours, key, (*path, _camel(key)), types)
        config = self.registry.routing_part(kind, plugin.type).spec.config
        try:
            model = config.model_validate(plain(ours))
        except ValidationError as error:
            if not self._is_unavailable(plugin, error):
                self._explain(error, config, ours, path)
                return plugin
            return replace(plugin, is_meaningless=True)
        stated = {key: value for key, value in model.model_dump(mode="json").items() if key in model.model_fields_set}
        return replace(plugin, params=stated)

    def _named_producer(self, ours: Entries, key: str, path: KeyPath, types: Mapping[str, str]) -> Entries:
        name = ours[key]
        if not isinstance(name, str):
            self._found(path, f"must be a name (got {show(name)})")
            return ours.without(key)
        if name in types:
            return ours.replaced(key, types[name], ours.place_of(key))
        if name not in self.registry.routing_parts(RoutingPartKind.PRODUCER):
            self._found(path, f"names no plug-in of the file (got {show(name)})", did_you_mean(name, types))
        return ours

    def _is_unavailable(self, plugin: _Plugin, error: ValidationError) -> bool:
        """If the plug-in uses a label or attribute that replicas lack here, list it as unused and return True."""
        wanted = {"by-label": "label", "label-selector-filter": "key", "endpoint-attribute-scorer": "attribute_key"}
        name = wanted.get(plugin.type, "attribute" if plugin.type == "endpoint-attribute-filter" else None)
        for each in error.errors(include_url=False):
            is_label = (
                each["type"] == "literal_error" and each["loc"] and (name in each["loc"] or "[key]" in each["loc"])
            )
            if name is not None and is_label:
                expected = str((each.get("ctx") or {}).get("expected", ""))
                reason = f"replicas have no {each['input']!r} here; what they have is {expected}"
                self._no_use(plugin.path, f"{plugin.name} ({plugin.type})", reason)
                return True
        return False

    def _explain(self, error: ValidationError, config: type[BaseModel], ours: Entries, path: KeyPath) -> None:
        """Report mistakes in parameters, under the parameters' names in llm-d."""
        root = put(self.root, path, ours, ours.place)
        for one in explain(error, config, root, path):
            allowed = None if one.allowed is None else _camel_words(one.allowed)
            steps = tuple(_camel(step) if isinstance(step, str) else step for step in one.path)
            self.findings.append(Finding(one.place, steps, _camel_words(one.message), allowed))

    def _is(self, plugin: _Plugin, kind: RoutingPartKind) -> bool:
        return not plugin.is_meaningless and plugin.type in self.registry.routing_parts(kind)

    def _unique(self, producers: Sequence[_Plugin]) -> list[Mapping[str, Any]]:
        kept: dict[str, _Plugin] = {}
        for one in producers:
            if kept.setdefault(one.type, one) is not one:
                reason = f"a router has one producer of each type, and {kept[one.type].name} is one of this type"
                self._no_use(one.path, one.name, reason)
        return [_choice(RoutingPartKind.PRODUCER, one) for one in kept.values()]

    # -- profiles -----------------------------------------------------------------------------------------------------

    def _profiles(self) -> dict[str, tuple[KeyPath, Mapping[str, Any]]]:
        """Return path and parts of each profile, by name."""
        if not self.root.get("schedulingProfiles"):
            everything = [(one.name, one.path, None) for one in self.plugins.values() if self._is_in_profiles(one)]
            return {"default": (("plugins",), self._parts(everything))}
        profiles: dict[str, tuple[KeyPath, Mapping[str, Any]]] = {}
        tree = self.root["schedulingProfiles"]
        for path, entry in self._entries(("schedulingProfiles",), tree, ("name", "plugins")):
            name = self._text(path, entry, "name")
            if name in profiles:
                self._found((*path, "name"), f"is given twice (got {name!r})")
            references = []
            for at, one in self._entries((*path, "plugins"), entry.get("plugins"), ("pluginRef", "weight")):
                reference = self._text(at, one, "pluginRef")
                weight = one.get("weight")
                if weight is not None and not is_number(weight):
                    self._found((*at, "weight"), f"must be a finite number (got {show(weight)})")
                elif reference and reference not in self.plugins:
                    allowed = did_you_mean(reference, self.plugins)
                    self._found((*at, "pluginRef"), f"names no plug-in of the file (got {reference!r})", allowed)
                elif reference:
                    references.append((reference, at, weight))
            profiles[name] = path, self._parts(references)
        return profiles

    def _is_in_profiles(self, plugin: _Plugin) -> bool:
        return any(self._is(plugin, kind) for kind in _IN_PROFILES)

    def _parts(self, references: Sequence[tuple[str, KeyPath, float | None]]) -> dict[str, Any]:
        filters, scorers, pickers = [], [], []
        for name, path, weight in references:
            plugin = self.plugins[name]
            if not plugin.is_meaningless and not self._is_in_profiles(plugin):
                message = f"is no filter, scorer or picker (got {name!r}, a {plugin.type})"
                self._found((*path, "pluginRef"), message)
            if self._is(plugin, RoutingPartKind.FILTER):
                filters.append(_choice(RoutingPartKind.FILTER, plugin))
            if self._is(plugin, RoutingPartKind.SCORER):
                own = _choice(RoutingPartKind.SCORER, plugin)
                scorers.append({**own, "weight": 1.0 if weight is None else float(weight)})
            if self._is(plugin, RoutingPartKind.PICKER):
                pickers.append((path, plugin))
        if not pickers:
            pickers = [(one.path, one) for one in self.plugins.values() if self._is(one, RoutingPartKind.PICKER)][:1]
        for path, plugin in pickers[1:]:
            self._found(
                (*path, "pluginRef"), f"is a second picker of the profile (got {plugin.name!r})", "Allowed: one"
            )
        picker = {"picker": _choice(RoutingPartKind.PICKER, pickers[0][1])} if pickers else {}
        return {"filters": filters, "scorers": scorers, **picker}

    # -- how profiles work together -----------------------------------------------------------------------------------

    def _params(self, profiles: Mapping[str, tuple[KeyPath, Mapping[str, Any]]]) -> dict[str, Any] | None:
        handlers = [one for one in self.plugins.values() if one.type in (_SINGLE, *_DISAGGREGATED)]
        handler = next((one for one in handlers if one.type != _SINGLE), None)
        if handler is None:
            if len(profiles) != 1:
                allowed = f"Allowed: one profile, or a plug-in of type {_DISAGGREGATED[0]}"
                self._found(
                    ("schedulingProfiles",), f"has {len(profiles)} profiles and nothing that says which holds", allowed
                )
                return None
            return dict(next(iter(profiles.values()))[1])
        return self._disaggregated(handler, profiles)

    def _disaggregated(
        self, handler: _Plugin, profiles: Mapping[str, tuple[KeyPath, Mapping[str, Any]]]
    ) -> dict[str, Any] | None:
        settings, path = handler.params, (*handler.path, "parameters")
        named, deciders = settings.get("profiles", {}), settings.get("deciders", {})
        names = {stage: named.get(stage) or settings.get(f"{stage}Profile") or stage for stage in _STAGES}
        if names["decode"] not in profiles:
            message = f"has no profile named {names['decode']!r}, without which nothing can be placed"
            self._found(("schedulingProfiles",), message, did_you_mean(names["decode"], profiles))
            return None
        stages = {"decode": names["decode"], "prefill": names["prefill"]}
        for name, (at, _) in profiles.items():
            if name not in stages.values():
                self._no_use(at, f"profile {name}", "prompts are computed and decoded, and there is no other stage")
        found = {stage: profiles[name][1] for stage, name in stages.items() if name in profiles}
        how: dict[str, Any] = {"order": settings.get("stageOrder") or "decode-first"}
        if how["order"] not in ("decode-first", "prefill-first"):
            allowed = "Allowed: decode-first, prefill-first"
            self._found((*path, "stageOrder"), f"is not known (got {show(how['order'])})", allowed)
        decider = (
            deciders.get("prefill") or settings.get("prefillDeciderPluginName") or settings.get("deciderPluginName")
        )
        if decider:
            self._add_decider(how, decider, path)
        return {"profiles": found, "disaggregation": how}

    def _add_decider(self, how: dict[str, Any], name: str, path: KeyPath) -> None:
        plugin = self.plugins.get(name)
        if plugin is None or not self._is(plugin, RoutingPartKind.DECIDER):
            known = [one.name for one in self.plugins.values() if self._is(one, RoutingPartKind.DECIDER)]
            message = f"names no decider of the file (got {name!r})"
            self._found((*path, "deciders", "prefill"), message, did_you_mean(name, known))
        elif how["order"] == "prefill-first":
            self._found((*path, "deciders", "prefill"), f"needs stageOrder decode-first (got {name!r})")
        else:
            how["decider"] = _choice(RoutingPartKind.DECIDER, plugin)


def _choice(kind: RoutingPartKind, plugin: _Plugin) -> dict[str, Any]:
    own: dict[str, Any] = {kind.value: plugin.type}
    return {**own, "params": dict(plugin.params)} if plugin.params else own


def _snake_keys(tree: Any) -> Any:
    """Return the tree with the keys of its mappings in snake case.

    Keys of label mappings are user data and stay unchanged.
    """
    if isinstance(tree, Entries):
        places: dict[Step, Place] = {_snake(key): tree.place_of(key) for key in tree}
        values = {_snake(key): each if key == "matchLabels" else _snake_keys(each) for key, each in tree.items()}
        return Entries(values, tree.place, places)
    if isinstance(tree, Items):
        return Items([_snake_keys(each) for each in tree], tree.place, tree.places)
    return tree


def _snake(key: str) -> str:
    key = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", key)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key).lower()


def _camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(each.upper() if each in ("ttft", "kv") else each.capitalize() for each in rest)


def _camel_words(text: str) -> str:
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda match: _camel(match[0]), text)
