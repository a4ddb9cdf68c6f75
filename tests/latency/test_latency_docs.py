"""Does the generated page of devices have every figure?"""

from __future__ import annotations

import pytest

from tests.docs.tools import tool
from vajra_py.latency import device_names, device_sources

PAGE = tool("devices").page()


@pytest.mark.parametrize("name", device_names())
def test_the_page_lists_every_figure_of_a_device_with_its_source(name: str) -> None:
    section = PAGE.split(f"## `{name}`", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    sources = [row.rsplit(" | ", 1)[1].removesuffix(" |") for row in rows]
    assert set(device_sources(name).values()) <= set(sources)
    assert len(rows) >= len(device_sources(name))
