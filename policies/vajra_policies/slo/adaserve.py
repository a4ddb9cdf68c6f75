"""AdaServe: each request gets as many drafts as its TPOT SLO needs; the rest of the budget goes to the drafts that are
most likely to be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_py.contract import (
    BatchBuilder,
    BatchFeatures,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
    fill,
)


class AdaServeConfig(FixedChunkConfig):
    """Parameters of `adaserve`."""

    budget_tokens: int = Field(
        160,
        ge=1,
        description="B: maximum number of tokens of decodes and their drafts in a step, up to which a step takes about as long as a small one.",
        json_schema_extra={"unit": "tokens"},
    )
    most_needed: int = Field(
        3,
        ge=1,
        description=(
            "n_max: maximum number of drafts that a request gets for its SLO; further drafts go to the requests "
            "where they gain most."
        ),
    )
    acceptance: float = Field(0.7, ge=0, le=1, description="Prior probability that a draft is accepted.")
    prior_drafts: float = Field(4.0, gt=0, description="Weight of the prior, in drafts.")


class Wish(NamedTuple):
    """Need of a decode for drafts: the tokens that the decode needs from a step, and the probability that a draft is
    accepted.
    """

    needed: float
    """A(r): number of tokens that the request needs from this step to meet its SLO."""
    chance: float
    """Probability that a draft is accepted, given that all earlier ones are."""


def shares(wishes: Sequence[Wish], num_drafts: int, most_each: int, most_needed: int) -> list[int]:
    """Divide `num_drafts` drafts among decodes, at most `most_each` for each; return the number of drafts of each.

    Needed drafts come first: in order of falling `needed`, a decode with `chance` q gets drafts until 1 + q + q^2 + ...
    reaches `needed`, or until it has `most_needed` drafts. The rest are assigned one by one, to the decode whose next
    draft has the greatest probability q^j of acceptance.
    """
    most_needed = min(most_needed, most_each)
    given = [0] * len(wishes)
    left = num_drafts
    for index in sorted(range(len(wishes)), key=lambda one: -wishes[one].needed):
        needed, chance = wishes[index]
        expected, gain = 1.0, chance
        while left and expected < needed and given[index] < most_needed and gain > 0:
            expected += gain
            gain *= chance
            given[index] += 1
            left -= 1
    best = [
        (-(one.chance ** (given[index] + 1)), index) for index, one in enumerate(wishes) if given[index] < most_each
    ]
    heapify(best)
    while left and best and best[0][0] < 0:
        gain, index = best[0]
        given[index] += 1
        left -= 1
        heapreplace(best, (gain * wishes[index].chance if given[index] < most_each else 0.0, index))
    return given


class _Drafted:
    """Record of a decoding request: the time when it was first seen to decode, its number of output tokens at that
    time, and its numbers of verified and of accepted drafts since that time.
    """

    __slots__ = ("begun_at", "num_accepted", "num_before", "num_tried", "seen")

    def __init__(self, request: RequestView, now: float) -> None:
        self.begun_at = now
        self.num_before = request.num_output_tokens
        self.seen = (request.num_draft_tokens, request.num_accepted_tokens)
        self.num_tried = self.num_accepted = 0

    def look(self, request: RequestView) -> None:
        """Count the drafts verified since the last call: the accepted drafts, and the first rejected one."""
        drafted, accepted = request.num_draft_tokens - self.seen[0], request.num_accepted_tokens - self.seen[1]
        self.seen = (request.num_draft_tokens, request.num_accepted_tokens)
        self.num_accepted += accepted
        self.num_tried += min(drafted, accepted + 1)


class AdaServe(FixedChunk):
    """Divides the B - n drafts of a step with n decodes (`shares`): needed drafts first, then the most probable ones.

    A request r needs A(r) = (l + t) / TPOT - o tokens from a step that takes t seconds, after o tokens in l seconds of
    decoding. If each further draft is accepted with probability q, k drafts are expected to give 1 + q + q^2 + ... +
    q^k tokens. TPOT is `tpot_slo_s`, else `tbt_slo_s`; without either, A = 0. t is predicted for a step with all B
    tokens and no prompt. Prompts are added as by `fixed_chunk`.

    Left out: trees of drafts (here, each decode has one sequence of drafts), the drafter's own probabilities (q is
    estimated from the acceptance of the request's drafts so far), and the choice of depth and width by load. B is a
    parameter, since it follows only from a profile of the device.

    Source: Li et al., "AdaServe: Accelerating Multi-SLO LLM Serving with SLO-Customized Speculative Decoding" (arXiv:2501.12162).
    """

    traits = SchedulerTraits(is_work_conserving=True)

    def __init__(self, config: AdaServeConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._budget, self._most_needed = config.budget_tokens, config.most_needed
        self._prior = (config.prior_drafts, config.prior_drafts * config.acceptance)
        self._latency = context.latency
        self._decoding: dict[RequestView, _Drafted] = {}

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Set the drafts of the decodes, then fill the step as `fixed_chunk` does."""
        if replica.limits.max_draft_tokens:
            self._draft(list(replica.decodes()), replica.limits.max_draft_tokens, batch, now)
        fill(replica, batch, self._next_chunk, self._mode)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._decoding.pop(request, None)

    def _draft(self, decodes: list[RequestView], most_each: int, batch: BatchBuilder, now: float) -> None:
        features = BatchFeatures().with_decodes(len(decodes), sum(one.num_known_tokens for one in decodes))
        num_drafts = min(max(self._budget - len(decodes), 0), len(decodes) * most_each)
        step_s = self._latency.batch_time_s(features.with_drafts(num_drafts))
        wishes = [self._wish(request, step_s, now) for request in decodes]
        for request, num in zip(decodes, shares(wishes, num_drafts, most_each, self._most_needed), strict=True):
            batch.draft(request, num)

    def _wish(self, request: RequestView, step_s: float, now: float) -> Wish:
        known = self._decoding.get(request)
        if known is None:
            known = self._decoding[request] = _Drafted(request, now)
        known.look(request)
        prior, prior_accepted = self._prior
        chance = (prior_accepted + known.num_accepted) / (prior + known.num_tried)
        pace_s = request.tpot_slo_s or request.tbt_slo_s
        if not pace_s:
            return Wish(0.0, chance)
        return Wish((now - known.begun_at + step_s) / pace_s - (request.num_output_tokens - known.num_before), chance)


SPEC = PolicySpec(
    name="adaserve",
    layer=Layer.REPLICA_SCHEDULER,
    config=AdaServeConfig,
    build=AdaServe,
    summary=(
        "Gives each decode the drafts that its TPOT SLO requires, and the rest of a budget to the drafts most likely "
        "to be accepted."
    ),
    source="AdaServe (arXiv:2501.12162)",
    advice=(
        "Use it with drafts where requests have different TPOT SLOs: those with tight ones get more drafts. Not "
        "without SLOs, or where steps are compute-bound anyway: drafts then only cost time."
    ),
)
