"""Step times of recorded simulators, as latency models, and the batches that they see in a plan.

Each was found in the recordings and holds in all of them; the readers check it again with every trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vajra_py.contract import BatchFeatures
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.runtime.support.clock import TICKS_PER_SECOND


class OneStage(ABC):
    """Base of models without pipeline stages."""

    num_stages = 1

    @abstractmethod
    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds of a step."""

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Seconds of a step: there is one stage."""
        return self.stage_time_s(features)


# Dynamo's mocker


@dataclass(frozen=True, slots=True)
class MockerPolynomial(OneStage):
    """`timing_model: polynomial`.

    Prefill ms = 16.50142 + 0.01518344 n + 4.209989e-7 n^2, where n is not quite the sum of new prompt tokens: it is the
    number of prefills times (their mean length so far, rounded down, less their mean length before, rounded down).
    Decode ms = 5.74 + 54.01 p - 25.74 p^2, p = known tokens of everyone who decodes by the worker's KV tokens, at most 1.
    Each part is rounded to whole nanoseconds.
    """

    kv_tokens: int

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds of a step."""
        nanoseconds = 0
        count = features.num_prefills
        if count:
            before = features.prefill_context_tokens
            n = count * ((features.prefill_tokens + before) // count - before // count)
            nanoseconds += _nanoseconds(4.209989e-07 * n * n + 1.518344e-02 * n + 1.650142e01)
        if features.num_decodes:
            p = min(1.0, (features.decode_context_tokens + features.num_decodes) / self.kv_tokens)
            nanoseconds += _nanoseconds(-25.74 * p**2 + 54.01 * p + 5.74)
        return nanoseconds / 1e9


@dataclass(frozen=True, slots=True)
class MockerFixed(OneStage):
    """`timing_model: fixed`: so long for a step with prefills, and so long more for one with decodes."""

    prefill_ms: float
    decode_ms: float

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds of a step."""
        prefill = _nanoseconds(self.prefill_ms) if features.num_prefills else 0
        return (prefill + (_nanoseconds(self.decode_ms) if features.num_decodes else 0)) / 1e9


def _nanoseconds(milliseconds: float) -> int:
    return round(Fraction(milliseconds / 1000.0) * 10**9)


def mocker_model(engine: Mapping[str, Any]) -> MockerPolynomial | MockerFixed:
    """The timing model of a worker with these settings."""
    timing = engine["timing_model"]
    if timing["type"] == "fixed":
        return MockerFixed(timing["prefill_ms"], timing["decode_ms"])
    return MockerPolynomial(engine["num_gpu_blocks"] * engine["block_size"])


def mocker_batch(plan: StepPlan) -> BatchFeatures:
    """The batch as the mocker times it.

    Only tokens of the prompt are prefilled: generated tokens that are computed again after a preemption cost nothing but
    their part of the decode. Whoever gets a token and had some before decodes, also beside a part of its own prompt.
    """
    prefills = prefill_tokens = prefill_context = decodes = decode_context = 0
    for request, num_tokens, before, _ in plan.entries():
        prompt, end = request.num_prompt_tokens, before + num_tokens
        num_prompt = min(prompt, end) - min(prompt, before)
        if num_prompt:
            prefills += 1
            prefill_tokens += num_prompt
            prefill_context += min(prompt, before)
        if request.num_output_tokens and end == request.num_known_tokens:
            decodes += 1
            decode_context += end - 1
    return BatchFeatures(decodes, decode_context, prefills, prefill_tokens, prefill_context_tokens=prefill_context)


def mocker_decode_batch(plan: StepPlan) -> BatchFeatures:
    """The batch of a worker that only decodes: what it computes again after a preemption costs nothing but its part of the decode."""
    ends = [
        before + num_tokens
        for request, num_tokens, before, _ in plan.entries()
        if before + num_tokens == request.num_known_tokens
    ]
    return BatchFeatures(len(ends), sum(ends) - len(ends))


# DistServe's simulator


@dataclass(frozen=True, slots=True)
class DistServeTimes(OneStage):
    """a + b * sum(len) + c * sum(len^2) of a step with prefills, a + b * sum(context + 1) + c * batch of one with decodes alone.

    Both by the number of pipeline stages, the first with one millisecond more for each stage; and, on the first stage, 2 ms and
    0.1 us for every token of everyone's context.
    """

    prefill: Sequence[float]
    decode_small: Sequence[float]
    decode_large: Sequence[float]
    threshold: int
    """Requests from which on a decode batch is large."""
    pipeline_stages: int = 1

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds on the first stage. `prefill_context_tokens`: tokens of the prefilled prompts that this step does not compute."""
        context = features.prefill_tokens + features.prefill_context_tokens + features.decode_context_tokens
        return self.later_stage_time_s(features) + (2 + 0.0001 * context) / 1e3

    def later_stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds on each other stage."""
        stages = self.pipeline_stages
        if features.num_prefills:
            a, b, c = self.prefill
            ms = (a + b * features.prefill_tokens + c * features.prefill_tokens_squared) / stages + stages
        else:
            count = features.num_decodes
            a, b, c = self.decode_small if count < self.threshold else self.decode_large
            ms = (a + b * (features.decode_context_tokens + count) + c * count) / stages
        return ms / 1e3


def distserve_model(config: Mapping[str, Any], stages: int) -> DistServeTimes:
    """The step times of a worker."""
    decode = config["coefficients_decode"]
    return DistServeTimes(config["coefficients_prefill"], decode["small"], decode["large"], decode["threshold"], stages)


class StagedTimer:
    """Steps of one replica go from one pipeline stage to the next, each of which takes them in turn."""

    def __init__(self, latency: DistServeTimes) -> None:
        self._latency = latency
        self._free_at = [0] * (latency.pipeline_stages - 1)

    def first_stage_ticks(self, plan: StepPlan) -> int:
        """Ticks in the first stage."""
        return round(self._latency.stage_time_s(distserve_batch(plan)) * TICKS_PER_SECOND)

    def stage_ticks(self, plan: StepPlan) -> int:
        """Ticks until the step leaves the last stage."""
        later = round(self._latency.later_stage_time_s(distserve_batch(plan)) * TICKS_PER_SECOND)
        leaves_at = plan.formed_at + self.first_stage_ticks(plan)
        for stage, free_at in enumerate(self._free_at):
            leaves_at = self._free_at[stage] = max(leaves_at, free_at) + later
        return leaves_at - plan.formed_at


def distserve_batch(plan: StepPlan) -> BatchFeatures:
    """The batch as DistServe's simulator times it: a cut prompt has its whole length as context, behind it or before it."""
    prefills = tokens = squared = rest = decodes = decode_context = 0
    for request, num_tokens, before, _ in plan.entries():
        if before < request.num_prompt_tokens:
            prefills += 1
            tokens += num_tokens
            squared += num_tokens * num_tokens
            rest += request.num_prompt_tokens - num_tokens
        else:
            decodes += 1
            decode_context += before
    return BatchFeatures(decodes, decode_context, prefills, tokens, squared, rest)


# splitwise-sim


@dataclass(frozen=True, slots=True)
class SplitwiseLinear(OneStage):
    """base + so much for each prompt token, or another base without prompts; and so much for each token task."""

    prompt_base: float
    prompt_token: float
    token_base: float
    token_seq: float

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds of a step."""
        tokens_s = self.token_seq * features.num_decodes
        if features.num_prefills:
            return self.prompt_base + self.prompt_token * features.prefill_tokens + tokens_s
        return self.token_base + tokens_s


@dataclass(frozen=True, slots=True)
class SplitwiseTable(OneStage):
    """Durations by (prompt tokens, token tasks), as a recorded run had them."""

    durations_s: Mapping[tuple[int, int], float]

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds of a step; KeyError for a batch that the recorded run never had."""
        return self.durations_s[features.prefill_tokens, features.num_decodes]


def splitwise_batch(plan: StepPlan) -> BatchFeatures:
    """The batch as splitwise-sim times it: whole prompts, and token tasks."""
    prompts = tokens = decodes = 0
    for request, num_tokens, before, _ in plan.entries():
        if before < request.num_prompt_tokens:
            prompts += 1
            tokens += num_tokens
        else:
            decodes += 1
    return BatchFeatures(decodes, 0, prompts, tokens)
