"""Tables in the forms of papers and terminals: whole, ordered by numbers, with their legend, and no wider than their page."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from vajra_py.cli.main import vajra
from vajra_py.errors import RunError
from vajra_py.metrics.comparison.comparison import Comparison, compare
from vajra_py.metrics.comparison.table_model import Cell, Row, Table, fold, table_of_texts
from vajra_py.metrics.comparison.table_renderers import TerminalTable, latex, markdown, plain_text
from vajra_py.metrics.report.report import render_report
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]
RATES = (6.0, 12.0, 8.0, 10.0)


@pytest.fixture(scope="module")
def runs(make_run: Make) -> list[RunData]:
    """Three settings under four loads with three seeds each."""
    return [
        make_run(name=f"{name}-{rate}-{seed}", rate_per_s=rate, seed=seed, num_requests=40, **fields)
        for rate in RATES
        for name, fields in (("a", {}), ("b", {"shortest_first": True}), ("c", {"chunk_tokens": 64}))
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def comparison(runs: list[RunData]) -> Comparison:
    return compare(runs)


def printed(comparison: Comparison, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(comparison.render())
    return console.export_text().splitlines()


WORDS = table_of_texts(("名前", "kind"), [("a name", "[kind]"), ("名", "")], "A title")
SECTIONS = Table("m", ("a", "bb"), tuple(Row(head, (Cell("1"), Cell("22", "±3", "*")), head == "q") for head in "pqr"))


@pytest.mark.parametrize("table", [WORDS, SECTIONS, Table("no", ("rows", "here"), ())])
def test_a_table_that_is_piped_is_the_one_of_a_wide_terminal(table: Table, comparison: Comparison) -> None:
    for each in (table, comparison.render().table):
        console = Console(width=1000, file=io.StringIO(), record=True)
        console.print(TerminalTable(each))
        assert plain_text(each).rstrip("\n") == console.export_text().rstrip("\n")


def test_a_table_of_twelve_settings_with_intervals_is_whole_at_200_columns(comparison: Comparison) -> None:
    lines = printed(comparison, 200)
    assert max(map(len, lines)) <= 200
    for name in comparison.names:
        assert sum(line.strip().startswith(f"{name} ") for line in lines) == 1
    assert "±" in "".join(lines)
    text = " ".join(lines)
    assert all(word in text for word in ("Preemptions", "KV"))


def test_loads_are_in_the_order_of_their_numbers(comparison: Comparison) -> None:
    names = [line.split()[0] for line in printed(comparison, 250) if "stable" in line or "overloaded" in line]
    rates = [name.rsplit("/", 1)[1] for name in names if "/" in name]
    assert rates == [rate for rate in ("6", "8", "10", "12") for _ in range(3)]


def test_redirected_output_is_not_cut(runs: list[RunData]) -> None:
    result = CliRunner().invoke(vajra, ["compare", *(str(run.path) for run in runs)], standalone_mode=False)
    assert result.exception is None
    assert result.stdout.count("stability") == 1


def test_a_latex_table_has_rules_between_loads_and_its_legend_in_its_caption(comparison: Comparison) -> None:
    text = comparison.to_latex()
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    assert body.count(r"\midrule") == len(RATES)  # below the head, and between loads
    assert body.split("\n")[1].startswith("setting & ")
    caption = re.search(r"\\caption\{(.*)\}\n", text)
    assert caption is not None
    assert "Holm's correction" in caption.group(1)
    assert r"95 \% interval" in caption.group(1)
    assert [line for line in text.splitlines() if line.startswith("%")] == [r"% needs \usepackage{booktabs}"]
    assert "12.0" not in body.replace(" 12.0 ", "")


def test_a_latex_table_shows_the_columns_that_are_asked_for(comparison: Comparison, runs: list[RunData]) -> None:
    text = comparison.to_latex(columns=["e2e_p99", "num_preemptions", "ttft_p50_s"])
    head = text[text.index(r"\toprule") : text.index(r"\midrule")]
    assert [head.index(word) for word in ("E2E P99", "Preemptions", "TTFT P50")] == sorted(
        head.index(word) for word in ("E2E P99", "Preemptions", "TTFT P50")
    )
    assert head.count("&") == 4
    with pytest.raises(RunError, match=r"--columns: no metric has that name \('ttft'\)"):
        comparison.to_latex(columns=["ttft"])
    paths = [str(run.path) for run in runs]
    options = ["--format", "latex", "--columns", "e2e_p99,num_preemptions", "--columns", "ttft_p50_s"]
    assert CliRunner().invoke(vajra, ["compare", *paths, *options], standalone_mode=False).stdout == text
    few = compare(runs[:9]).to_latex(columns=["e2e_p99"])
    assert few.count(r"\\") == 4  # a row for each setting, however few


@pytest.mark.parametrize("columns", [(), tuple(metric for metric in ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99", "tpot_p99", "goodput_requests_per_s", "throughput_requests_per_s"))])  # fmt: skip
def test_a_latex_table_fits_the_text_of_a_page(comparison: Comparison, columns: tuple[str, ...]) -> None:
    for part in comparison.to_latex(columns=columns).split(r"\begin{tabular}")[1:]:
        rows = [line.split(" & ") for line in part.splitlines() if " & " in line and "shortstack" not in line]
        plain = [[re.sub(r"\\textbf|\$\^\{.*?\}\$|\\pm|[\\{}$]", "", cell) for cell in row] for row in rows]
        widths = [max(len(row[i].strip()) for row in plain) for i in range(len(plain[0]))]
        assert sum(widths) * 4.25 + 8 * len(widths) <= 470, widths


def test_a_head_that_begins_with_a_bracket_is_no_option_of_the_line_before() -> None:
    text = latex(Table("setting", ("a",), (Row("[x]", (Cell("1"),)), Row("[y]", (Cell("2"),)))))
    assert not re.search(r"\\\\\s*\[", text)


def test_markdown_marks_are_no_emphasis(comparison: Comparison) -> None:
    text = markdown(Table("metric", ("a|b",), (Row("x", (Cell("1", "±2", "*"),)),), notes=("A note",)))
    assert text == "| metric | a\\|b |\n|---|---:|\n| x | **1**\\* ±2 |\n\nA note.\n"


def test_pinned_columns_stand_in_each_piece() -> None:
    rows = (Row("a", tuple(Cell("x" * 10) for _ in range(5))),)
    parts = fold(Table("head", tuple("vwxyz"), rows, num_pinned=1), 35, lambda cell: len(cell.plain), 1)
    assert [part.heads for part in parts] == [("v", "w", "x"), ("v", "y", "z")]


def test_runs_of_other_workloads_are_named_by_them_and_it_is_said_that_they_differ(
    make_run: Make, tmp_path: Path
) -> None:
    made = []
    trace = {"type": "azure", "path": "some/where/conv.csv", "first": 4000, "rate": None}
    profile = {"type": "profile", "profile": "azure2023_conv", "num_requests": 2000}
    for name, workload in (
        ("file", trace),
        ("file8", trace | {"rate": 8.0}),
        ("low", profile | {"rate": 8.0}),
        ("high", profile | {"rate": 12.0}),
    ):
        folder = Path(shutil.copytree(make_run(name="whole").path, tmp_path / name / "whole"))
        (folder / "config.yaml").write_text(json.dumps({"workload": workload}))
        made.append(RunData.load(folder))
    comparison = compare(made)
    assert comparison.names == ("azure/–", "azure/8", "profile/8", "profile/12")
    sentence = "The workloads differ in type (azure, profile): settings under different workloads are not compared"
    assert sentence in comparison.render().table.notes
    assert f"{sentence}." in comparison.to_markdown()
    text = render_report(made)
    head = text[: text.index('id="numbers"')]
    assert f"{sentence}." in head
    assert "the azure file some/where/conv.csv" in head
    assert "public trace azure2023_conv" in head
    assert compare(made[2:]).workloads == ""


def test_a_list_is_a_table_whose_words_wrap() -> None:
    words = "many words that have no room in one line of a terminal"
    console = Console(width=50, file=io.StringIO(), record=True)
    console.print(TerminalTable(table_of_texts(("name", "kind", "summary"), [("a name", "a kind", words)])))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 50
    assert " ".join(" ".join(lines).split()).count("name kind summary") == 1  # one table, not cut
    assert set(words.split()) <= set(" ".join(lines).split())  # and no row is omitted
