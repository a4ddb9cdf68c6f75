"""Tables as plain data, and splitting of a table to a given width. `table_renderers` renders them for terminals and as
Markdown, LaTeX, CSV and HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

BEST = "*"
LOWEST = "↓"
HIGHEST = "↑"
WORSE = "†"


class Cell(Struct, frozen=True):
    """One displayed value."""

    text: str
    spread: str = ""
    """Interval of the value as text; in smaller type if the format supports it."""
    mark: str = ""
    """One of this module's marks, or empty."""
    label: str | None = None
    """Stability label, which selects a colour."""
    is_quiet: bool = False
    """True if shown in grey, for a value that is excluded from comparisons."""
    value: float | int | bool | str | None = None
    """Raw value for CSV; None to use the text."""

    @property
    def is_bold(self) -> bool:
        """True if the mark is that of the best, lowest or highest value."""
        return self.mark in (BEST, LOWEST, HIGHEST)

    @property
    def plain(self) -> str:
        """The cell in one line of text."""
        return " ".join(filter(None, (self.text + self.mark, self.spread)))


class Row(Struct, frozen=True):
    """Row heading and cells."""

    head: str
    cells: tuple[Cell, ...]
    starts: bool = False
    """True if a rule is drawn above the row."""


class Table(Struct, frozen=True):
    """Table, or one piece of a split table."""

    corner: str
    """Heading of the column of row headings."""
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    """Sentences without full stops that explain the table and its marks."""
    text_columns: frozenset[int] = frozenset()
    """Positions of the columns that contain words; they are left-aligned."""
    num_pinned: int = 0
    """Number of leading columns that are repeated in each piece of a split table."""
    keys: tuple[str, ...] = ()
    """Names of the columns in CSV, starting with the column of row headings; by default the displayed headings."""
    csv_only: frozenset[int] = frozenset()
    """Positions of the columns that only CSV has."""

    @property
    def for_readers(self) -> Table:
        """The table without its CSV-only columns."""
        return self.part([i for i in range(len(self.heads)) if i not in self.csv_only]) if self.csv_only else self

    def part(self, columns: Sequence[int]) -> Table:
        """Return the table with only these columns, in this order, and without names for CSV."""
        return structs.replace(
            self,
            heads=tuple(self.heads[i] for i in columns),
            rows=tuple(structs.replace(row, cells=tuple(row.cells[i] for i in columns)) for row in self.rows),
            text_columns=frozenset(at for at, i in enumerate(columns) if i in self.text_columns),
            keys=(),
            csv_only=frozenset(),
        )


def table_of_texts(heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> Table:
    """Return a table of texts; the first entry of each row is its heading."""
    found = tuple(Row(str(first), tuple(Cell(str(one)) for one in rest)) for first, *rest in rows)
    return Table(heads[0], tuple(heads[1:]), found, title, text_columns=frozenset(range(len(heads) - 1)))


def least_cells(table: Table, column: int, *, wraps: bool) -> list[Cell]:
    """Return cells whose largest width is a column's minimum width: a cell for each word of the heading, and the cells
    of the column. If `wraps` is set, the cells of a text column are replaced by a cell for each of their words.
    """
    cells = [row.cells[column] for row in table.rows]
    if wraps and column in table.text_columns:
        cells = [structs.replace(cell, text=word) for cell in cells for word in cell.text.split()]
    return [*map(Cell, table.heads[column].split()), *cells]


def fold(
    table: Table, width: float, cell_width: Callable[[Cell], float], padding: float, *, wraps: bool = False
) -> list[Table]:
    """Split the table into pieces that fit the width, each with row headings and pinned columns; the last piece has the
    notes.

    `cell_width` returns a cell's width in the unit of `width` and `padding`; `padding` is added per column. Headings
    may be broken between words, and with `wraps` also cells of text columns. A column that is too wide is not split.
    """

    def width_of(i: int) -> float:
        return max(map(cell_width, least_cells(table, i, wraps=wraps)), default=0.0) + padding

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
        structs.replace(
            table.part(part),
            title=table.title if number == 0 else "",
            notes=table.notes if number == len(parts) - 1 else (),
        )
        for number, part in enumerate(parts)
    ]
