"""Router composed of filters, weighted scorers and a picker, like llm-d's endpoint picker.

Left out: flow control, which admission policies provide.

Source: llm-d-router, `pkg/epp`: scheduling profiles, `single-profile-handler`, `disagg-profile-handler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vajra_policies.routers import figures
from vajra_policies.routers.endpoint_picker_config import (
    DECODE,
    DEFAULT,
    PREFILL,
    DisaggregationConfig,
    EndpointPickerPolicyConfig,
)
from vajra_policies.routers.figures import Candidates, position_of
from vajra_policies.routers.profile import Parts, Profile, WeightedScorer
from vajra_policies.routing import has_room
from vajra_py.contract import (
    DisaggregationDecider,
    FilterChoice,
    Layer,
    PickerChoice,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    ScorerChoice,
)


class EndpointPicker:
    """Binds on arrival to the replica that a single profile chooses among those that are up.

    If the filters leave no replica, the request waits in the shared queue, and a replica may pull the request if the
    filters, applied to that replica alone, keep the replica. (llm-d responds with 429; here an admission policy can do
    that.)

    Callbacks about requests are forwarded to every part that defines them. Each choice is reported to every part that
    learns from placements.
    """

    def __init__(self, parts: Parts, profile: Profile) -> None:
        self._entry = profile
        """Profile that chooses the replica of each arriving request."""
        self._learners = parts.learners()
        for name, notify in parts.listeners().items():
            setattr(self, name, notify)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica that the profile selects."""
        up = figures.those_up(replicas)
        chosen = self._entry.choose(request, up, now)
        if chosen is not None:
            self._notify(request, {DEFAULT: chosen}, up, now)
        return chosen

    def may_take(self, pool: str, role: str) -> bool:
        """See `LeavesOutPools`."""
        return self._entry.may_take(pool, role)

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Yield the ids of queued requests for which the filters keep this replica, if it has room."""
        if has_room(replica):
            for request in queued:
                if self._entry.filtered(request, [replica], now):
                    yield request.request_id

    def _notify(
        self, request: RequestView, chosen: dict[str, ReplicaId], replicas: Sequence[ReplicaLoadView], now: float
    ) -> None:
        if self._learners:
            placements = {name: replicas[position_of(one, replicas)] for name, one in chosen.items()}
            for learn in self._learners:
                learn(request, placements, now)


class DisaggregatedEndpointPicker(EndpointPicker):
    """Chooses the replica that computes the prompt and the one that decodes, each by its own profile."""

    def __init__(self, parts: Parts, profiles: Mapping[str, Profile], how: DisaggregationConfig) -> None:
        self._decode = profiles[DECODE]
        self._prefill = profiles.get(PREFILL)
        self._order = how.order
        self._decider: DisaggregationDecider | None = None if how.decider is None else parts.build(how.decider)
        self._decode_of: dict[RequestView, ReplicaId] = {}
        """For each live request, the decode replica chosen for it, if any."""
        is_decode_first = self._prefill is None or how.order == "decode-first"
        super().__init__(parts, self._decode if is_decode_first else profiles[PREFILL])
        self._forward_departures = getattr(self, "on_departures", None)
        self.on_departures = self._forget

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica that computes the prompt: the choice of the prefill profile, or the decode replica if the
        prefill profile is not applied or keeps no replica. Return None if the decode profile is applied and keeps no
        replica.
        """
        up = figures.those_up(replicas)
        chosen = self._both(request, up, now)
        if not chosen or (DECODE not in chosen and self._order != "decode-after-prompt"):
            return None
        if DECODE in chosen:
            self._decode_of[request] = chosen[DECODE]
        self._notify(request, chosen, up, now)
        return chosen.get(PREFILL, chosen.get(DECODE))

    def may_take(self, pool: str, role: str) -> bool:
        """See `LeavesOutPools`. The result is True if any profile that is applied may choose replicas of the pool. The
        prefill profile is not applied if the decode replica is chosen first and there is no decider.
        """
        is_prefill_asked = self._prefill is not None and (self._order != "decode-first" or self._decider is not None)
        asked = (self._decode, self._prefill if is_prefill_asked else None)
        return any(one is not None and one.may_take(pool, role) for one in asked)

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Return the decode replica chosen at arrival if it is up, or else the present choice of the decode profile."""
        up = figures.those_up(replicas)
        decided = self._decode_of.get(request)
        if decided is not None and position_of(decided, up) >= 0:
            return decided
        chosen = self._decode.choose(request, up, now)
        if chosen is not None:
            self._decode_of[request] = chosen
            self._notify(request, {DECODE: chosen}, up, now)
        return chosen

    def _both(self, request: RequestView, up: Candidates, now: float) -> dict[str, ReplicaId]:
        chosen: dict[str, ReplicaId] = {}
        if self._order != "decode-first" and self._prefill is not None:
            _add(chosen, PREFILL, self._prefill.choose(request, up, now))
        if self._order == "decode-after-prompt" and chosen:
            return chosen
        decode = self._decode.choose(request, up, now)
        if decode is None:
            return {}
        chosen[DECODE] = decode
        if self._order == "decode-first" and self._prefill is not None and self._splits(request, decode, up, now):
            _add(chosen, PREFILL, self._prefill.choose(request, up, now))
        if chosen.get(PREFILL) == decode:
            del chosen[PREFILL]
        return chosen

    def _splits(self, request: RequestView, decode: ReplicaId, up: Candidates, now: float) -> bool:
        decider = self._decider
        return decider is not None and decider.disaggregates(request, up[position_of(decode, up)], now)

    def _forget(self, requests: Sequence[RequestView], now: float) -> None:
        for request in requests:
            self._decode_of.pop(request, None)
        if self._forward_departures is not None:
            self._forward_departures(requests, now)


def _add(chosen: dict[str, ReplicaId], name: str, replica_id: ReplicaId | None) -> None:
    if replica_id is not None:
        chosen[name] = replica_id


def _profile(
    filters: Sequence[FilterChoice], scorers: Sequence[ScorerChoice], picker: PickerChoice, parts: Parts
) -> Profile:
    weighted = [WeightedScorer(one.name, parts.build(one), one.weight) for one in scorers]
    return Profile([parts.build(one) for one in filters], weighted, parts.build(picker))


def build(config: EndpointPickerPolicyConfig, context: PolicyContext) -> EndpointPicker:
    """Build the router with these parameters."""
    parts = Parts(config.producers, context)
    if not config.profiles:
        assert config.scorers is not None
        assert config.picker is not None
        profile = _profile(config.filters, config.scorers, config.picker, parts)
        return EndpointPicker(parts, profile)
    if context.limits.kv_parallel_groups > 1:
        raise ValueError("profiles move requests with their KV, which is spread over KV-parallel groups here")
    profiles: dict[str, Profile] = {
        name: _profile(one.filters, one.scorers, one.picker, parts) for name, one in config.profiles.items()
    }
    assert config.disaggregation is not None
    return DisaggregatedEndpointPicker(parts, profiles, config.disaggregation)


SPEC = PolicySpec(
    name="endpoint_picker",
    layer=Layer.REPLICASET_SCHEDULER,
    config=EndpointPickerPolicyConfig,
    build=build,
    summary="Filters, weighted scorers and a picker, selected by name; each arriving request to the best replica.",
    source="llm-d endpoint picker (llm-d-router)",
    advice="Use it to compose a router from parts, and to compare with llm-d. Not where a single rule suffices.",
)
