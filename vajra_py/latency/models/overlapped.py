"""Roofline step time where a device's arithmetic, memory traffic and communication overlap, or run one after another.

The work is that of `RooflineModel`, operator by operator; only the degree of overlap of the resources differs. Any
schedule of the operators takes at most the sum of all times (`none`), and at least the largest of the sums by resource
(`step`). Sources: Zhu et al., "NanoFlow" (2408.12757), overlap over the whole step; Kamath et al., "POD-Attention"
(2410.18038), overlap of the two kinds of attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures, ModelDescription
from vajra_py.latency.hardware.deployment import Deployment, Parallelism
from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.models.roofline import (
    RooflineModel,
    all_reduce_s,
    decode_key_s,
    elementwise_token_s,
    layer_coefficients,
    step_coefficients,
)

Overlap: TypeAlias = Literal["none", "partial", "operators", "attention", "step"]
"""Degree of overlap of arithmetic, memory traffic and communication between devices; `RooflineModel` has `partial`."""

_DESCRIBED = {
    "none": "nothing overlaps",
    "operators": "overlap within operators",
    "attention": "overlap within operators, prefill and decode attention as one",
    "step": "overlap over the whole step",
}


class Work(NamedTuple):
    """Seconds that some work needs of each resource of a device, without overlap."""

    compute_s: float
    """Seconds of arithmetic."""
    memory_s: float
    """Seconds of the device's memory traffic."""
    network_s: float
    """Seconds of communication between the devices of a replica."""

    def plus(self, other: Work) -> Work:
        """Return the sum of this work and `other`."""
        return Work(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def times(self, factor: float) -> Work:
        """Return the work multiplied by `factor`."""
        return Work(self[0] * factor, self[1] * factor, self[2] * factor)


_PREFILL, _DECODE = 0, 1
"""Indices of the two kinds of attention among the operators."""
_NOTHING = Work(0.0, 0.0, 0.0)


class OverlappedRooflineModel:
    """Roofline with a chosen overlap; implements `LatencyModel`, `PredictsDecodeRuns` and `DescribesModel`.

    Kernel and link latencies, step overhead and transfers between stages never overlap with other work. Neither do
    copies of swapped blocks: the step reads blocks that were swapped in, or overwrites blocks that were swapped out.

    Raises:
        ConfigError: the model cannot be divided as configured, or the device does not support its dtype.
        ValueError: the overlap is that of `RooflineModel`, or unknown.
    """

    def __init__(
        self, model: ModelSpec, device: DeviceSpec, parallelism: Parallelism | None = None, overlap: Overlap = "step"
    ) -> None:
        if overlap not in _DESCRIBED:
            raise ValueError(f"overlap: is not one of this model ({overlap!r}). Allowed: {', '.join(_DESCRIBED)}")
        self.overlap = overlap
        self.deployment = Deployment(model, device, parallelism or Parallelism())
        split = self.deployment.parallelism
        self.num_stages: int = split.pipeline
        self._layers = layer_coefficients(self.deployment)
        self._step = step_coefficients(self.deployment)
        self._elementwise_s = elementwise_token_s(self.deployment)
        self._reduce_s = all_reduce_s(self.deployment)[1]
        self._key_memory_s, self._key_compute_s = decode_key_s(self.deployment)
        self._full_layers = model.num_layers - model.num_sliding_layers
        self._windowed_layers = model.num_sliding_layers
        self._first_share = self.deployment.num_first_layers / model.num_layers
        self._last_share = self.deployment.num_last_layers / model.num_layers

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds from the batch's entry into the first stage until its tokens leave the last stage.

        For a batch without tokens, they are the seconds of copying the swapped bytes.
        """
        if not features.num_tokens:
            return features.swap_bytes * self._step.swap_byte_s
        operators, head = self._operators(features)
        if self.num_stages == 1:
            busy = self._time_s([*operators, head])
        else:
            last = [*(each.times(self._last_share) for each in operators), head]
            busy = self._time_s(operators) * (1.0 - self._last_share) + self._time_s(last)
        return busy + self._in_turn_s(features)

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds that the slowest stage is busy with this batch; with a single stage, the seconds of the
        whole step.
        """
        if self.num_stages == 1 or not features.num_tokens:
            return self.batch_time_s(features)
        operators, head = self._operators(features)
        last = [*(each.times(self._last_share) for each in operators), head]
        step = self._step
        fixed = self._fixed_s(features)
        slowest = max(
            self._first_share * (self._time_s(operators) + fixed), self._time_s(last) + self._last_share * fixed
        )
        sending = step.send_fixed_s + features.num_tokens * step.send_token_s
        return slowest + sending + step.step_overhead_s + features.swap_bytes * step.swap_byte_s

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of each step of a run of decodes; see `PredictsDecodeRuns`."""
        first = BatchFeatures(num_decodes, first_context_tokens)
        steps = (
            first._replace(decode_context_tokens=first_context_tokens + step * num_decodes) for step in range(num_steps)
        )
        return np.fromiter((self.batch_time_s(each) for each in steps), np.float64, num_steps)

    def work(self, features: BatchFeatures) -> Work:
        """Return the seconds that a step needs of each resource over all stages, without work that never overlaps."""
        operators, head = self._operators(features)
        return _sum([*operators, head])

    def kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """Return the number of KV blocks that fit; see `Deployment.kv_blocks`."""
        return self.deployment.kv_blocks(block_size, memory_fraction)

    def describe(self) -> ModelDescription:
        """Describe the model and its devices; see `DescribesModel`."""
        deployment = self.deployment
        plain = RooflineModel(deployment.model, deployment.device, deployment.parallelism).describe()
        return replace(plain, source=f"{plain.source}, {_DESCRIBED[self.overlap]}", kv_blocks=self.kv_blocks)

    def _time_s(self, operators: list[Work]) -> float:
        """Return the seconds of these operators with the configured overlap; their order is that of `_operators`."""
        if self.overlap == "none":
            return sum(_sum(operators))
        if self.overlap == "step":
            return max(_sum(operators))
        if self.overlap == "attention":
            operators = [operators[_PREFILL].plus(operators[_DECODE]), *operators[_DECODE + 1 :]]
        return sum(map(max, operators))

    def _operators(self, features: BatchFeatures) -> tuple[list[Work], Work]:
        """Return (work of each operator over all layers, work of the head); the first two operators are the attention
        of prefills and the attention of decodes.
        """
        layers, step, tokens = self._layers, self._step, features.num_tokens
        operators = [
            self._prefill(features),
            self._decode(features),
            Work(tokens * layers.dense_flops_s, layers.dense_weights_s + tokens * layers.dense_token_s, 0.0),
            Work(0.0, tokens * self._elementwise_s, 0.0),
            Work(0.0, 0.0, tokens * self._reduce_s),
        ]
        if layers.expert_weights_s:
            reading = layers.expert_weights_s * (1.0 - layers.expert_missed**tokens) + tokens * layers.expert_token_s
            operators.append(Work(tokens * layers.expert_flops_s, reading, 0.0))
        if features.num_merged_tokens:
            operators.append(Work(0.0, 0.0, features.num_merged_tokens * layers.merge_token_s))
        rows = features.num_requests + features.num_draft_tokens
        return operators, Work(rows * step.head_flops_s, step.head_weights_s + rows * step.head_row_s, 0.0)

    def _prefill(self, features: BatchFeatures) -> Work:
        if not features.prefill_tokens:
            return _NOTHING
        layers, window = self._layers, self._layers.window
        keys, pairs = features.prefill_context_tokens + features.prefill_tokens, features.prefill_attention_pairs
        compute, memory = pairs * layers.pair_s, keys * layers.key_s
        if window:
            compute += min(pairs, features.prefill_tokens * window) * layers.window_pair_s
            memory += min(keys, features.num_prefills * window + features.prefill_tokens) * layers.window_key_s
        return Work(compute, memory, 0.0)

    def _decode(self, features: BatchFeatures) -> Work:
        keys = features.decode_context_tokens + features.num_decodes
        seen = float(keys * self._full_layers)
        if self._windowed_layers:
            seen += min(keys, features.num_decodes * self._layers.window) * self._windowed_layers
        return Work(seen * self._key_compute_s, seen * self._key_memory_s, 0.0)

    def _fixed_s(self, features: BatchFeatures) -> float:
        """Return the sum of the fixed latencies of all layers' kernels and collectives, in seconds."""
        return self._layers.fixed_s + (self._layers.merge_fixed_s if features.num_merged_tokens else 0.0)

    def _in_turn_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the parts of a step that never overlap with other work."""
        step = self._step
        sending = (self.num_stages - 1) * (step.send_fixed_s + features.num_tokens * step.send_token_s)
        overhead = self.num_stages * step.step_overhead_s
        return self._fixed_s(features) + sending + overhead + features.swap_bytes * step.swap_byte_s


def _sum(operators: list[Work]) -> Work:
    total = _NOTHING
    for each in operators:
        total = total.plus(each)
    return total
