"""`type: jsonl`: JSON Lines with one request per line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from vajra_py.workload.file_options import FileOptions
from vajra_py.workload.readers.jsonl import read_jsonl
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload


class JsonlConfig(FileOptions):
    """A workload in this project's own format: JSON Lines with one request per line."""

    type: Literal["jsonl"]
    sort: bool = Field(False, description="Sort requests by arrival; otherwise times out of order are an error.")

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        return read_jsonl(base_dir / self.path, sort=self.sort)
