"""Step time as a linear formula, for analytic tests, teaching and fits with few coefficients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from vajra_py.contract.latency import BatchFeatures


class ConstantModel(Struct, frozen=True):
    """Latency model in which every step takes `step_time_s`, divided equally over `num_stages` stages."""

    step_time_s: float
    num_stages: int = 1

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of each stage."""
        return self.step_time_s / self.num_stages

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of all stages."""
        return self.step_time_s

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> npt.NDArray[np.float64]:
        """Return the constant time for every step."""
        return np.full(num_steps, self.step_time_s)


class AffineModel(Struct, frozen=True):
    """Latency model with a base time plus a time per token, request and attended token, all in seconds.

    With `overlap`, the time of tokens and pairs (arithmetic) and that of decodes' cached tokens (memory) overlap: only
    the longer of the two counts.
    """

    base_s: float
    per_token_s: float = 0.0
    per_request_s: float = 0.0
    per_prefill_pair_s: float = 0.0
    """Seconds per query-key pair of prefill attention."""
    per_decode_context_token_s: float = 0.0
    per_swap_byte_s: float = 0.0
    num_stages: int = 1
    overlap: bool = False

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of each stage; all stages are equal."""
        return self.batch_time_s(features) / self.num_stages

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of all stages."""
        if self.overlap:
            memory = features.decode_context_tokens * self.per_decode_context_token_s
            return max(self._compute_s(features), memory) + self._in_turn_s(features)
        fixed = self.base_s + features.num_tokens * self.per_token_s + features.num_requests * self.per_request_s
        fixed += features.prefill_attention_pairs * self.per_prefill_pair_s + features.swap_bytes * self.per_swap_byte_s
        return fixed + features.decode_context_tokens * self.per_decode_context_token_s

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of each step of a run of decodes; see `PredictsDecodeRuns`."""
        contexts = (first_context_tokens + num_decodes * np.arange(num_steps)).astype(np.float64)
        if self.overlap:
            features = BatchFeatures(num_decodes=num_decodes)
            busy = np.maximum(self._compute_s(features), contexts * self.per_decode_context_token_s)
            overlapped: npt.NDArray[np.float64] = busy + self._in_turn_s(features)
            return overlapped
        fixed = self.batch_time_s(BatchFeatures(num_decodes=num_decodes))
        times: npt.NDArray[np.float64] = fixed + contexts * self.per_decode_context_token_s
        return times

    def _compute_s(self, features: BatchFeatures) -> float:
        return features.num_tokens * self.per_token_s + features.prefill_attention_pairs * self.per_prefill_pair_s

    def _in_turn_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the parts of a step that never overlap with other work."""
        return self.base_s + features.num_requests * self.per_request_s + features.swap_bytes * self.per_swap_byte_s
