"""`type: azure`: an Azure LLM inference trace."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vajra_py.workload.file_options import TraceOptions
from vajra_py.workload.readers.csv import read_azure
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload


class AzureConfig(TraceOptions):
    """An Azure LLM inference trace (2023, 2024): CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

    type: Literal["azure"]

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        return read_azure(base_dir / self.path, sort=self.sort, drop_empty=self.drop_empty)
