"""Past-Future: admit requests while the predicted peak of KV memory fits, with output lengths drawn from past ones."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_py.contract import (
    BatchBuilder,
    EndReason,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
    SteadyState,
)

_BY_ITSELF = frozenset({EndReason.STOP, EndReason.LENGTH})


class PastFutureConfig(FixedChunkConfig):
    """Parameters of `past_future`."""

    lengths: Literal["history", "predicted", "longest"] = Field(
        "history",
        description=(
            "Source of future output lengths: drawn from past ones, the mean of the backend's `output_length`, or the maximum that requests may generate (the conservative rule)."
        ),
    )
    window: int = Field(1000, ge=1, description="Past requests whose output lengths are kept.")
    reserve_fraction: float = Field(
        0.03, ge=0, lt=1, description="Fraction of the KV memory that peaks must leave free."
    )


def peak_tokens(entries: Iterable[tuple[float, float]]) -> float:
    """Return the peak number of tokens held by requests that now hold a_i tokens and generate b_i more.

    Entries are (a, b), in any order. With entries sorted by falling b, the peak is the maximum over k of (sum of the
    first k a_i) + k * b_k. Exact if all requests generate one token per step and free their memory at their end.
    """
    held = peak = 0.0
    for count, (num_held, num_to_come) in enumerate(sorted(entries, key=_to_come, reverse=True), 1):
        held += num_held
        peak = max(peak, held + count * num_to_come)
    return peak


class PastFuture(FixedChunk):
    """Admits a waiting request if, with it, the predicted peak of tokens held is at most M * (1 - reserve).

    - M is the number of tokens that the KV memory holds. The peak is that of `peak_tokens` over the running requests
      and the waiting one, with a_i known tokens and b_i tokens still to be generated.
    - A request's output length is redrawn in each step from the recent output lengths that exceed its output so far. If
      there are none, it is `max_tokens`.
    - A request that does not fit waits, and no request behind it is admitted. Steps are formed as by `fixed_chunk`.

    Memory is counted in whole blocks. Left out: shared prefixes, which count once for each request, and requests in
    flight under pipelining. Window and reserve are round figures; the paper's values were not found.

    Source: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS'25 (arXiv:2507.10150);
    LightLLM.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}), is_work_conserving=True)
    """Decode steps repeat only while nothing waits, since the drawn lengths differ from step to step. An empty replica
    admits its first request in any case.
    """

    def __init__(self, config: PastFutureConfig, context: PolicyContext) -> None:
        limits = context.limits
        super().__init__(config, context)
        self._window = config.window
        self._length_source = config.lengths
        self._predictor = context.output_lengths
        self._stream = context.random_stream("past_future")
        self._most_tokens = (1.0 - config.reserve_fraction) * limits.num_blocks * limits.block_size
        self._slack_tokens = limits.block_size - 1
        self._recent: deque[int] = deque()
        self._lengths: list[int] = []
        """The recent output lengths, ascending."""
        self._entries: list[tuple[float, float]] | None = None
        self._is_closed = False

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts by urgency; admit waiting requests while the peak fits."""
        self._entries, self._is_closed = None, False
        super().schedule(replica, batch, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the output lengths of completed requests."""
        for request in requests:
            if request.end_reason in _BY_ITSELF:
                self._recent.append(request.num_output_tokens)
                insort(self._lengths, request.num_output_tokens)
                if len(self._recent) > self._window:
                    self._lengths.pop(bisect_right(self._lengths, self._recent.popleft()) - 1)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        if request.is_resident or self._room(batch) <= 0 or self._fits(request, replica):
            return super()._next_chunk(request, batch, replica)
        return 0

    def _fits(self, request: RequestView, replica: LocalReplicaView) -> bool:
        """Return True if the peak fits with this request; after a request that does not fit, return False for all later
        ones of the step.
        """
        if self._is_closed or not replica.num_running:
            return not self._is_closed
        if self._entries is None:
            self._entries = [self._entry(one) for one in replica.running()]
        entry = self._entry(request)
        if peak_tokens([*self._entries, entry]) > self._most_tokens:
            self._is_closed = True
            return False
        self._entries.append(entry)
        return True

    def _entry(self, request: RequestView) -> tuple[float, float]:
        """Return (a, b) of a request, as in `peak_tokens`; a includes the largest possible empty part of the request's
        last block.
        """
        return (request.num_known_tokens + self._slack_tokens, self._to_come(request))

    def _to_come(self, request: RequestView) -> float:
        generated, most = request.num_output_tokens, request.max_tokens
        total = float(most)
        if self._length_source == "history":
            first = bisect_right(self._lengths, generated)
            if first < len(self._lengths):
                total = self._lengths[self._stream.integers(first, len(self._lengths))]
        elif self._length_source == "predicted":
            estimate = self._predictor.predict(request)
            total = most if estimate is None else estimate.mean_tokens
        return max(min(total, most) - generated, 0.0)


def _to_come(entry: tuple[float, float]) -> float:
    return entry[1]


SPEC = PolicySpec(
    name="past_future",
    layer=Layer.REPLICA_SCHEDULER,
    config=PastFutureConfig,
    build=PastFuture,
    summary="Fixed chunks; a request is admitted if the expected peak of KV memory fits.",
    source="Past-Future (Gong et al., ASPLOS'25, arXiv:2507.10150)",
    advice=(
        "Use it where outputs are long relative to prompts and memory is the bottleneck: there are hardly any "
        "preemptions at nearly full memory. Not with prefix caching of long shared prefixes, which are counted for "
        "each request."
    ),
)
