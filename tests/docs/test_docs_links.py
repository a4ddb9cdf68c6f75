"""Does every link lead somewhere, and is every page found from the index?"""

from __future__ import annotations

import functools
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.docs.tools import GENERATED, generated_page
from vajra_py import contract
from vajra_py.contract import hookspecs, latency, observer
from vajra_py.contract.facts import FACTS
from vajra_py.plugins.shapes import hooks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples/plugin_template/README.md",
    *(ROOT / "docs" / name for name in GENERATED),
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@functools.cache
def text_of(page: Path) -> str:
    """Return a page's text, of generated pages too."""
    name = page.relative_to(ROOT / "docs").as_posix() if page.is_relative_to(ROOT / "docs") else ""
    return generated_page(name) if name in GENERATED else page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The page without its blocks of code and inline code."""
    text = re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """The fragments that lead to a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(name if not count else f"{name}-{count}")
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            assert target.startswith(("https://", "mailto:")), target
            continue
        path, _, fragment = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists() or file in PAGES, f"{target} leads nowhere"
        assert file.is_relative_to(ROOT), f"{target} leaves the repository"
        if fragment:
            assert fragment in anchors(file), f"{target}: {file.name} has no such heading"


def linked_from(page: Path) -> set[Path]:
    """Return the files that a page links to."""
    return {(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(prose(page))}


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    records = ROOT / "docs" / "adr" / "index.md"
    linked = linked_from(index) | linked_from(records) | {index}
    missing = [
        str(page.relative_to(ROOT)) for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in linked
    ]
    assert not missing, "add them to docs/index.md, or records to docs/adr/index.md"


def test_decision_records_are_numbered_once_and_have_three_parts() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    numbers = [record.name[:4] for record in records]
    assert len(set(numbers)) == len(numbers)
    for record in records:
        assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", record.name)
        text = record.read_text(encoding="utf-8")
        assert text.startswith("# ")
        for part in ("**Context.**", "**Decision.**", "**Consequences.**"):
            assert part in text, f"{record.name} lacks {part}"


def test_the_reference_lists_every_name_of_the_contract() -> None:
    pages = ("reference/contract.md", "policy-features.md")
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in pages)
    views = (contract.RequestView, contract.LocalReplicaView, contract.ReplicaLoadView, contract.BatchBuilder)
    members = {name for view in (*views, contract.ReplicaLimits) for name in dir(view) if not name.startswith("_")}
    members -= {fact.seen_as for fact in FACTS}  # the page links to their table
    members |= {field.name for kind in (contract.PolicyContext, contract.EndedStep) for field in fields(kind)}
    members |= {refusal.name for refusal in contract.Refusal} | {motion.name for motion in contract.KeyMotion}
    hooks = {name for layer in contract.Layer for name in hooks_of(layer)}
    offered = {
        name
        for module in (hookspecs, latency, observer)
        for name, thing in vars(module).items()
        if isinstance(thing, type) and thing.__module__ == module.__name__ and not name.startswith("_")
    }
    names = (*contract.__all__, *members, *hooks, *offered)
    missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert not missing
