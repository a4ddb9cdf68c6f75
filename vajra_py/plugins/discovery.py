"""Discover installed plug-ins and check that they implement the hooks as specified.

Entry points of the group `vajra` are loaded one by one, so that every failure is reported with the name and version of
its package. Nothing is skipped: an unusable plug-in ends the program unless `VAJRA_DISABLE_PLUGINS` (names of entry
points or packages, separated by commas) excludes it.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pluggy
from msgspec import Struct

from vajra_py import __version__
from vajra_py.contract import hookspecs
from vajra_py.errors import PluginError, did_you_mean
from vajra_py.plugins.registry import DISABLE_VARIABLE, PluginSource, Registry

GROUP = "vajra"
BUILTIN = PluginSource("vajra-py", __version__, "vajra_py.latency")

Claim: TypeAlias = tuple[PluginSource, object]


def load_registry() -> Registry:
    """Return the registry of installed plug-ins, built once per process (and per value of `VAJRA_DISABLE_PLUGINS`).

    Raises `PluginError` with entry point, package and version of the first unusable plug-in.
    """
    return _cached_registry(os.environ.get(DISABLE_VARIABLE, ""))


@lru_cache(maxsize=4)
def _cached_registry(disabled: str) -> Registry:
    return build_registry(_installed_entry_points(), disabled)


def _installed_entry_points() -> list[metadata.EntryPoint]:
    """Return the entry points of the group `vajra`. Metadata files that do not contain the group's name are not parsed;
    of a package that is installed twice, the first on the path counts.
    """
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        if f"[{GROUP}]" in (each.read_text("entry_points.txt") or ""):
            found.setdefault(normalised(each.name), each)
    return [entry for each in found.values() for entry in each.entry_points.select(group=GROUP)]


def build_registry(entry_points: Iterable[metadata.EntryPoint], disabled: str = "") -> Registry:
    """Build the registry of these entry points, without those in `disabled` (comma-separated), and cache nothing."""
    found = sorted(((_source(entry), entry) for entry in entry_points), key=lambda pair: _load_order(pair[0]))
    switched_off = _disabled(disabled, [source for source, _ in found])
    loader = _Loader(pluggy.PluginManager(hookspecs.PROJECT), {})
    loader.manager.add_hookspecs(hookspecs)
    sources = []
    for source, entry in found:
        if not switched_off & {source.entry_point, normalised(source.package)}:
            loader.register(source, entry)
            sources.append(source)
    policies, presets = loader.claims("vajra_policies"), loader.claims("vajra_presets")
    return Registry(tuple(sources), policies, presets, loader.claims_with_builtins)


class _Loader(Struct, frozen=True):
    """Plug-in manager, and the source of each registered plug-in."""

    manager: pluggy.PluginManager
    sources: dict[str, PluginSource]

    def register(self, source: PluginSource, entry: metadata.EntryPoint) -> None:
        """Import a plug-in and check its hooks; raises `PluginError`."""
        try:
            plugin = entry.load()
        except (Exception, SystemExit) as error:
            reason = f"cannot be imported: {entry.value!r} raised {type(error).__name__} ({error})"
            raise PluginError(str(source), reason) from error
        name = f"{source.package}:{source.entry_point}"
        try:
            self.manager.register(plugin, name)
        except (ValueError, pluggy.PluginValidationError) as error:
            reason = " ".join(str(error).split())
            raise PluginError(str(source), f"does not implement the hooks as specified: {reason}") from error
        self.sources[name] = source
        self._check_hooks(source, plugin, entry.value)

    def _check_hooks(self, source: PluginSource, plugin: object, module: str) -> None:
        known = sorted(name for name in vars(hookspecs) if name.startswith("vajra_"))
        callers = self.manager.get_hookcallers(plugin) or []
        for caller in callers:
            if not caller.has_spec():
                reason = f"{module!r} implements the unknown hook {caller.name!r}"
                raise PluginError(str(source), f"{reason}. {did_you_mean(caller.name, known)}")
        unmarked = [name for name in known if callable(getattr(plugin, name, None))]
        if not callers and unmarked:
            raise PluginError(str(source), f"{module!r} defines {unmarked[0]!r} without the decorator @hookimpl")
        if not callers:
            raise PluginError(str(source), f"{module!r} implements no hook. Known hooks: {', '.join(known)}")

    def claims(self, hook: str) -> Sequence[Claim]:
        """Call a hook of every plug-in and return the results in load order; raises `PluginError` if one fails."""
        implementations = {each.plugin_name: each for each in getattr(self.manager.hook, hook).get_hookimpls()}
        claims: list[Claim] = []
        for name, source in self.sources.items():
            if name in implementations:
                claims += [(source, value) for value in _answer(source, hook, implementations[name])]
        return claims

    def claims_with_builtins(self, hook: str) -> Sequence[Claim]:
        """Return the framework's own specs for a hook, followed by the results of `claims`."""
        return [*((BUILTIN, spec) for spec in _builtin_specs(hook)), *self.claims(hook)]


def _answer(source: PluginSource, hook: str, implementation: pluggy.HookImpl) -> Iterator[object]:
    try:
        answer = implementation.function()
        if not isinstance(answer, Iterable) or isinstance(answer, str | bytes) or inspect.isclass(answer):
            raise PluginError(str(source), f"{hook} returned {answer!r}; expected a list")
        yield from answer
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(str(source), f"{hook} raised {type(error).__name__} ({error})") from error


def _builtin_specs(hook: str) -> Sequence[object]:
    """Return the framework's own specs, imported on demand: listing policies does not need the models' arithmetic."""
    if hook == "vajra_latency_models":
        from vajra_py.latency import BUILTIN_LATENCY_MODELS

        return BUILTIN_LATENCY_MODELS
    if hook == "vajra_output_length_predictors":
        from vajra_py.latency import BUILTIN_OUTPUT_LENGTHS

        return BUILTIN_OUTPUT_LENGTHS
    return ()


def _source(entry: metadata.EntryPoint) -> PluginSource:
    distribution = entry.dist
    if distribution is None:
        return PluginSource("an unnamed package", "of unknown version", entry.name)
    code = "" if normalised(distribution.name) == BUILTIN.package else code_digest(entry.value.partition(":")[0])
    return PluginSource(distribution.name, distribution.version, entry.name, code)


def code_digest(module: str) -> str:
    """Return a digest of the Python source of a module's top-level package, which distinguishes checkouts of the same
    version.
    """
    try:
        spec = find_spec(module.partition(".")[0])
    except ValueError:  # it has no name, or was not made from a file
        spec = None
    if spec is None:
        return "none"
    digest = hashlib.blake2b(digest_size=6)
    folders = [Path(one) for one in spec.submodule_search_locations or ()]
    files = [(path.relative_to(folder), path) for folder in folders for path in folder.rglob("*.py") if path.is_file()]
    if not folders and spec.origin:
        files = [(Path(spec.origin).relative_to(Path(spec.origin).parent), Path(spec.origin))]
    for name, path in sorted(files):
        digest.update(str(name).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _load_order(source: PluginSource) -> tuple[bool, str, str]:
    """Return the sort key of plug-ins: the framework's own first, then by name.

    Listings use this order. If two plug-ins offer the same name, the error blames the later one.
    """
    return normalised(source.package) != BUILTIN.package, normalised(source.package), source.entry_point


def normalised(package: str) -> str:
    """Return a distribution's name in the normalized spelling used for comparisons."""
    return package.lower().replace("_", "-").replace(".", "-")


def _disabled(names: str, sources: Sequence[PluginSource]) -> frozenset[str]:
    """Return the names of entry points and packages to leave out.

    Raises `PluginError` for a name that matches no plug-in, because it would disable nothing.
    """
    known: dict[str, str] = {}
    for source in sources:
        known[source.entry_point] = source.entry_point
        known[source.package] = known[normalised(source.package)] = normalised(source.package)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise PluginError(
                repr(name), f"{DISABLE_VARIABLE} names it, but it is not installed. {did_you_mean(name, known)}"
            )
    return frozenset(known[name] for name in wanted)
