"""Fixtures of comparisons with recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def recorded(shared_dir: Path) -> Callable[[str], Path]:
    """Path of a recorded folder or file by its name; skips where it is absent."""

    def path_of(name: str) -> Path:
        path = shared_dir / "recorded" / name
        if not path.exists():
            pytest.skip(f"recorded decisions absent: no {path}")
        return path

    return path_of
