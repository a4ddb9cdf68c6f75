"""Order by size: the shortest, the shortest that is left, or the shortest for its wait."""

from __future__ import annotations

from vajra_policies.size import (
    highest_response_ratio,
    learning_to_rank,
    shortest_job,
    shortest_remaining,
    skip_join_mlfq,
    trail,
)
from vajra_py.contract import PolicySpec

POLICIES: tuple[PolicySpec, ...] = (
    shortest_job.SPEC,
    shortest_remaining.SPEC,
    trail.SPEC,
    learning_to_rank.SPEC,
    highest_response_ratio.SPEC,
    skip_join_mlfq.SPEC,
)
