"""`type: programs`: programs of calls with drawn graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vajra_py.workload.arrivals import ArrivalProcess
from vajra_py.workload.distributions import Positive
from vajra_py.workload.options import Count, WorkloadOptions, check_end
from vajra_py.workload.programs import ProgramCalls, programs_workload
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload


class ProgramsConfig(WorkloadOptions, ProgramCalls):
    """Programs of calls with drawn graphs: chains, fork-join, trees, random graphs.

    A call is sent once all its parents have ended.
    """

    type: Literal["programs"]
    arrivals: ArrivalProcess = Field(description="Arrival process of programs (rates in programs per second).")
    num_programs: Count | None = Field(None, description="Number of programs; null: as many as start in duration_s.")
    duration_s: Positive | None = Field(None, description="Seconds for which programs start; null: until num_programs.")

    @model_validator(mode="after")
    def _ends(self) -> ProgramsConfig:
        check_end(self.arrivals, self.num_programs, self.duration_s, "num_programs")
        return self

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        return programs_workload(
            self, self.arrivals, rng_for, num_programs=self.num_programs, duration_s=self.duration_s
        )
