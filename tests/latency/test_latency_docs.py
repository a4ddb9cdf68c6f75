from __future__ import annotations

import re
from pathlib import Path

import pytest

from vajra_py.latency import device_names, device_sources

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "latency-models.md"


@pytest.mark.parametrize("name", device_names())
def test_the_docs_list_every_figure_of_a_device_with_its_source(name: str) -> None:
    section = DOCUMENT.read_text("utf-8").split(f"### `{name}`", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    sources = device_sources(name)
    assert len(rows) == len(sources)
    assert sorted(row.rsplit(" | ", 1)[1].removesuffix(" |") for row in rows) == sorted(sources.values())


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL))
def test_python_blocks_run(block: str) -> None:
    exec(compile(block, str(DOCUMENT), "exec"), {"__name__": "block"})
