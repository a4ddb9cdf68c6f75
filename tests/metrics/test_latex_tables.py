"""LaTeX tables whose names hold what LaTeX takes for commands or its fonts lack: escaped, and compiled where there is a LaTeX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vajra_py.metrics.comparison.table_model import BEST, HIGHEST, LOWEST, WORSE, Cell, Row, Table
from vajra_py.metrics.comparison.table_renderers import latex, latex_text

HOSTILE = (
    "50% of a_b & c#d",
    "${x}^2~\\y",
    "[1]",
    "*",
    "* [2]",
    "a -- b --- c",
    "``quoted'' ?` !` <<a>> |b|",
    'a "b"',
    "line\nbreak\ttab",
    "naïve Łódź – «ą» ðþ",
    "μ Δ ≤ ≥ ≈ ∞ ± × −",
    "策略 🚀 ж e\u0301 \u0000 \u200b",
    "\\end{tabular}\\input{/etc/passwd}",
    "",
    " ",
)


def tables() -> list[Table]:
    rows = tuple(
        Row(name, tuple(Cell(name, "±0.1", mark) for mark in (BEST, LOWEST, HIGHEST, WORSE)), starts=i % 3 == 0)
        for i, name in enumerate(HOSTILE)
    )
    return [
        Table("[corner]", HOSTILE[:4], rows, title=HOSTILE[0], notes=HOSTILE),
        Table("*", tuple(f"a b [{name}] *" for name in HOSTILE[4:8]), rows, text_columns=frozenset({1})),
        Table("", HOSTILE, (Row("all", tuple(map(Cell, HOSTILE))),)),
        Table("nothing", (), ()),
    ]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("50% of a_b & c#d", r"50\% of a\_b \& c\#d"),
        ("${x}^2~\\", r"\$\{x\}\textasciicircum{}2\textasciitilde{}\textbackslash{}"),
        ("-1", "-1"),
        ("--rate", "-{}-rate"),
        ("<= 1|2", r"$<$= 1$|$2"),
        ("a\n\nb\tc", "a b c"),
        ("Łódź", "Łódź"),
        ("o\u0301", "ó"),
        ("μs", r"$\mu$s"),
        ("策 🚀", r"\texttt{U+7B56} \texttt{U+1F680}"),
        ("«\u0000»", r"\texttt{U+00AB}\texttt{U+0000}\texttt{U+00BB}"),
    ],
)
def test_special_characters_are_escaped(text: str, written: str) -> None:
    assert latex_text(text) == written


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.corner)
def test_no_name_is_a_command_or_an_option(table: Table) -> None:
    text = latex(table)
    assert "\\input" not in text
    assert text.count(r"\end{tabular}") == text.count(r"\begin{tabular}")
    assert not re.search(r"(\\\\|\\toprule|\\midrule)\s*[\[*]", text)
    assert all(line.startswith("% needs") for line in text.splitlines() if re.search(r"(?<!\\)%", line))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_tables_with_any_names_compile(tmp_path: Path) -> None:
    body = "\n".join(latex(table, f"tab:{i}") for i, table in enumerate(tables()))
    (tmp_path / "page.tex").write_text(
        "\\documentclass{article}\n\\usepackage[margin=1in]{geometry}\n\\usepackage{booktabs}\n"
        f"\\begin{{document}}\n{body}\n\\end{{document}}\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    log = done.stdout.decode("utf-8", "replace")
    if "booktabs.sty' not found" in log or "geometry.sty' not found" in log:
        pytest.skip("this LaTeX has no booktabs")
    assert done.returncode == 0, log[-2000:]
    assert "Missing character" not in log
    assert (tmp_path / "page.pdf").stat().st_size
