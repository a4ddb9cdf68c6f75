"""Load a file or a mapping as a complete experiment or system, or report everything that is wrong with it.

The steps are: read, expand short forms, apply overrides; then for each point of the sweep: apply the point, expand
presets, complete replicasets, check the parts that plug-ins define, check the schema. Mistakes from every step that
could be executed are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, structs
from pydantic import ValidationError

from vajra_py.config.choices import PluginParts
from vajra_py.config.explain import explain
from vajra_py.config.hand_off import HandOffConfig, MigrationConfig
from vajra_py.config.links import LinksConfig
from vajra_py.config.overrides import apply_overrides
from vajra_py.config.places import Entries, Finding, Place, in_order, plain, written_at
from vajra_py.config.presets import expand, long_forms, without_policies
from vajra_py.config.schema import ExperimentConfig, SystemConfig
from vajra_py.config.sections import MAX_REPLICATIONS
from vajra_py.config.sweeps import SweepPoint, replicated, sweep_points
from vajra_py.config.yaml_file import mapping_of, read_yaml
from vajra_py.errors import ConfigError, Problem
from vajra_py.plugins import Registry, load_registry

EXPERIMENT_KEYS = tuple(key for key in ExperimentConfig.model_fields if key not in SystemConfig.model_fields)
"""Keys that only experiments have; a file with any of them is an experiment, not a system."""


class Source(Struct, frozen=True):
    """Origin of a configuration: the tree as written with overrides applied, and the expanded points of its sweep."""

    root: Entries
    points: tuple[tuple[SweepPoint, ExperimentConfig], ...]


class Context(Struct, frozen=True):
    """Context for checking a tree."""

    registry: Registry
    base_folder: Path | None = None
    may_be_system: bool = False
    """True if a tree without any key of an experiment is checked as a system; False if a missing workload is an
    error.
    """

    @property
    def model(self) -> type[SystemConfig]:
        """Model that the tree is checked against."""
        return SystemConfig if self.may_be_system else ExperimentConfig


def load_config(
    path: str | Path, overrides: Iterable[str] = (), registry: Registry | None = None, *, drops_policies: bool = False
) -> ExperimentConfig:
    """Load the experiment of a YAML file with `overrides` (`a.b=c`) applied.

    With `drops_policies`, the file's preset and all its policies are left out, and those of the overrides remain. A
    file with a sweep yields the experiment of its first point; see `expand_sweep`.

    Raises `ConfigError` with every mistake of the file, of the overrides and of every point of the sweep; `PluginError`
    when an installed package is broken.
    """
    context = Context(registry or load_registry(), Path(path).parent)
    root, place = _named(path)
    if drops_policies:
        root = without_policies(mapping_of(root, place))
    return cast(ExperimentConfig, _load(root, place, overrides, context))


def load_system(path: str | Path, overrides: Iterable[str] = (), registry: Registry | None = None) -> SystemConfig:
    """Load the system of a YAML file; the result is an `ExperimentConfig` if the file has a workload.

    Raises like `load_config`, and `ConfigError` for a sweep or replications.
    """
    root, place = _named(path)
    _check_one_setting(root, place, overrides)
    return _load(root, place, overrides, Context(registry or load_registry(), Path(path).parent, may_be_system=True))


def load_either(path: str | Path, overrides: Iterable[str] = (), registry: Registry | None = None) -> SystemConfig:
    """Load a YAML file: a system if it has no key that only experiments have, otherwise an experiment.

    Raises like `load_config`.
    """
    context = Context(registry or load_registry(), Path(path).parent, may_be_system=True)
    return _load(*_named(path), overrides, context)


def system_from_mapping(
    mapping: Mapping[str, Any], overrides: Iterable[str] = (), registry: Registry | None = None
) -> SystemConfig:
    """Load a system from a mapping that has the same keys as a configuration file.

    Raises like `load_system`; errors give the path of a setting in place of file and line.
    """
    root = written_at(Place(), mapping)
    _check_one_setting(root, Place(), overrides)
    return _load(root, Place(), overrides, Context(registry or load_registry(), may_be_system=True))


def config_from_mapping(
    mapping: Mapping[str, Any], overrides: Iterable[str] = (), registry: Registry | None = None
) -> ExperimentConfig:
    """Load the experiment of a mapping with the keys of a file.

    Raises like `load_config`; errors give the path of a setting in place of file and line.
    """
    context = Context(registry or load_registry())
    return cast(ExperimentConfig, _load(written_at(Place(), mapping), Place(), overrides, context))


def expand_sweep(
    config: ExperimentConfig, registry: Registry | None = None
) -> list[tuple[SweepPoint, ExperimentConfig]]:
    """Return the points of the experiment's sweep in order, each with its complete experiment.

    Each point occurs once for every replication; a single run has one empty point. The returned experiments have
    neither a sweep nor replications. Raises `ConfigError`.
    """
    if config.is_single:
        return [(SweepPoint({}, config.name, config.name), config)]
    source = config._source
    if isinstance(source, Source):
        return list(source.points)
    root = long_forms(written_at(Place(), config.model_dump(mode="json", exclude_unset=True)))
    return list(_points(root, Context(registry or load_registry())))


def dump_effective(config: SystemConfig) -> str:
    """Return the settings of `effective_settings` as YAML."""
    return dump_yaml(effective_settings(config))


def effective_settings(config: SystemConfig) -> dict[str, Any]:
    """Return the experiment as plain values; `config_from_mapping` builds an equal experiment from them.

    Defaults and nulls are kept. Unset sections are left out, and so are `pools`, `hand_off`, `links` and `migration`
    at their defaults. For a sweep, return the experiment as written with overrides applied, because defaults differ
    between points.
    """
    source = config._source
    if isinstance(config, ExperimentConfig) and not config.is_single and isinstance(source, Source):
        data: dict[str, Any] = plain(source.root)
    else:
        data = config.model_dump(mode="json", by_alias=True)
        for key in ("preset", "scheduling", "sweep", "replicasets", "capacity"):
            if not data.get(key):
                data.pop(key, None)
        for section in (data, *data.get("replicasets", {}).values()):
            for key, default in _NOTHING_MOVES.items():
                if section.get(key) == default:
                    del section[key]
        for own in (data["backend"].get("simulator") or {}).get("replicasets", {}).values():
            if not own.get("pools"):
                own.pop("pools", None)
    return data


def dump_yaml(data: Any) -> str:
    """Return dicts, lists and scalars as YAML in block style, with keys in insertion order."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    out = StringIO()
    yaml.dump(data, out)
    return out.getvalue()


_NOTHING_MOVES: Mapping[str, Any] = {
    "pools": {},
    "hand_off": HandOffConfig().model_dump(mode="json"),
    "links": LinksConfig().model_dump(mode="json"),
    "migration": MigrationConfig().model_dump(mode="json"),
}
"""Keys that `dump_effective` omits while they have these default values."""


def _named(path: str | Path) -> tuple[Any, Place]:
    """Return the tree of a file and the place of its first line; a missing `name` is filled in from the file's name."""
    root, place = read_yaml(path), Place(str(path), 1)
    if isinstance(root, Entries) and "name" not in root:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-._")
        root = root.replaced("name", stem or "experiment", place)
    return root, place


def _check_one_setting(root: Any, place: Place, overrides: Iterable[str]) -> None:
    """Raise `ConfigError` for a sweep or replications: a system has one value for each setting."""
    root, _ = apply_overrides(long_forms(mapping_of(root, place)), overrides, long_forms)
    what = "sweep" if root.get("sweep") is not None else "replications" if _replications(root) > 1 else None
    if what is not None:
        where = f"{place.source} {what}" if place.source else what
        raise ConfigError(Problem(where, "expected one system, not several settings", f"Leave the {what} out"))


def _load(root: Any, place: Place, overrides: Iterable[str], context: Context) -> SystemConfig:
    root, findings = apply_overrides(long_forms(mapping_of(root, place)), overrides, long_forms)
    if any(key in root for key in EXPERIMENT_KEYS):
        context = structs.replace(context, may_be_system=False)
    sweep, count = root.get("sweep"), _replications(root)
    if sweep is None and count == 1:
        config, more = _resolve(root.without("sweep"), context)
        if config is None or findings:
            raise ConfigError(in_order([*findings, *more]))
        config._source = Source(root, ())
        return config
    points = _points(root, context, findings)
    base = points[0][1].model_copy(update={"sweep": plain(sweep), "replications": count})
    base._source = Source(root, points)
    return base


def _replications(root: Entries) -> int:
    """Return the number of runs of each setting; 1 for an invalid value, which the schema then reports."""
    value = root.get("replications")
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_REPLICATIONS else 1


def _replicated(points: list[SweepPoint], root: Entries) -> tuple[list[SweepPoint], list[Finding]]:
    """Return each point once for every seed of the replications, and the findings of wrong settings."""
    count, first = _replications(root), root.get("seed", 0)
    if count == 1 or not isinstance(first, int):  # the schema rejects seeds of other types
        return points, []
    place = root.place_of("replications")
    try:
        return replicated(points, range(first, first + count), place), []
    except ValueError as error:
        return [], [Finding(place, ("replications",), str(error), "Allowed: one of the two")]


def _points(
    root: Entries, context: Context, findings: Iterable[Finding] = ()
) -> tuple[tuple[SweepPoint, ExperimentConfig], ...]:
    """Return every point with its experiment; raises `ConfigError` with the problems of all points (and `findings`)."""
    found = list(findings)
    base = root.without("sweep")
    if (sweep := root.get("sweep")) is None:
        points, wrong = [SweepPoint({}, "", "")], list[Finding]()
    else:
        points, wrong = sweep_points(sweep, root.place_of("sweep"))
    found += wrong
    if _replications(root) > 1:
        base = base.without("replications")
        points, wrong = _replicated(points, root)
        found += wrong
    if not points:
        _, more = _resolve(base, context)
        raise ConfigError(in_order([*found, *more]))
    done: list[tuple[SweepPoint, ExperimentConfig]] = []
    for point in points:
        tree, wrong = point.apply(base)
        if wrong:
            found += wrong
            continue
        config, more = _resolve(long_forms(tree), context)
        found += more
        if config is not None:
            config._source = Source(tree, ())
            done.append((point, cast(ExperimentConfig, config)))
    if found:
        raise ConfigError(in_order(found))
    return tuple(done)


def _resolve(root: Entries, context: Context) -> tuple[SystemConfig | None, list[Finding]]:
    """Return the experiment or system of a tree without a sweep (None if there are findings), and the findings."""
    model = context.model
    root, findings = expand(root, context.registry)
    parts = PluginParts(root, context.registry, context.base_folder)
    parts.check()
    findings += parts.findings
    try:
        config = model.model_validate(parts.data)
    except ValidationError as error:
        findings += explain(error, model, root)
        return None, findings
    return (None if findings else config), findings
