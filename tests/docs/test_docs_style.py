"""Checks of how the documentation is written: length of lines, status of decisions, words that were given up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
RECORDS = sorted((ROOT / "docs/adr").glob("*.md"))
MOST_CHARACTERS = 200
BANNED = re.compile(
    r"\b(foregone|uproot|foresee|refit|chooser|TakeBack|_?[Rr]esidents|is_parked|parked|read_claims|AdmitsInTurn|ChunksBesideDecodes|run-ahead"
    r"|\w*(Block|Token|Segment|Private)Keys|num_keyed_tokens|make_keys|(?<!\")breach(es)?|BREACHES|luck|_?end_early|giv(es?|ing) way|gave way"
    r"|GivingWay\w*|runs_ahead|engine\.units|_?publish_\w+|_to_publish)\b"
)
"""Private words whose place the field's words have taken; the glossary has those."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_can_be_read(page: Path) -> None:
    prose = re.sub(
        r"^ *```.*?^ *```", lambda block: "\n" * block.group().count("\n"), page.read_text(), flags=re.M | re.S
    )
    lines = enumerate(prose.splitlines(), 1)
    long = [at for at, line in lines if len(line) > MOST_CHARACTERS and not line.lstrip().startswith(("|", "<!--"))]
    assert not long, f"{page.name}: lines {long} are over {MOST_CHARACTERS} characters"


def test_the_page_on_statistics_is_short_and_easy_on_the_eye() -> None:
    text = (ROOT / "docs/statistics.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1300
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    assert not [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|")]
    paragraphs = [one.strip() for one in re.split(r"\n\s*\n", prose)]
    assert not [one for one in paragraphs if one.count("\n") >= 6 and not one.startswith(("|", "- "))]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_decisions_have_a_status(record: Path) -> None:
    found = re.search(r"^\*\*Status\.\*\* (Accepted|Superseded by \[ADR \d+\])", record.read_text(), re.M)
    assert found, f"{record.name}: say **Status.** Accepted, or by which record it is superseded"


@pytest.mark.parametrize("folder", ["vajra_py", "policies", "kernels"])
def test_words_that_were_given_up_stay_away(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in (ROOT / folder).rglob("*.py")
        for match in BANNED.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found
