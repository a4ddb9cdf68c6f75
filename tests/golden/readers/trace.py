"""Result of a comparison with a recorded run, with the first difference."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Step: TypeAlias = Mapping[str, Any]
"""One step of a trace, in the trace's own fields; ours is told in the same ones."""


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference of a run from its trace."""

    step: str
    field: str
    expected: Any
    actual: Any
    expected_state: Sequence[str] = ()
    """The recorded side around it, line by line."""
    actual_state: Sequence[str] = ()
    """Our side: the step, and every request that is alive."""

    def lines(self) -> list[str]:
        """Return readable lines: the difference, then both sides."""
        return [
            f"step {self.step}: {self.field}",
            f"  recorded: {self.expected}",
            f"  here:     {self.actual}",
            "  recorded side:",
            *(f"    {line}" for line in self.expected_state),
            "  this side:",
            *(f"    {line}" for line in self.actual_state),
        ]


@dataclass(frozen=True, slots=True)
class Result:
    """Result for one trace."""

    system: str
    name: str
    num_compared: int
    """Steps compared, the differing one included; or requests."""
    difference: Difference | None = None
    unit: str = "steps"
    """Unit of comparison."""
    note: str = ""
    """Additional information on a match."""

    @property
    def matches(self) -> bool:
        """True if all compared values are equal."""
        return self.difference is None


def first_difference(expected: Step, actual: Step) -> str | None:
    """Return a description of the first field of `actual` that differs from the recorded step."""
    for field, value in actual.items():
        if field in expected and expected[field] != value:
            return field
    return None


def read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The traces of one file with their names: one of a .json file, one a line of a .jsonl file, either may be gzip'd."""
    name = path.name.removesuffix(".gz")
    with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as stream:
        if name.endswith(".json"):
            yield name.removesuffix(".json"), json.load(stream)
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{name.removesuffix('.jsonl')}:{number}", json.loads(line)
