"""`type: program_file`: programs read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from vajra_py.workload.arrivals import ArrivalProcess
from vajra_py.workload.file_options import FileOptions
from vajra_py.workload.options import Count
from vajra_py.workload.programs import ContextRule
from vajra_py.workload.readers.programs import read_programs
from vajra_py.workload.synthetic import RngFor, starts_of
from vajra_py.workload.workload import Workload


class ProgramFileConfig(FileOptions):
    """Programs read from CSV, JSON Lines or Parquet: one row per call, with its program, parents and delay."""

    type: Literal["program_file"]
    arrivals: ArrivalProcess | None = Field(
        None, description="Arrival process of programs (rates in programs per second); null: the file's `arrived_at`."
    )
    num_programs: Count | None = Field(None, description="Number of programs, the first of the file; null: all.")
    context: ContextRule = Field(
        "none",
        description=(
            "grow: a prompt begins with that of its first parent, if that is shorter, and goes on with its parents' answers, as far as there is room; none: prompts share nothing."
        ),
    )

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        starts = None if self.arrivals is None else starts_of(self.arrivals, rng_for)
        path = base_dir / self.path
        return read_programs(path, starts, num_programs=self.num_programs, context=self.context)
