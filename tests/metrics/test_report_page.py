"""The report: self-contained, readable without eyes, the same bytes for the same runs, and saying what must be said."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from vajra_py.errors import RunError
from vajra_py.metrics.report.report import render_report, write_report
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects what the tests ask for, and checks that elements close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "poster")]
        self.ids += [own["id"] or ""] if "id" in own else []
        if tag == "svg":
            self.images.append(own)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def runs(make_run: Make) -> list[RunData]:
    return [make_run(name="small", chunk_tokens=64), make_run(name="large <b> & co", chunk_tokens=512)]


@pytest.fixture(scope="module")
def text(runs: list[RunData]) -> str:
    return render_report(runs)


def test_the_page_loads_nothing(text: str) -> None:
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_references_inside_the_page_lead_somewhere(text: str) -> None:
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    targets = {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert targets <= set(page.ids)


def test_every_picture_has_a_text_that_says_what_it_shows(text: str, runs: list[RunData]) -> None:
    images = Page(text).images
    assert len(images) >= 7
    assert all(image["role"] == "img" and len(image["aria-label"] or "") > 60 for image in images)
    assert any(re.search(r"small 0\.\d+ s, large <b> & co 0\.\d+ s", image["aria-label"] or "") for image in images)


def test_the_page_takes_the_colours_of_its_reader(text: str) -> None:
    assert "prefers-color-scheme: dark" in text
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "currentColor" in pictures
    assert "#1b1f24" not in pictures


def test_it_says_first_what_was_compared_and_how_it_went(text: str, runs: list[RunData]) -> None:
    head = text[text.index("<h1>") : text.index('id="numbers"')]
    assert "2 runs that differ in chunk tokens (64, 512)." in head
    assert "60 requests" in head
    assert "Lowest TTFT P99" in head
    assert "one seed" in head
    assert "large &lt;b&gt; &amp; co" in text
    assert "large <b>" not in text


def test_equal_runs_give_equal_bytes(runs: list[RunData], text: str, tmp_path: Path) -> None:
    write_report(runs, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_one_run_has_a_report_too(make_run: Make) -> None:
    text = render_report([make_run(name="alone")], title="My run")
    Page(text)
    assert "<h1>My run</h1>" in text
    assert "One run, alone." in text
    assert 'class="mark"' not in text


def test_many_runs_stay_one_row_each(make_run: Make) -> None:
    many = [
        make_run(
            name=f"{order}-{chunk}-{rate}",
            num_requests=25,
            rate_per_s=rate,
            chunk_tokens=chunk,
            shortest_first=order == "spt",
        )
        for order in ("fcfs", "spt")
        for chunk in (64, 128, 256)
        for rate in (6.0, 40.0)
    ]
    text = render_report(many)
    Page(text)
    numbers = text[text.index('id="numbers"') : text.index("All metrics")]
    assert all(numbers.count(f">{run.name}<") == 1 for run in many)
    assert "Latency against load" in text
    assert "Shown of the 12 runs: at most 9" in text


def test_an_empty_run_is_reported_as_empty(make_run: Make) -> None:
    text = render_report([make_run(name="empty", num_requests=0)])
    Page(text)
    assert "No request arrived in the measurement window." in text
    assert "no data" in text or "no steps" in text or "<svg" in text


def test_what_limits_the_numbers_is_said_up_front(make_run: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_run(name="cut", horizon_at=2.5, rate_per_s=20.0).path, tmp_path / "cut"))
    manifest = json.loads((folder / "manifest.json").read_text()) | {"status": "interrupted"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    text = render_report([RunData.load(folder)])
    head = text[: text.index('id="numbers"')]
    assert "Did not come to its end" in head
    assert "had not ended when the run did" in head
    assert ">(cut)<" in head


def test_no_run_is_an_error() -> None:
    with pytest.raises(RunError, match="no run was given"):
        render_report([])


def test_a_broken_run_writes_no_page(make_run: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_run(name="alone").path, tmp_path / "broken"))
    (folder / "steps.parquet").unlink()
    with pytest.raises(RunError, match=r"steps\.parquet"):
        write_report([RunData.load(folder)], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_slos_are_spoken_of_where_there_are_some(make_run: Make) -> None:
    def words(text: str) -> str:
        return re.sub(r"<svg.*?</svg>|<details>.*?</details>", "", text[text.index("<main>") :], flags=re.DOTALL)

    rates = (4.0, 12.0)
    without = render_report(
        [make_run(name=f"n{rate}", rate_per_s=rate, ttft_slo_s=None, classes=("",)) for rate in rates]
    )
    assert "SLO" not in words(without)
    assert "goodput" not in words(without).lower()
    assert "Goodput is that of the requests that met their SLOs." in words(
        render_report([make_run(name=f"w{rate}", rate_per_s=rate) for rate in rates])
    )


def test_no_table_is_wider_than_the_page(make_run: Make) -> None:
    runs = [
        make_run(name=f"a rather long name of a run {chunk}", num_requests=25, chunk_tokens=chunk)
        for chunk in range(64, 64 * 9, 64)
    ]
    text = render_report(runs)
    tables = re.findall(r"<table.*?</table>", text[: text.index('id="configurations"')], re.DOTALL)
    assert len(tables) > 2
    for table in tables:
        for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL):
            cells = [cell.split("<small>") for cell in re.findall(r"<td.*?</td>|<th scope=\"row\".*?</th>", row)]
            widths = [max(len(re.sub("<.*?>", "", line)) for line in lines) for lines in cells]
            assert sum(width + 2 for width in widths) <= 140
