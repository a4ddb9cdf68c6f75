"""Apply `--set a.b=c` overrides.

A value is parsed as YAML, so that numbers, lists and mappings can be given; list items are addressed by index; missing
mappings are created. Overrides take precedence over the file, and are applied before presets are expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vajra_py.config.places import Entries, Finding, KeyPath, PathError, Place, parse_path, put
from vajra_py.config.yaml_file import parse_yaml
from vajra_py.errors import ConfigError


def parse_override(text: str) -> tuple[KeyPath, Any, Place]:
    """Parse the path, the value and the place of one `a.b=c`; raises `ConfigError`."""
    name, equals, value = text.partition("=")
    name = name.strip()
    place = Place(f"--set {name}", path=name)
    if not equals or not name or not all(parse_path(name)):
        example = "Write --set path.to.key=value, such as --set scheduling.request_prioritizer.policy=edf"
        raise ConfigError(Finding(Place(f"--set {text}"), (), "is not an assignment", example).problem())
    return parse_path(name), parse_yaml(value, place), place


def apply_overrides(
    root: Entries, overrides: Iterable[str], normalise: Callable[[Entries], Entries]
) -> tuple[Entries, list[Finding]]:
    """Return the tree with all overrides applied in order, and the findings of invalid overrides; `normalise` expands
    short forms.
    """
    findings: list[Finding] = []
    for text in overrides:
        try:
            path, value, place = parse_override(text)
        except ConfigError as error:
            findings += [Finding(Place(each.where), (), each.message, each.allowed) for each in error.problems]
            continue
        try:
            root = normalise(put(root, path, value, place))
        except PathError as error:
            findings.append(Finding(place, path, str(error)))
    return root, findings
