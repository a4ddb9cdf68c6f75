"""Settings under `workload:`: any kind of workload, by its `type`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import Field

from vajra_py.workload.arrivals import PiecewiseConstant
from vajra_py.workload.build import with_options
from vajra_py.workload.file_options import SAMPLING_OPTIONS
from vajra_py.workload.kinds.agentic import AgenticConfig
from vajra_py.workload.kinds.azure import AzureConfig
from vajra_py.workload.kinds.burstgpt import BurstGptConfig
from vajra_py.workload.kinds.csv import CsvConfig
from vajra_py.workload.kinds.jsonl import JsonlConfig
from vajra_py.workload.kinds.lengths import LengthsConfig
from vajra_py.workload.kinds.mooncake import MooncakeConfig
from vajra_py.workload.kinds.profile import ProfileConfig
from vajra_py.workload.kinds.program_file import ProgramFileConfig
from vajra_py.workload.kinds.programs import ProgramsConfig
from vajra_py.workload.kinds.sessions import SessionsConfig
from vajra_py.workload.kinds.synthetic import SyntheticConfig
from vajra_py.workload.options import WorkloadOptions
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload, distinct_names

__all__ = ["MergeConfig", "WorkloadConfig"]

_LEAVES_OUT = ("max_prompt_tokens", "max_total_tokens", *SAMPLING_OPTIONS)


class MergeConfig(WorkloadOptions):
    """Several workloads merged on one clock."""

    type: Literal["merge"]
    workloads: tuple[WorkloadConfig, ...] = Field(
        min_length=1, description="Merged workloads, each with its own options."
    )
    share_content: bool = Field(
        False, description="Equal segment ids in different parts are the same content, so prefixes are shared."
    )

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Apply each part's own options, and merge the parts on one clock; random streams are named after the parts."""
        names = distinct_names([part.name or part.type for part in self.workloads])
        parts: list[Workload] = []
        for part, name in zip(self.workloads, names, strict=True):

            def streams(stream: str, part_name: str = name) -> np.random.Generator:
                return rng_for(f"{part_name}/{stream}")

            parts.append(with_options(part.source(streams, base_dir), part, streams))
        return parts[0].merge(*parts[1:], share_content=self.share_content)

    def mean_rate(self) -> float | None:
        """Return the rate of all parts together; None if the rate or the duration of any part is unknown.

        Also return None if the merged workload is cut: parts may end at different times, so the rate before the cut may
        differ from the rate of the whole.
        """
        if self.is_cut:
            return None
        parts = [_stretch(one) for one in self.workloads]
        known = [one for one in parts if one is not None]
        if len(known) < len(parts):
            return None
        return sum(one.num_requests for one in known) / max(one.duration_s for one in known)


WorkloadConfig: TypeAlias = Annotated[
    AgenticConfig
    | AzureConfig
    | BurstGptConfig
    | CsvConfig
    | JsonlConfig
    | LengthsConfig
    | MergeConfig
    | MooncakeConfig
    | ProfileConfig
    | ProgramFileConfig
    | ProgramsConfig
    | SessionsConfig
    | SyntheticConfig,
    Field(discriminator="type"),
]
"""Any kind of workload, distinguished by `type`."""


class _Stretch(NamedTuple):
    """Mean number of requests of a part of a merged workload, and the part's mean duration in seconds."""

    num_requests: float
    duration_s: float


def _stretch(config: WorkloadOptions) -> _Stretch | None:
    """Return the mean size and duration of one part of a merged workload; None if they are unknown."""
    rate = config.mean_rate()
    if rate is None or config.is_cut or any(getattr(config, name, None) is not None for name in _LEAVES_OUT):
        return None
    number, duration_s = getattr(config, "num_requests", None), getattr(config, "duration_s", None)
    if isinstance(config, SyntheticConfig) and isinstance(config.arrivals, PiecewiseConstant):
        duration_s = config.arrivals.duration_s
    lengths_s = [one for one in (duration_s, None if number is None else number / rate) if one is not None]
    if not lengths_s:
        return None
    pace = rate / config.rate if config.rate is not None else config.time_scale or 1.0
    return _Stretch(min(lengths_s) * rate, min(lengths_s) * pace)
