"""`type: profile`: a built-in workload fitted to a public trace."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from vajra_py.workload.options import Count, WorkloadOptions
from vajra_py.workload.profiles import own_rate, profile
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload

ProfileName: TypeAlias = Literal[
    "agentic_coding", "agentic_coding_sessions", "arxiv_summarization", "azure2023_code", "azure2023_conv", "mooncake_conversation",
    "mooncake_conversation_sessions", "mooncake_synthetic", "mooncake_toolagent", "servegen_deepseek_r1", "servegen_m_large",
    "servegen_m_mid", "servegen_m_small", "servegen_mm_image", "sharegpt300", "vtc_arena",
]  # fmt: skip


class ProfileConfig(WorkloadOptions):
    """A built-in workload fitted to a public trace.

    In a profile of sessions, sessions start at `rate` divided by the mean number of turns.
    """

    starts_sessions_at_rate: ClassVar[bool] = True

    type: Literal["profile"]
    profile: ProfileName = Field(description="Name of the built-in workload.")
    num_requests: Count = Field(1000, description="Number of requests.")

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        return profile(self.profile, rng_for, self.num_requests, self.rate)

    def mean_rate(self) -> float | None:
        """Return `rate`, or by default the trace's own rate; None if neither is known."""
        return self.rate if self.rate is not None else own_rate(self.profile)
