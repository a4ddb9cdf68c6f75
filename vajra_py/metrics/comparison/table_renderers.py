"""Write a table model for a terminal, as Markdown and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vajra_py.metrics.comparison.table_model import BEST, HIGHEST, LOWEST, WORSE, Cell, Table, fold

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable
    from rich.text import Text

_GAP = 2
"""Characters between two columns on a terminal."""
_LATEX_MARKS = {BEST: "*", LOWEST: r"\downarrow", HIGHEST: r"\uparrow", WORSE: r"\dagger"}
_PAGE_PT = 468.0
"""Width of the text of a page of LaTeX's `article` with margins of an inch, points."""
_DIGIT_PT = 4.25
"""Width of a digit in `\\footnotesize` at 10 points."""
_COLUMN_SEPARATION_PT = 4.0


def one_line(cell: Cell) -> int:
    """Characters of a cell whose interval stands beside its value."""
    return len(cell.plain)


def stacked(cell: Cell) -> int:
    """Characters of a cell whose interval stands below its value."""
    return max(len(cell.text) + len(cell.mark), len(cell.spread))


@dataclass(frozen=True, slots=True)
class TerminalTable:
    """A table that is laid out when the terminal's width is known.

    Intervals stand beside their values, or below them where that saves a cut; only then is the table cut into such with the same rows.
    """

    table: Table

    @property
    def width(self) -> int:
        """Characters of the whole table in one piece."""
        columns = [max(one_line(Cell(row.head)) for row in self.table.rows) if self.table.rows else 0]
        for i, head in enumerate(self.table.heads):
            columns.append(max(len(head), *(one_line(row.cells[i]) for row in self.table.rows), 0))
        return max(sum(columns) + (_GAP + 1) * len(columns), *map(len, (self.table.title, *self.table.notes)), 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable | Text]:
        from rich.text import Text

        room = options.max_width - _GAP
        parts = fold(self.table, room, one_line, _GAP)
        is_stacked = len(parts) > 1
        if is_stacked:
            parts = fold(self.table, room, stacked, _GAP)
        yield from (_rich(part, room, is_stacked=is_stacked) for part in parts)
        yield from (Text(f"{note}.", style="italic") for note in self.table.notes)


def _rich(table: Table, room: int, *, is_stacked: bool) -> RichTable:
    from rich.box import HORIZONTALS
    from rich.markup import escape
    from rich.table import Table as RichTable

    found = RichTable(title=escape(table.title) or None, box=HORIZONTALS, padding=(0, 1, 0, 0), pad_edge=False)
    found.add_column(escape(table.corner), no_wrap=True)
    width = stacked if is_stacked else one_line
    needed = [
        max((*map(len, head.split()), *(width(row.cells[i]) for row in table.rows)), default=0)
        for i, head in enumerate(table.heads)
    ]
    whole = [max(own, len(head)) for own, head in zip(needed, table.heads, strict=True)]
    first = max(map(len, (table.corner, *(row.head for row in table.rows))))
    widths = whole if first + sum(whole) + _GAP * (len(whole) + 1) <= room else needed  # heads in one line, or broken
    for i, (head, own) in enumerate(zip(table.heads, widths, strict=True)):
        found.add_column(
            escape(head), justify="left" if i in table.text_columns else "right", width=own, overflow="fold"
        )
    for row in table.rows:
        if row.starts:
            found.add_section()
        found.add_row(escape(row.head), *(_marked_up(cell, is_stacked=is_stacked) for cell in row.cells))
    return found


def _marked_up(cell: Cell, *, is_stacked: bool) -> str:
    from rich.markup import escape

    value = escape(cell.text)
    text = f"{'[bold]' + value + '[/bold]' if cell.is_bold else value}{cell.mark}"
    if cell.spread:
        text += f"{chr(10) if is_stacked else ' '}{escape(cell.spread)}"
    return f"[dim]{text}[/dim]" if cell.is_quiet else text


def markdown(table: Table) -> str:
    """The table in Markdown, its notes below it; bold are the lowest or highest values."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def shown(cell: Cell) -> str:
        value = f"**{cell.text}**" if cell.is_bold else cell.text
        return " ".join(filter(None, (value + cell.mark.replace("*", "\\*"), cell.spread)))

    rule = "".join("---|" if i in table.text_columns else "---:|" for i in range(len(table.heads)))
    lines = [line((table.corner, *table.heads)), f"|---|{rule}"]
    lines += [line((row.head, *map(shown, row.cells))) for row in table.rows]
    lines += [text for note in table.notes for text in ("", f"{note}.")]
    return "\n".join(lines) + "\n"


def latex(table: Table, label: str = "tab:comparison") -> str:
    """The table as a float of LaTeX (package booktabs), title and notes in its caption, in pieces that fit the text of a page.

    In a page of two columns, `table*` takes the place of `table`.
    """
    caption = " ".join(f"{latex_text(sentence)}." for sentence in (table.title, *table.notes) if sentence)
    body = [line for part in fold(table, _PAGE_PT, _points, 2 * _COLUMN_SEPARATION_PT) for line in _tabular(part)]
    return (
        "\n".join(
            (
                "% needs \\usepackage{booktabs}",
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{caption}}}",
                rf"\label{{{label}}}",
                r"\footnotesize",
                rf"\setlength{{\tabcolsep}}{{{_COLUMN_SEPARATION_PT:g}pt}}",
                *body,
                r"\end{table}",
            )
        )
        + "\n"
    )


def _points(cell: Cell) -> float:
    return _DIGIT_PT * one_line(cell)


def _tabular(table: Table) -> Iterator[str]:
    kinds = "".join("l" if i in table.text_columns else "r" for i in range(len(table.heads)))
    yield rf"\begin{{tabular}}{{l{kinds}}}"
    yield r"\toprule"
    widths = [max((len(row.cells[i].plain) for row in table.rows), default=0) for i in range(len(table.heads))]
    heads = map(_head, table.heads, widths, kinds)
    yield " & ".join((latex_text(table.corner), *heads)) + r" \\"
    yield r"\midrule"
    for number, row in enumerate(table.rows):
        if row.starts and number:
            yield r"\midrule"
        head = "{}" * row.head.startswith("[") + latex_text(
            row.head
        )  # after a line's end, a bracket would be its option
        yield " & ".join((head, *map(_latex_cell, row.cells))) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"
    yield ""


def _head(head: str, width: int, kind: str) -> str:
    """The head of a column in lines that are no wider than its cells where its words allow it."""
    lines: list[str] = []
    for word in head.split():
        if lines and len(lines[-1]) + 1 + len(word) <= max(width, 8):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    text = r"\\".join(map(latex_text, lines))
    return text if len(lines) == 1 else rf"\shortstack[{kind}]{{{text}}}"


def _latex_cell(cell: Cell) -> str:
    value = rf"\textbf{{{latex_text(cell.text)}}}" if cell.is_bold else latex_text(cell.text)
    mark = f"$^{{{_LATEX_MARKS[cell.mark]}}}$" if cell.mark else ""
    return " ".join(filter(None, (value + mark, latex_text(cell.spread))))


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "–": "--", "×": r"$\times$", "<": "$<$", ">": "$>$", "≥": r"$\ge$"}
_LATEX |= {LOWEST: r"$\downarrow$", HIGHEST: r"$\uparrow$", WORSE: r"$\dagger$"}


def latex_text(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return re.sub("[" + re.escape("".join(_LATEX)) + "]", lambda found: _LATEX[found.group()], text)
