"""Apply `--set a.b=c` overrides.

A value is read as YAML, so that numbers, lists and mappings can be given; lists are addressed by index; mappings that
are not there yet are made. An override is applied to what the file says, before presets are expanded, and wins over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vajra_py.config.nodes import Finding, KeyPath, Node, Place, dotted, parse_path
from vajra_py.config.yaml_file import parse_yaml
from vajra_py.errors import ConfigError


class PathError(ValueError):
    """A path does not lead anywhere in this tree."""


def parse_override(text: str) -> tuple[KeyPath, Node]:
    """The path and the value of one `a.b=c`; raises `ConfigError`."""
    name, equals, value = text.partition("=")
    name = name.strip()
    place = Place(f"--set {name}", path=name)
    if not equals or not name or not all(parse_path(name)):
        example = "Write --set path.to.key=value, such as --set scheduling.request_prioritizer.policy=edf"
        raise ConfigError(Finding(Place(f"--set {text}"), (), "is not an assignment", example).problem())
    return parse_path(name), parse_yaml(value, place)


def apply_overrides(
    root: Node, overrides: Iterable[str], normalise: Callable[[Node], Node]
) -> tuple[Node, list[Finding]]:
    """The tree with every override applied in order, and what is wrong with the others; `normalise` writes out short forms."""
    findings: list[Finding] = []
    for text in overrides:
        try:
            path, node = parse_override(text)
        except ConfigError as error:
            findings += [Finding(Place(each.where), (), each.message, each.allowed) for each in error.problems]
            continue
        try:
            root = normalise(put(root, path, node))
        except PathError as error:
            findings.append(Finding(node.place, path, str(error)))
    return root, findings


def put(root: Node, path: KeyPath, node: Node) -> Node:
    """The tree with the value at `path` set; indices in the path become numbers. Raises `PathError`."""
    steps: list[str | int] = []
    at: Node | None = root
    for step in path:
        if at is not None and at.items is not None:
            step = _index(step, len(at.items), dotted(steps))
        elif at is not None and at.entries is None and at.value is not None:
            raise PathError(f"{dotted(steps)!r} is neither a mapping nor a list (it is {at.value!r})")
        steps.append(step)
        at = at.get(step) if at is not None else None
    return root.put(tuple(steps), node)


def _index(step: str | int, length: int, inside: str) -> int:
    text = str(step)
    if not text.isdigit() or int(text) >= length:
        allowed = f"0 to {length - 1}" if length else "nothing, as the list is empty"
        raise PathError(f"{inside!r} is a list, and {text!r} is not an index of it; allowed: {allowed}")
    return int(text)
