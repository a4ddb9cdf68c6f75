"""Render tables (`table_model`) for a terminal and as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from vajra_py.metrics.comparison.table_model import BEST, HIGHEST, LOWEST, WORSE, Cell, Table, fold, least_cells

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable
    from rich.text import Text

_GAP = 2
"""Number of characters between two columns on a terminal."""
_LATEX_MARKS = {BEST: "*", LOWEST: r"\downarrow", HIGHEST: r"\uparrow", WORSE: r"\dagger"}
_PAGE_PT = 468.0
"""Text width of a page of LaTeX's `article` class with one-inch margins, in points."""
_DIGIT_PT = 4.25
"""Width of a digit in `\\footnotesize` of a 10-point document, in points."""
_COLUMN_SEPARATION_PT = 4.0


def one_line(cell: Cell) -> int:
    """Return the width of a cell in characters, with its interval beside the value."""
    return len(cell.plain)


def stacked(cell: Cell) -> int:
    """Return the width of a cell in characters, with its interval below the value."""
    return max(len(cell.text) + len(cell.mark), len(cell.spread))


class TerminalTable(Struct, frozen=True):
    """Table that is laid out when it is printed, for the terminal's width.

    If the table is too wide with intervals beside the values, the intervals are placed below the values. If this table
    is too wide as well, it is split into pieces with the same rows.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable | Text]:
        from rich.text import Text

        room = options.max_width - _GAP
        table = self.table.for_readers
        parts = fold(table, room, one_line, _GAP, wraps=True)
        is_stacked = len(parts) > 1
        if is_stacked:
            parts = fold(table, room, stacked, _GAP, wraps=True)
        yield from (_rich(part, room, is_stacked=is_stacked) for part in parts)
        yield from (Text(f"{note}.", style="italic") for note in self.table.notes)


def _rich(table: Table, room: int, *, is_stacked: bool) -> RichTable:
    from rich.box import HORIZONTALS
    from rich.markup import escape
    from rich.table import Table as RichTable

    found = RichTable(title=escape(table.title) or None, box=HORIZONTALS, padding=(0, 1, 0, 0), pad_edge=False)
    found.add_column(escape(table.corner), no_wrap=True)
    width = stacked if is_stacked else one_line
    columns = range(len(table.heads))
    needed = [max(map(width, least_cells(table, i, wraps=True)), default=0) for i in columns]
    whole = [max((len(head), *(width(row.cells[i]) for row in table.rows))) for i, head in enumerate(table.heads)]
    first = max(map(len, (table.corner, *(row.head for row in table.rows))))
    fits = first + sum(whole) + _GAP * (len(whole) + 1) <= room
    for i, head in enumerate(table.heads):
        is_text = i in table.text_columns
        # If the table is too wide with each heading on one line, headings wrap, and text columns share the free width.
        own = whole[i] if fits else None if is_text else needed[i]
        found.add_column(
            escape(head),
            justify="left" if is_text else "right",
            width=own,
            min_width=needed[i],
            overflow="fold",
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


def plain_text(table: Table) -> str:
    """Return the whole table as plain text, without styles and without a limit on the line length."""
    table = table.for_readers
    texts = [[table.corner, *table.heads], *([row.head, *(cell.plain for cell in row.cells)] for row in table.rows)]
    widths = [max(map(_displayed, column)) for column in zip(*texts, strict=True)]
    width = sum(widths) + _GAP * (len(widths) - 1)
    rule = f" {'─' * width} "
    room = width + 2 - _displayed(table.title)
    lines = [f"{' ' * (room // 2)}{table.title}{' ' * (room - room // 2)}"] if table.title else []
    for number, cells in enumerate(texts):
        if number < 2 or table.rows[number - 1].starts:
            lines.append(rule)
        padded = []
        for i, (text, own) in enumerate(zip(cells, widths, strict=True)):
            space = " " * (own - _displayed(text))
            padded.append(text + space if i == 0 or i - 1 in table.text_columns else space + text)
        lines.append(f" {(' ' * _GAP).join(padded)} ")
    return "\n".join([*lines, *([rule] if table.rows else [rule, rule]), *(f"{note}." for note in table.notes)])


def _displayed(text: str) -> int:
    """Return the number of columns that a text occupies in a fixed-width font."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def markdown(table: Table) -> str:
    """Return the table as Markdown with its notes below; the lowest or highest values are bold."""
    table = table.for_readers

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def shown(cell: Cell) -> str:
        value = f"**{markdown_text(cell.text)}**" if cell.is_bold else markdown_text(cell.text)
        return " ".join(filter(None, (value + markdown_text(cell.mark), markdown_text(cell.spread))))

    rule = "".join("---|" if i in table.text_columns else "---:|" for i in range(len(table.heads)))
    lines = [line([markdown_text(head) for head in (table.corner, *table.heads)]), f"|---|{rule}"]
    lines += [line((markdown_text(row.head), *map(shown, row.cells))) for row in table.rows]
    lines += [text for note in table.notes for text in ("", f"{note}.")]
    return "\n".join(lines) + "\n"


def markdown_text(text: str) -> str:
    """Return the text with characters escaped that would end a cell, begin emphasis or be parsed as HTML."""
    return re.sub(r"[\\`*|]|<(?=[a-zA-Z/!?])", r"\\\g<0>", " ".join(text.splitlines()))


def csv_table(table: Table) -> str:
    """Return the table as CSV with raw values where cells have them, and `keys` as column names."""
    keys = table.keys or (table.corner, *table.heads)
    return csv_text(
        keys,
        [
            dict(zip(keys, (row.head, *(_raw(cell) for cell in row.cells)), strict=True))
            for row in table.rows
        ],
    )  # fmt: skip


def _raw(cell: Cell) -> Any:
    return cell.text if cell.value is None else cell.value


def csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV; None is an empty field, booleans are `true` or `false`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(
        {name: str(value).lower() if isinstance(value, bool) else value for name, value in row.items()} for row in rows
    )
    return text.getvalue()


def html(table: Table, caption: str = "", style: str = "") -> str:
    """Render the table as HTML, with its notes in the caption; `style` is a class of the page's style sheet."""
    return str(html_templates().get_template("table.html.j2").module.table([table.for_readers], caption, style))  # type: ignore[attr-defined]


def html_templates() -> Environment:
    """Load the templates of the HTML pages; all render their tables with `table.html.j2`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("vajra_py.metrics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def latex(table: Table, label: str = "tab:comparison") -> str:
    """Return the table as a LaTeX float (package booktabs) with title and notes in its caption, split into pieces that
    fit the text width of a page.

    For a two-column page, replace `table` by `table*`.
    """
    caption = " ".join(f"{latex_text(sentence)}." for sentence in (table.title, *table.notes) if sentence)
    table = table.for_readers
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
    yield " & ".join((_guarded(table.corner), *heads)) + r" \\"
    yield r"\midrule"
    for number, row in enumerate(table.rows):
        if row.starts and number:
            yield r"\midrule"
        yield " & ".join((_guarded(row.head), *map(_latex_cell, row.cells))) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"
    yield ""


def _head(head: str, width: int, kind: str) -> str:
    """Return a column's heading, broken between words into lines of at most `width` characters, or 8 if `width` is
    smaller; longer words are not broken.
    """
    lines: list[str] = []
    for word in head.split():
        if lines and len(lines[-1]) + 1 + len(word) <= max(width, 8):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    text = r"\\".join(map(_guarded, lines))
    return text if len(lines) == 1 else rf"\shortstack[{kind}]{{{text}}}"


def _latex_cell(cell: Cell) -> str:
    value = rf"\textbf{{{latex_text(cell.text)}}}" if cell.is_bold else latex_text(cell.text)
    mark = f"$^{{{_LATEX_MARKS[cell.mark]}}}$" if cell.mark else ""
    return " ".join(filter(None, (value + mark, latex_text(cell.spread))))


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\u00a0": "~"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "<": "$<$", ">": "$>$", "|": "$|$"}
_LATEX |= {"≤": r"$\le$", "≥": r"$\ge$", "≈": r"$\approx$", "∞": r"$\infty$"}
_LATEX |= {"–": "--"}
_LATEX |= {LOWEST: r"$\downarrow$", HIGHEST: r"$\uparrow$", WORSE: r"$\dagger$"}
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega"
_LATEX |= {sign: rf"$\{name}$" for sign, name in zip("αβγδεζηθικλμνξπρστυφχψω", _GREEK.split(), strict=True)}
_GREEK_CAPITALS = "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
_LATEX |= {sign: rf"$\{name}$" for sign, name in zip("ΓΔΘΛΞΠΣΥΦΨΩ", _GREEK_CAPITALS.split(), strict=True)}
_NOT_IN_LATEX = frozenset("«»ÐÞðþĄąĐđĘęĦħĮįĸĿŀŉŊŋŦŧŲųſ")
"""Latin letters that LaTeX's default fonts lack."""
_LIGATURE_OR_SIGN = re.compile(r"--+|''+|``+|[?!]`|,,+|.")
"""Pattern of either a character sequence that LaTeX fonts replace by a ligature, or any single character."""


def latex_text(text: str) -> str:
    """Return the text with LaTeX's special characters escaped; characters missing in its default fonts are written as
    `U+4E2D`.
    """
    return _LIGATURE_OR_SIGN.sub(_latex_signs, unicodedata.normalize("NFC", " ".join(text.split())))


def _latex_signs(found: re.Match[str]) -> str:
    return "{}".join(map(_latex_sign, found.group()))


def _latex_sign(sign: str) -> str:
    if sign in _LATEX:
        return _LATEX[sign]
    is_there = " " <= sign <= "~" or ("¡" <= sign <= "ſ" and sign not in _NOT_IN_LATEX) or sign in "—‘’“”…•€™←→"
    return sign if is_there else rf"\texttt{{U+{ord(sign):04X}}}"


def _guarded(text: str) -> str:
    """Return a text for the start of a table row, escaped so that LaTeX does not parse it as an option of the preceding
    command.
    """
    return "{}" * text.startswith(("[", "*")) + latex_text(text)
