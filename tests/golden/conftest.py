"""Fixtures of comparisons with recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers.trace import read_json


@pytest.fixture(scope="session")
def recorded(shared_dir: Path) -> Callable[[str], Path]:
    """Path of a recorded folder or file by its name; skips where it is absent."""

    def path_of(name: str) -> Path:
        path = shared_dir / "recorded" / name
        if not path.exists():
            pytest.skip(f"recorded decisions absent: no {path}")
        return path

    return path_of


@pytest.fixture(scope="session")
def recorded_cases(recorded: Callable[[str], Path]) -> Callable[[str], list[dict[str, Any]]]:
    """Runs of a recorded file by its name; skips where it is absent."""
    return lambda name: [case for _, case in read_json(recorded(name))]
