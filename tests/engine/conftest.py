"""Shared fixture of tests of the engine's control: a model directory that is never loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def hollow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory that is accepted as a model until it is loaded."""
    folder = tmp_path_factory.mktemp("hollow")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder
