"""Copy the file of a library policy, with names changed, as the start of a new package."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vajra_py.contract import Layer
from vajra_py.contract.hookspecs import AnyPolicySpec
from vajra_py.errors import ConfigError, Problem, UnknownNameError
from vajra_py.plugins.registry import ADMISSION, RETENTION, SCALER, Registry

LIBRARY = "vajra_policies"
"""Package whose policies are copied."""


@dataclass(frozen=True, slots=True)
class Interface:
    """Names by which policies of one kind are offered, checked and selected."""

    spec: str
    """Class of their specs, in `vajra_py.contract`."""
    hook: str
    check: str
    """Conformance suite, in `vajra_py.testing`."""
    key: str
    """Key under `scheduling:`."""


_OF_A_LAYER = {layer: Interface("PolicySpec", "vajra_policies", "check_policy", layer.value) for layer in Layer}
_BESIDE_LAYERS = {
    "admission": Interface("AdmissionSpec", ADMISSION.hook, "check_admission_policy", ADMISSION.key),
    "scaler": Interface("ScalerSpec", SCALER.hook, "check_scaler", SCALER.key),
    "retention": Interface("RetentionSpec", RETENTION.hook, "check_retention", RETENTION.key),
}
"""Interfaces of policies that belong to no layer, by kind of package."""


@dataclass(frozen=True, slots=True)
class CopiedPolicy:
    """Copy of a library policy's file, in which every policy has a new name."""

    original: str
    """Name of the policy in the library."""
    name: str
    """Name of the policy in the copy."""
    summary: str
    interface: Interface
    module: str
    """Name of the file without its suffix."""
    source: str
    specs: tuple[str, ...]
    """Variables of the file that hold the specs of its policies."""
    helpers: tuple[str, ...]
    """Modules of the library that the file imports."""


def copied_policy(name: str, prefix: str, registry: Registry, kind: str | None = None) -> CopiedPolicy:
    """Copy the file of the library policy `name`; the copy's policies are named `prefix`, `_` and their old names.

    `kind` (of `scaffold.KINDS`) selects among policies of different kinds that share the name; by default, policies of
    the layers take precedence. Raises `UnknownNameError` if the library has no such policy, and `ConfigError` if its
    file does not state its policies' names as literals.
    """
    spec, interface = _library_policy(name, registry, kind)
    module = sys.modules[spec.build.__module__]
    original = inspect.getsource(module)
    tree = ast.parse(original)
    offers = dict(_offers_in(tree, interface.spec))
    if name not in offers:
        hint = f"Copy {module.__file__} by hand"
        raise ConfigError(Problem("--from", f"the file of {name!r} does not state that name", hint))
    source = _renamed(original, offers, prefix)
    specs = tuple(variable for variable, _ in offers.values())
    stem = module.__name__.rpartition(".")[2]
    return CopiedPolicy(name, f"{prefix}_{name}", spec.summary, interface, stem, source, specs, _helpers_in(tree))


def _library_policy(name: str, registry: Registry, kind: str | None) -> tuple[AnyPolicySpec, Interface]:
    found: list[tuple[AnyPolicySpec, Interface]] = []
    if kind is None or kind not in _BESIDE_LAYERS:
        found += [(one.spec, _OF_A_LAYER[layer]) for layer in Layer for one in registry.policies(layer).values()]
    for one_kind, interface in _BESIDE_LAYERS.items():
        if kind in (None, one_kind):
            found += [(one.spec, interface) for one in registry.beside_layers[interface.key].values()]
    library = [one for one in found if one[0].build.__module__.partition(".")[0] == LIBRARY]
    for one in library:
        if one[0].name == name:
            return one
    raise UnknownNameError("library policy", name, {spec.name for spec, _ in library})


def _offers_in(tree: ast.Module, spec: str) -> Iterator[tuple[str, tuple[str, ast.Call]]]:
    """Yield name, variable and call of each policy that a file offers as `VARIABLE = Spec(name="…", …)`."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(variable)], value=ast.Call(func=ast.Name(called)) as call) if (
                called == spec
            ):
                for keyword in call.keywords:
                    if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                        yield str(keyword.value.value), (variable, call)


def _renamed(source: str, offers: Mapping[str, tuple[str, ast.Call]], prefix: str) -> str:
    """Return the source with the prefix before the policies' names.

    Aliases are removed: they would clash with those of the library.
    """
    lines = source.splitlines(keepends=True)
    for name, (_, call) in offers.items():
        for keyword in call.keywords:
            first, last = keyword.lineno - 1, (keyword.end_lineno or keyword.lineno) - 1
            if keyword.arg == "name":
                lines[first] = lines[first].replace(f'"{name}"', f'"{prefix}_{name}"')
            elif keyword.arg == "aliases":
                lines[first : last + 1] = [""] * (last + 1 - first)
    names = "|".join(re.escape(name) for name in offers)
    return re.sub(rf"`({names})`", rf"`{prefix}_\1`", "".join(lines))


def _helpers_in(tree: ast.Module) -> tuple[str, ...]:
    imports = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return tuple(one for one in imports if one.partition(".")[0] == LIBRARY)
