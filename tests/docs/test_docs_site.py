"""Does the site build without a warning, and can it be read without a network?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="needs the extra docs")

ROOT = Path(__file__).resolve().parents[2]
REMOTE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//(?!www\.w3\.org)[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    found = {match.group() for page in pages for match in REMOTE.finditer(page.read_text(encoding="utf-8"))}
    assert not found
    assert not [
        page for page in site.rglob("*.css") if re.search(r"url\([\"']?https?:", page.read_text(encoding="utf-8"))
    ]


def test_search_works_from_disk(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index")
    assert (site / "assets" / "frame-worker.js").is_file()
    assert "assets/frame-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_settings_and_names_of_the_contract_have_their_place(site: Path) -> None:
    assert "max_batch_tokens" in (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert 'id="vajra_py.contract.BatchBuilder"' in (site / "api" / "contract.html").read_text(encoding="utf-8")
    of_metrics = (site / "api" / "metrics.html").read_text(encoding="utf-8")
    assert all(f'id="vajra_py.metrics.Comparison.{name}"' in of_metrics for name in ("best", "versus", "frame"))
