"""`type: lengths`: a CSV file of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vajra_py.workload.arrivals import ArrivalProcess, AtOnce, PiecewiseConstant
from vajra_py.workload.file_options import TraceOptions
from vajra_py.workload.kinds.csv import CsvField
from vajra_py.workload.options import Count
from vajra_py.workload.readers.csv import CsvLayout, read_lengths
from vajra_py.workload.synthetic import RngFor, starts_of
from vajra_py.workload.workload import Workload


class LengthsConfig(TraceOptions):
    """A CSV file of prompt and output lengths, for example from ShareGPT, with or without arrivals and tenants."""

    type: Literal["lengths"]
    arrivals: ArrivalProcess | None = Field(None, description="Arrival process; null: the file's column.")
    num_requests: Count | None = Field(
        None, description="Number of requests: the file's first rows, or rows drawn from it; null: all rows."
    )
    sample: bool = Field(
        False, description="Draw rows at random, with replacement, in place of the file's order; needs arrivals."
    )
    columns: dict[CsvField, str] = Field({}, description="Column names of fields whose names are not recognized.")

    @model_validator(mode="after")
    def _sampled_with_arrivals(self) -> LengthsConfig:
        if self.sample and self.arrivals is None:
            raise ValueError("sample shuffles the file's arrivals. Allowed: sample together with arrivals")
        return self

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        return read_lengths(
            base_dir / self.path,
            arrivals=None if self.arrivals is None else starts_of(self.arrivals, rng_for),
            num_requests=self.num_requests,
            sample=rng_for("rows") if self.sample else None,
            layout=CsvLayout(
                {str(key): name for key, name in self.columns.items()}, sort=self.sort, drop_empty=self.drop_empty
            ),
        )

    def mean_rate(self) -> float | None:
        """Return the rate of `arrivals`; None for the file's arrivals, arrivals at once, and piecewise rates."""
        is_drawn = self.arrivals is not None and not isinstance(self.arrivals, AtOnce | PiecewiseConstant)
        return self.arrivals.rate if is_drawn else None  # type: ignore[union-attr]
