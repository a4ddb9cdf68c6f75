"""SlidingServe: chunks that fit the decodes' SLOs over two consecutive steps; if not all prompts can be in time, a
subset of them is chosen.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from vajra_policies.preemption import PreemptionConfig, preemption_mode
from vajra_policies.slo.targets import token_due_at
from vajra_policies.slo.windows import first_of_two, most_in_time
from vajra_py.contract import (
    BatchBuilder,
    BatchFeatures,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
    SteadyState,
    fill,
)


class SlidingServeConfig(PreemptionConfig):
    """Parameters of `sliding_serve`. The parts of the paper that were available state no defaults; the defaults here
    are round figures.
    """

    min_chunk: int = Field(
        128, ge=1, description="Minimum number of prompt tokens of a step.", json_schema_extra={"unit": "tokens"}
    )
    max_chunk: int = Field(
        2048, ge=1, description="Maximum number of prompt tokens of a step.", json_schema_extra={"unit": "tokens"}
    )
    grain: int = Field(
        32, ge=1, description="Prompt tokens of a step are multiples of this.", json_schema_extra={"unit": "tokens"}
    )
    safety_factor: float = Field(1.2, ge=1, description="Factor of predicted step times, for safety.")
    candidates: int = Field(
        10,
        ge=1,
        le=64,
        description="Maximum number of prompts to choose from those that can be in time.",
        json_schema_extra={"unit": "requests"},
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if max(self.min_chunk, self.grain) > self.max_chunk:
            given = f"min_chunk {self.min_chunk}, grain {self.grain}, max_chunk {self.max_chunk}"
            raise ValueError(
                f"the sizes do not fit together (got {given}). Allowed: min_chunk and grain up to max_chunk"
            )
        return self


class SlidingServe:
    """Gives this step C_1 prompt tokens and plans C_2 for the next: the pair with the largest sum within two limits.

    - The limits are T_1(C_1) <= s_1 and T_1(C_1) + T_2(C_1, C_2) <= s_2: every decode gets its next two tokens in time.
      T_1 and T_2 are the predicted times of the two steps. s_1 is the shortest time until the next token of a decode is
      due, and s_2 until the token after it is due. A greedy chunk would use all of s_1 and leave nothing for the next
      step.
    - The pair is found by ternary search. Of equal sums, the larger C_1 is chosen; if no pair meets the limits, C_1 is
      `min_chunk`.
    - T_1 and T_2 are predicted by the run's latency model for the decodes and one chunk of the most urgent prompt, and
      multiplied by `safety_factor`.
    - If the first `candidates` prompts cannot all have their first token in time, the largest subset that can is chosen
      by dynamic programming (a 0/1 knapsack: the least time for each number of requests). The other candidates are
      skipped while a chosen one gets a chunk.

    Left out: the order of prompts, which is the prioritizer's (`qoserve`, `edf`); the fitted predictor, linear in seven
    features. Written from summaries, since the text was not available: the requests in the knapsack and their value
    (one each) are ours.

    Source: Chen et al., "Beyond Greedy Chunking: SLO-Aware Sliding-Window Scheduling for LLM Inference" (arXiv:2606.05933).
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState), is_work_conserving=True)
    """`fill` adds only the decodes if no prompt waits or if the decodes fill the batch, so equal steps repeat. If
    skipping prompts would leave a step empty, none is skipped, so the replica does not idle.
    """

    def __init__(self, config: SlidingServeConfig, context: PolicyContext) -> None:
        self._config = config
        self._mode = preemption_mode(config, context)
        self._time_s = context.latency.stage_time_s
        largest = BatchFeatures().with_chunk(config.max_chunk, 0)
        self._token_s = config.safety_factor * self._time_s(largest) / config.max_chunk
        self._slacks = (float("inf"), float("inf"))
        self._budget: int | None = None
        self._passed: frozenset[RequestView] = frozenset()

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then the chosen prompts within the token budget that two steps allow."""
        self._budget, self._passed = None, frozenset()
        if replica.num_waiting or replica.num_partial_prefills:
            due = [(at, request.tbt_slo_s or 0.0) for request in replica.decodes() if (at := token_due_at(request))]
            first = min((at for at, _ in due), default=float("inf"))
            second = min((at + tbt_s for at, tbt_s in due), default=float("inf"))
            self._slacks = (first - now, second - now)
            self._passed = self._late(replica, now)
        fill(replica, batch, self._next_chunk, self._mode)
        if self._passed and not batch.num_requests:
            self._passed = frozenset()
            fill(replica, batch, self._next_chunk, self._mode)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return `max_chunk`, or the remaining tokens if these are fewer."""
        return min(self._config.max_chunk, num_remaining_tokens)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        if request in self._passed:
            return 0
        if self._budget is None:
            self._budget = self._first_of_two(request, batch.features())
        room = min(self._budget - batch.features().prefill_tokens, batch.tokens_left)
        return min(batch.max_chunk(request), room) if room > 0 else None

    def _first_of_two(self, request: RequestView, now: BatchFeatures) -> int:
        """Return C_1 for a step with the decodes of `now`, as if all prompt tokens of the step belonged to this
        request.
        """
        config, (s_1, s_2) = self._config, self._slacks
        done, decodes = request.num_computed_tokens, now.num_decodes
        following = BatchFeatures().with_decodes(decodes, now.decode_context_tokens + decodes)

        def t_1(c_1: int) -> float:
            return config.safety_factor * self._time_s(now.with_chunk(c_1, done))

        def t_2(c_1: int, c_2: int) -> float:
            return config.safety_factor * self._time_s(following.with_chunk(c_2, done + c_1) if c_2 else following)

        smallest = -(-config.min_chunk // config.grain) * config.grain
        sizes = range(smallest, config.max_chunk + 1, config.grain)
        return first_of_two(t_1, t_2, s_1, s_2, sizes) or config.min_chunk

    def _late(self, replica: LocalReplicaView, now: float) -> frozenset[RequestView]:
        """Return the prompts to skip: among the first `candidates` prompts, those that have a TTFT SLO and are not
        chosen.

        Empty if all candidates with a TTFT SLO can be in time, or if none can.
        """
        heads = [*replica.partial_prefills()]
        for request in replica.waiting():
            if len(heads) >= self._config.candidates:
                break
            heads.append(request)
        with_slo = [
            one for one in heads[: self._config.candidates] if one.ttft_slo_s is not None and not one.num_output_tokens
        ]
        jobs = [
            (one.arrived_at + (one.ttft_slo_s or 0.0) - now, one.num_remaining_prompt_tokens * self._token_s)
            for one in with_slo
        ]
        chosen = most_in_time(jobs)
        return frozenset(one for index, one in enumerate(with_slo) if index not in chosen) if chosen else frozenset()


SPEC = PolicySpec(
    name="sliding_serve",
    layer=Layer.REPLICA_SCHEDULER,
    config=SlidingServeConfig,
    build=SlidingServe,
    summary=(
        "The prompt tokens for which this step and the next have time; if not all prompts can be in time, as many as "
        "possible."
    ),
    source="SlidingServe (arXiv:2606.05933)",
    advice=(
        "Use it with `qoserve` where requests have TBT SLOs, and small chunks in many steps are better than one large "
        "chunk. Not without SLOs: every step then has the largest size."
    ),
)
