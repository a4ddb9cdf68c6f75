"""`type: synthetic`: independent requests, or users in a closed loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vajra_py.workload.arrivals import ArrivalProcess, AtOnce, PiecewiseConstant
from vajra_py.workload.distributions import Positive
from vajra_py.workload.options import Count, WorkloadOptions, check_end
from vajra_py.workload.synthetic import ClosedLoop, Lengths, RngFor, closed_loop_workload, synthetic_workload
from vajra_py.workload.workload import Workload


class SyntheticConfig(WorkloadOptions, Lengths):
    """Requests with drawn lengths that arrive independently, or from users in a closed loop."""

    type: Literal["synthetic"]
    arrivals: Annotated[ArrivalProcess | ClosedLoop, Field(discriminator="type")] = Field(
        description="Arrival process."
    )
    num_requests: Count | None = Field(None, description="Number of requests; null: as many as arrive in duration_s.")
    duration_s: Positive | None = Field(
        None, description="Seconds for which requests arrive; null: until num_requests."
    )

    @model_validator(mode="after")
    def _ends(self) -> SyntheticConfig:
        if isinstance(self.arrivals, ClosedLoop) and (self.num_requests is None or self.duration_s is not None):
            raise ValueError("closed_loop arrivals need num_requests and no duration_s. Allowed: num_requests")
        check_end(self.arrivals, self.num_requests, self.duration_s, "num_requests")
        return self

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        if isinstance(self.arrivals, ClosedLoop):
            return closed_loop_workload(self.arrivals, self, rng_for, self.num_requests or 0)
        return synthetic_workload(
            self.arrivals, self, rng_for, num_requests=self.num_requests, duration_s=self.duration_s
        )

    def mean_rate(self) -> float | None:
        """Return the rate of the arrivals; None for arrivals at once, a closed loop, and piecewise rates of which only
        a part is used.
        """
        if isinstance(self.arrivals, PiecewiseConstant):
            is_whole = self.num_requests is None and self.duration_s is None and not self.is_cut
            return self.arrivals.rate if is_whole else None
        return None if isinstance(self.arrivals, AtOnce | ClosedLoop) else self.arrivals.rate
