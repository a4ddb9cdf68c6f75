"""`type: agentic`: recorded sessions of coding agents."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from vajra_py.workload.arrivals import ArrivalProcess
from vajra_py.workload.file_options import FileOptions
from vajra_py.workload.options import Count
from vajra_py.workload.readers.agentic import read_agentic
from vajra_py.workload.synthetic import RngFor, starts_of
from vajra_py.workload.workload import Workload


class AgenticConfig(FileOptions):
    """Recorded sessions of coding agents (JSON lines), whose prompts repeat earlier turns."""

    type: Literal["agentic"]
    arrivals: ArrivalProcess = Field(description="Arrival process of sessions (rates in sessions per second).")
    num_sessions: Count | None = Field(None, description="Number of sessions, the first of the file; null: all.")
    mode: Literal["closed", "open", "programs"] = Field(
        "closed",
        description=(
            "closed: a turn arrives a think time after the end of the one before; open: turns arrive at their recorded times; programs: as closed, and each session is a program that states its calls."
        ),
    )

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        starts = starts_of(self.arrivals, rng_for)
        return read_agentic(base_dir / self.path, starts, num_sessions=self.num_sessions, mode=self.mode)
