"""`type: sessions`: conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vajra_py.workload.arrivals import ArrivalProcess
from vajra_py.workload.distributions import Positive
from vajra_py.workload.options import Count, WorkloadOptions, check_end
from vajra_py.workload.sessions import Sessions, sessions_workload
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload


class SessionsConfig(WorkloadOptions, Sessions):
    """Conversations whose prompts grow turn by turn and share system prompts."""

    type: Literal["sessions"]
    arrivals: ArrivalProcess = Field(description="Arrival process of sessions (rates in sessions per second).")
    num_sessions: Count | None = Field(None, description="Number of sessions; null: as many as start in duration_s.")
    duration_s: Positive | None = Field(None, description="Seconds for which sessions start; null: until num_sessions.")

    @model_validator(mode="after")
    def _ends(self) -> SessionsConfig:
        check_end(self.arrivals, self.num_sessions, self.duration_s, "num_sessions")
        return self

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        return sessions_workload(
            self, self.arrivals, rng_for, num_sessions=self.num_sessions, duration_s=self.duration_s
        )
