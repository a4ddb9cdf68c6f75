"""Checks of how the documentation is written: length of pages, paragraphs and lines, status of decisions, words that were given up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.tools import tool

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
wrap = tool("wrap")
WRAPPED = wrap.pages()
RECORDED = [ROOT / "CHANGELOG.md", *RECORDS]
INSTRUCTIONS = [page for page in WRAPPED if page.parent in (ROOT, ROOT / "docs")]
MOST_WORDS = 1500
MOST_LINES = 6
MOST_CHARACTERS = 200
BANNED = re.compile(
    r"\b(foregone|uproot|foresee|refit|chooser|TakeBack|_?[Rr]esidents|is_parked|parked|read_claims|AdmitsInTurn|ChunksBesideDecodes|run-ahead"
    r"|\w*(Block|Token|Segment|Private)Keys|num_keyed_tokens|make_keys|(?<!\")breach(es)?|BREACHES|luck|_?end_early|giv(es?|ing) way|gave way"
    r"|GivingWay\w*|runs_ahead|engine\.units|_?publish_\w+|_to_publish)\b"
)
"""Private words whose place the field's words have taken; the glossary has those."""


@pytest.mark.parametrize("page", RECORDED, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_can_be_read(page: Path) -> None:
    prose = re.sub(
        r"^ *```.*?^ *```", lambda block: "\n" * block.group().count("\n"), page.read_text(), flags=re.M | re.S
    )
    lines = enumerate(prose.splitlines(), 1)
    long = [at for at, line in lines if len(line) > MOST_CHARACTERS and not line.lstrip().startswith(("|", "<!--"))]
    assert not long, f"{page.name}: lines {long} are over {MOST_CHARACTERS} characters"


@pytest.mark.parametrize("page", INSTRUCTIONS, ids=lambda page: str(page.relative_to(ROOT)))
def test_instructions_are_short(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    generated = re.compile(r"<!-- (claims|curves): .*?<!-- end of \1 -->", re.S)  # tables of results
    num_words = len(generated.sub("", written).split())
    assert num_words <= MOST_WORDS, f"{num_words} words: move tables to docs/reference, measurements to docs/evidence"


@pytest.mark.parametrize("page", WRAPPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_paragraphs_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    long = [line for line, paragraph in wrap.paragraphs(text) if len(paragraph) > MOST_LINES]
    assert not long, f"{page.name}: paragraphs at lines {long} have more than {MOST_LINES} lines"


@pytest.mark.parametrize("page", WRAPPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_wraps_at_one_width(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert wrap.wrapped(text) == text, f"wrap it at {wrap.WIDTH} characters: make format"


def test_wrapping_changes_nothing_but_line_ends() -> None:
    text = "\n".join(
        [
            "# A title that is longer than the width and stays one line, since a heading cannot be continued on the next",
            "",
            "Words " * 30,
            "- an item " * 12 + "that ends with a number - 7. and",
            "  goes on",
            "",
            "| a table | " + "stays " * 30 + "|",
            "",
            "```text",
            "code " * 40,
            "```",
            "<!-- a comment " + "stays " * 30 + "-->",
            "",
        ]
    )
    new = wrap.wrapped(text)
    assert new.split() == text.split()
    assert wrap.wrapped(new) == new
    kept = [line.rstrip() for line in text.splitlines() if line.startswith(("#", "|", "code", "<!--"))]
    assert [line for line in new.splitlines() if len(line) > wrap.WIDTH] == kept
    assert not [line for line in new.splitlines() if line.startswith(("  -", "  7."))]


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
