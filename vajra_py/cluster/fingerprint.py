"""Fingerprint of an installation: properties that must be equal on every machine for results to be equal."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from vajra_py.config import versions
from vajra_py.plugins import load_registry
from vajra_py.plugins.discovery import GROUP, code_digest

EVERY_NODE = "Every node needs what this machine has."


def fingerprint() -> dict[str, str]:
    """Return the properties by name: versions of Python, this package, libraries and plug-ins, and digests of the code
    of this package and the plug-ins.
    """
    found = versions()
    found["code of vajra_py"] = code_digest("vajra_py")
    modules = {entry.name: entry.module for entry in metadata.entry_points(group=GROUP)}
    for one in load_registry().plugins:
        code = code_digest(modules[one.entry_point])
        found[f"plug-in {one.entry_point} of {one.package}"] = f"version {one.version}, code {code}"
    return found


def difference(own: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return a description of the first difference between this machine (`own`) and a node (`found`); empty if there
    is none.
    """
    for name in dict.fromkeys([*own, *found]):
        here, there = own.get(name, "absent"), found.get(name, "absent")
        if here != there:
            return f"has another {name} ({there}; here: {here})"
    return ""
