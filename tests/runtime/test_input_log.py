"""A log of inputs is read by what its first line says that it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from vajra_py.errors import RunError
from vajra_py.runtime.records.input_log import Abort, InputLog, read_inputs


@pytest.mark.parametrize("version", [1, 2])
def test_earlier_versions_are_read_too(version: int, tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl.gz"
    log = InputLog(path)
    log.note(Abort(5, "a"))
    log.close()
    header, *rows = gzip.decompress(path.read_bytes()).decode().splitlines()
    assert json.loads(header) == {"version": 2}
    path.write_bytes(gzip.compress("\n".join([json.dumps({"version": version}), *rows]).encode()))
    assert read_inputs(path) == [Abort(5, "a")]


@pytest.mark.parametrize("header", ['{"version": 3}', "{}", ""])
def test_another_version_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl.gz"
    path.write_bytes(gzip.compress(header.encode()))
    with pytest.raises(RunError, match=r"of another version .*Allowed: 1, 2"):
        read_inputs(path)
