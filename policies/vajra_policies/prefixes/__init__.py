"""Order by cached prefixes: who has the most in the cache, or the least left to compute."""

from __future__ import annotations

from vajra_policies.prefixes import longest_prefix_match, preflow, residual_shortest_job
from vajra_py.contract import PolicySpec

POLICIES: tuple[PolicySpec, ...] = (longest_prefix_match.SPEC, preflow.SPEC, residual_shortest_job.SPEC)
