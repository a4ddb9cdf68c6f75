"""`type: burstgpt`: a BurstGPT trace."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from vajra_py.workload.file_options import TraceOptions
from vajra_py.workload.readers.csv import read_burstgpt
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload


class BurstGptConfig(TraceOptions):
    """A BurstGPT trace: CSV with Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type."""

    type: Literal["burstgpt"]
    drop_empty: bool = Field(
        True, description="Leave out failures (0 response tokens) and report their number; otherwise they are an error."
    )
    model: str | None = Field(
        None, description="Keep the requests to this model only (as in the file: ChatGPT, GPT-4)."
    )
    log_type: str | None = Field(
        None, description="Keep the requests of this kind only (as in the file: Conversation log, API log)."
    )

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        return read_burstgpt(
            base_dir / self.path,
            sort=self.sort,
            drop_empty=self.drop_empty,
            model=self.model,
            log_type=self.log_type,
        )
