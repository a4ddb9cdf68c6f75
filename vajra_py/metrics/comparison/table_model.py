"""Tables as plain data: what a cell says, and how a table is cut to a width. `table_renderers` writes them for terminals, Markdown and LaTeX, the report's template as HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

BEST = "*"
LOWEST = "↓"
HIGHEST = "↑"
WORSE = "†"


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as it is shown."""

    text: str
    spread: str = ""
    """Its interval, in smaller type where there is any."""
    mark: str = ""
    """One of the marks of this module."""
    label: str | None = None
    """A stability label, which has a colour."""
    is_quiet: bool = False
    """Shown in grey: a value that takes no part in comparisons."""

    @property
    def is_bold(self) -> bool:
        """A mark of the lowest or highest value."""
        return self.mark in (BEST, LOWEST, HIGHEST)

    @property
    def plain(self) -> str:
        """The cell in one line of text."""
        return " ".join(filter(None, (self.text + self.mark, self.spread)))


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and its cells."""

    head: str
    cells: tuple[Cell, ...]
    starts: bool = False
    """A rule is drawn above it."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, or one of those that a wide one was cut into."""

    corner: str
    """Heading of the column of headings."""
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    """Sentences without their stops: what the table shows, what its marks mean."""
    text_columns: frozenset[int] = frozenset()
    """Columns of words, which start at the left."""
    num_pinned: int = 0
    """Columns at the start that are repeated in each piece of a table that is cut."""


def fold(table: Table, width: float, cell_width: Callable[[Cell], float], padding: float) -> list[Table]:
    """The table cut into such that fit the width, row headings and pinned columns in each; notes stand below the last.

    `cell_width`: of a cell, in the unit of `width`; `padding`: of a column, beside its cells. Heads are broken between words. A column that is too wide by itself is not cut.
    """

    def width_of(i: int) -> float:
        words = [Cell(word) for word in table.heads[i].split()]
        return max(map(cell_width, (*words, *(row.cells[i] for row in table.rows))), default=0.0) + padding

    pinned = list(range(min(table.num_pinned, len(table.heads))))
    first = max((cell_width(Cell(row.head)) for row in table.rows), default=0.0) + padding + sum(map(width_of, pinned))
    parts = [list(pinned)]
    used = first
    for i in range(len(pinned), len(table.heads)):
        needed = width_of(i)
        if len(parts[-1]) > len(pinned) and used + needed > width:
            parts.append(list(pinned))
            used = first
        parts[-1].append(i)
        used += needed
    return [
        replace(
            table,
            heads=tuple(table.heads[i] for i in part),
            rows=tuple(replace(row, cells=tuple(row.cells[i] for i in part)) for row in table.rows),
            title=table.title if number == 0 else "",
            notes=table.notes if number == len(parts) - 1 else (),
            text_columns=frozenset(at for at, i in enumerate(part) if i in table.text_columns),
        )
        for number, part in enumerate(parts)
    ]
