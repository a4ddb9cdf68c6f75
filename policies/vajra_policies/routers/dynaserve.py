"""DynaServe: each request is cut into two parts on two replicas, so that both replicas get the same load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.routing import BindsOnArrival, those_up
from vajra_policies.size.lengths import LengthConfig, Lengths
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
    SharedState,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Position at which a request is cut, and the replicas of its parts."""

    first: ReplicaId
    second: ReplicaId
    """Same as `first` if the request is not cut."""
    at_token: int
    """Position s of the cut: tokens before it belong to the first part."""


class Cuts:
    """Cuts of the waiting and running requests; shared by router and replica schedulers."""

    def __init__(self) -> None:
        self.of: dict[RequestView, Cut] = {}


def _cuts(shared: SharedState) -> Cuts:
    return shared.get(Cuts)


class DynaserveConfig(LengthConfig):
    """Parameters of `dynaserve`, which places both parts."""

    output_weight: float = Field(
        8.0,
        ge=1e-6,
        le=1e6,
        description="Number of prompt tokens that an output token counts for, by its share of a step's time.",
    )
    min_part_tokens: int = Field(
        256,
        ge=1,
        description="Minimum work of a part; a request is not split if a part would be smaller.",
        json_schema_extra={"unit": "tokens"},
    )


class Dynaserve(BindsOnArrival):
    """Cuts a request of p prompt and about d output tokens at token s, and places its parts on the two least loaded
    replicas.

    The work of a request is W = p + w * d, counted in prompt tokens, with w the work of an output token. The first part
    goes to replica a, the less loaded of the two, and the second to replica b; s is chosen so that a and b have the
    same load afterwards: work before s = (W + load_b - load_a) / 2. s = p separates prompt and decodes, s = p + d
    leaves the whole request at a. If a part would be smaller than `min_part_tokens`, the whole request goes to a. A
    replica's load is the remaining work of the requests placed there.

    Needs the replica scheduler `micro_requests`, which hands a request off at s. Left out: a search over predicted step
    times, since the cut that balances linear work has a closed form. Overlap of transfers with computing depends on the
    settings of `hand_off`. The weight and the smallest part are round figures.

    Source: Ruan et al., "DynaServe: Unified and Elastic Execution for Dynamic Disaggregated LLM Serving" (arXiv:2504.09285).
    """

    def __init__(self, config: DynaserveConfig, context: PolicyContext) -> None:
        self._weight = config.output_weight
        self._least = config.min_part_tokens
        self._lengths = Lengths(config, context.output_lengths)
        self._cuts = _cuts(context.shared).of

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica that computes the first part of the request."""
        self._cuts.pop(request, None)
        loads = self.loads(replicas)
        up = sorted((one.replica_id for one in those_up(replicas)), key=lambda one: (loads[one], one))
        if not up:
            return None
        first = second = up[0]
        at_token = request.num_prompt_tokens + request.max_tokens
        if len(up) > 1:
            total = self._work(request, self._end(request)) - self._work(request, request.num_computed_tokens)
            before = (total + loads[up[1]] - loads[first]) / 2.0
            if self._least <= before <= total - self._least:
                second = up[1]
                at_token = self._token(request, self._work(request, request.num_computed_tokens) + before)
        self._cuts[request] = Cut(first, second, at_token)
        return first

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Return the replica of the second part if the first part is computed and the replica of the second part is up.

        Otherwise return None: the request continues where it is.
        """
        cut = self._cuts.get(request)
        if cut is None or cut.first == cut.second or request.num_computed_tokens < cut.at_token:
            return None
        if any(one.replica_id == cut.second and one.is_up for one in replicas):
            return cut.second
        self._cuts[request] = Cut(cut.first, cut.first, 0)
        return None

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Record that the rest of the request is computed at the replica to which it was moved."""
        cut = self._cuts.get(request)
        if cut is not None:
            self._cuts[request] = Cut(target, target, cut.at_token)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._cuts.pop(request, None)

    def loads(self, replicas: Sequence[ReplicaLoadView]) -> dict[ReplicaId, float]:
        """Return the remaining work at each replica, in prompt tokens."""
        loads = {one.replica_id: 0.0 for one in replicas}
        for request, cut in self._cuts.items():
            done, end = self._work(request, request.num_computed_tokens), self._work(request, self._end(request))
            middle = min(max(self._work(request, cut.at_token), done), end) if cut.first != cut.second else end
            for replica_id, work in ((cut.first, middle - done), (cut.second, end - middle)):
                if replica_id in loads:
                    loads[replica_id] += work
        return loads

    def _end(self, request: RequestView) -> int:
        return request.num_known_tokens + max(round(self._lengths.remaining(request)), 1)

    def _work(self, request: RequestView, num_tokens: int) -> float:
        """Return the work of the first `num_tokens` tokens, in prompt tokens."""
        prompt = request.num_prompt_tokens
        return min(num_tokens, prompt) + self._weight * max(num_tokens - prompt, 0)

    def _token(self, request: RequestView, work: float) -> int:
        """Return the number of leading tokens of the request whose `_work` is `work`."""
        prompt = request.num_prompt_tokens
        return round(work) if work <= prompt else prompt + round((work - prompt) / self._weight)


class MicroRequestConfig(FixedChunkConfig):
    """Parameters of `micro_requests`."""


class MicroRequests(FixedChunk):
    """`fixed_chunk`, where a chunk ends at the token s at which `dynaserve` has cut the request; the request is then
    handed off with its KV.

    With another router, it behaves like `fixed_chunk`. Left out: chunks sized by the TBT SLO, as in `dynamic_chunk` and
    `slack_chunk`.

    Source: DynaServe (arXiv:2504.09285).
    """

    traits = SchedulerTraits(is_work_conserving=True)
    """`repeats_decodes` is empty, since requests may leave while they decode."""

    def __init__(self, config: MicroRequestConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._cuts = _cuts(context.shared).of

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Hand off requests whose first part is computed, and schedule the others."""
        if self._cuts:
            for request in replica.running():
                cut = self._here(request, replica)
                if cut is not None and request.num_computed_tokens >= cut.at_token:
                    batch.hand_off(request)
        super().schedule(replica, batch, now)

    def _here(self, request: RequestView, replica: LocalReplicaView) -> Cut | None:
        """Return the cut of a request whose first part belongs to this replica and whose second part belongs to another
        replica; None for other requests.
        """
        cut = self._cuts.get(request)
        return cut if cut is not None and cut.first == replica.replica_id != cut.second else None

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        num_tokens = super()._next_chunk(request, batch, replica)
        cut = self._here(request, replica)
        if num_tokens is None or cut is None:
            return num_tokens
        num_done = request.num_computed_tokens if request.is_resident else batch.cached_tokens(request)
        left = cut.at_token - num_done
        return min(num_tokens, left) if left > 0 else num_tokens


SPEC = PolicySpec(
    name="dynaserve",
    layer=Layer.REPLICASET_SCHEDULER,
    config=DynaserveConfig,
    build=Dynaserve,
    summary=(
        "Each request cut at one token into two parts, on the two least loaded replicas, so that both have the same "
        "work."
    ),
    source="DynaServe (arXiv:2504.09285)",
    advice=(
        "Use it with the replica scheduler `micro_requests` and fast links, where there are few replicas, requests "
        "are large, and their mix of prompt and output lengths changes, so that no ratio of pools suits for long. Not "
        "where many requests run on each replica: loads are then balanced anyway, and the second part of a request "
        "has to wait for the first."
    ),
)
REPLICA_SPEC = PolicySpec(
    name="micro_requests",
    layer=Layer.REPLICA_SCHEDULER,
    config=MicroRequestConfig,
    build=MicroRequests,
    summary="Fixed chunks, and requests leave with their KV at the token where they were cut.",
    source="DynaServe (arXiv:2504.09285)",
    advice=("Use it with `dynaserve`. Not with other routers, where it is `fixed_chunk`."),
)
