"""Wrap the prose of the documentation at one width; code, tables, headings and comments stay as they are.

python docs/tools/wrap.py           wraps the pages in place
python docs/tools/wrap.py --check   fails when a page would change
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100
WORD = re.compile(r"(?:`[^`]*`|\S)+")
ITEM = re.compile(r"(?P<indent> *)(?P<mark>[-*+]|\d+[.)]) +(?P<text>.*)")
STARTS_A_BLOCK = re.compile(r"[-*+]|\d+[.)]|#+|>.*|\|.*|```.*|=+|:::.*|!!!.*")
"""Words that would begin a list, a heading, a quotation or a table at the beginning of a line."""


def pages() -> list[Path]:
    """Return the pages whose prose is wrapped: all but decision records and the changelog."""
    docs = ROOT / "docs"
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs.glob("*.md")]
    for folder in ("api", "evidence", "reference"):
        found += (docs / folder).glob("*.md")
    return sorted(found)


def wrapped(text: str) -> str:
    """Return the page with each paragraph and list item wrapped."""
    return "\n".join(_lines(text.splitlines())) + "\n"


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each paragraph and list item: the number of its first line, and its lines."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        end = _end_of_block(lines, at)
        if _is_prose(lines[at]):
            yield at + 1, lines[at:end]
        at = end


def _lines(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        end = _end_of_block(lines, at)
        if _is_prose(lines[at]):
            yield from _filled(lines[at:end])
        else:
            yield from (line.rstrip() for line in lines[at:end])
        at = end


def _is_prose(line: str) -> bool:
    text = line.strip()
    return bool(text) and not text.startswith(("#", "|", "<", "```", ":::", "![", "$$", "---", "!!!")) and text != ">"


def _end_of_block(lines: list[str], at: int) -> int:
    """Return the index after the fence, comment, directive or paragraph that begins here."""
    text = lines[at].strip()
    end = at + 1
    if text.startswith("```"):
        while end < len(lines) and not lines[end].strip().startswith("```"):
            end += 1
        return min(end + 1, len(lines))
    if text.startswith(":::"):
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        return end
    if text.startswith("<!--"):
        while "-->" not in lines[end - 1]:
            end += 1
        return end
    if not _is_prose(lines[at]):
        return end
    while end < len(lines) and _is_prose(lines[end]) and not ITEM.fullmatch(lines[end]):
        end += 1
    return end


def _filled(lines: list[str]) -> list[str]:
    item = ITEM.fullmatch(lines[0])
    if item is None:
        indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
        return _fill(" ".join(lines), indent, indent)
    first = f"{item['indent']}{item['mark']} "
    return _fill(" ".join([item["text"], *lines[1:]]), first, " " * len(first))


def _fill(text: str, first: str, rest: str) -> list[str]:
    result: list[str] = []
    line: list[str] = []
    indent = first
    for word in WORD.findall(text):
        if line and len(indent) + len(" ".join([*line, word])) > WIDTH:
            carried = [word]
            while len(line) > 1 and STARTS_A_BLOCK.fullmatch(carried[0]):
                carried.insert(0, line.pop())
            result.append(indent + " ".join(line))
            line, indent = carried, rest
        else:
            line.append(word)
    return [*result, indent + " ".join(line)]


def main(arguments: Sequence[str]) -> int:
    """Wrap or check the pages."""
    changed = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = wrapped(text)
        if new != text:
            changed.append(str(page.relative_to(ROOT)))
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    if changed and "--check" in arguments:
        print(f"not wrapped at {WIDTH} characters: {', '.join(changed)}. Wrap them: make format", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
