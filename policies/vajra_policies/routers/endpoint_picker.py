"""A router that is composed of filters, weighted scorers and a picker, as llm-d's endpoint picker.

Left out: flow control, which admission policies have here.

Source: llm-d-router, `pkg/epp`: scheduling profiles, `single-profile-handler`, `disagg-profile-handler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Candidates, position_of
from vajra_policies.routers.profile import Parts, Profile, WeightedScorer
from vajra_policies.routing import has_room
from vajra_py.contract import (
    DeciderChoice,
    DisaggregationDecider,
    FilterChoice,
    Layer,
    PickerChoice,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ProducerChoice,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    ScorerChoice,
)

DEFAULT, PREFILL, DECODE = "default", "prefill", "decode"
"""Names of profiles."""


class ProfileConfig(PolicyConfig):
    """Parts of one profile."""

    filters: list[FilterChoice] = Field(default_factory=list, description="Filters in order.")
    scorers: list[ScorerChoice] = Field(default_factory=list, description="Scorers with weights.")
    picker: PickerChoice = Field(default_factory=lambda: PickerChoice(picker=_DEFAULT_PICKER), description="Picker.")


class DisaggregationConfig(PolicyConfig):
    """Order of the choices for prompts that are computed apart, and which prompts are."""

    order: Literal["decode-first", "prefill-first", "decode-after-prompt"] = Field(
        "decode-first",
        description=(
            "`decode-first`, `prefill-first`: both replicas are chosen at arrival, in this order. `decode-after-prompt`: the "
            "replica that decodes is chosen when the prompt is computed."
        ),
    )
    decider: DeciderChoice | None = Field(
        None,
        description="Which prompts are computed apart, by the decode replica chosen first; none: never. Only with `decode-first`.",
    )

    @model_validator(mode="after")
    def _decides_by_decode(self) -> DisaggregationConfig:
        if self.decider is not None and self.order != "decode-first":
            raise ValueError(
                f"a decider needs order decode-first, since it asks about the decode replica (got {self.order})"
            )
        return self


_DEFAULT_SCORERS = (("queue-scorer", 2.0), ("kv-cache-utilization-scorer", 2.0), ("prefix-cache-scorer", 3.0))
_DEFAULT_PICKER = "max-score-picker"


class EndpointPickerPolicyConfig(PolicyConfig):
    """Parameters of `endpoint_picker`. Without any, llm-d's default configuration holds."""

    producers: list[ProducerChoice] = Field(
        default_factory=list, description="Settings of producers; others that parts need have their defaults."
    )
    filters: list[FilterChoice] = Field(default_factory=list, description="Filters in order.")
    scorers: list[ScorerChoice] | None = Field(
        None,
        description=(
            "Scorers with weights: each score, clamped to 0 .. 1, times its weight is added. None given: queue-scorer 2, "
            "kv-cache-utilization-scorer 2, prefix-cache-scorer 3."
        ),
    )
    picker: PickerChoice | None = Field(None, description="Picker; none given: max-score-picker.")
    profiles: dict[Literal["prefill", "decode"], ProfileConfig] = Field(
        default_factory=dict,
        description="Profiles of a disaggregated replicaset, in place of filters, scorers and picker; `decode` is needed.",
    )
    disaggregation: DisaggregationConfig | None = Field(None, description="How the profiles work together.")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if given.get("profiles"):
            return {"disaggregation": {}, **given}
        scorers = [{"scorer": name, "weight": weight} for name, weight in _DEFAULT_SCORERS]
        filled = {key: value for key, value in given.items() if value is not None}
        return {"scorers": scorers, "picker": _DEFAULT_PICKER, **filled}

    @model_validator(mode="after")
    def _has_one_form(self) -> EndpointPickerPolicyConfig:
        if not self.profiles:
            if self.disaggregation is not None:
                raise ValueError("disaggregation needs profiles")
            return self
        if DECODE not in self.profiles:
            raise ValueError("profiles need one named decode")
        if self.filters or self.scorers is not None or self.picker is not None:
            raise ValueError("gives profiles, and filters, scorers or a picker beside them")
        return self


class EndpointPicker:
    """Binds on arrival to the replica that a single profile chooses among those that are up.

    Where the filters leave none, the request waits in the shared queue, from which a replica may pull it that the filters keep when
    they are called for it alone. (llm-d answers 429 then; an admission policy can do that here.)

    Every part that listens to requests is notified of them, and every part that learns placements of each choice.
    """

    def __init__(self, parts: Parts, profile: Profile, num_batches: int) -> None:
        self._entry = profile
        """Profile of the replicas that take arriving requests."""
        self._num_batches = num_batches
        self._learners = parts.learners()
        for name, notify in parts.listeners().items():
            setattr(self, name, notify)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The choice of the profile."""
        up = figures.those_up(replicas)
        chosen = self._entry.choose(request, up, now)
        if chosen is not None:
            self._notify(request, {DEFAULT: chosen}, up, now)
        return chosen

    def may_take(self, pool: str, role: str) -> bool:
        """See `LeavesOutPools`."""
        return self._entry.may_take(pool, role)

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Requests that no replica was chosen for, as far as the filters keep this replica."""
        if has_room(replica, self._num_batches):
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
    """Chooses the replica that computes the prompt and the one that decodes by a profile each."""

    def __init__(
        self,
        parts: Parts,
        profiles: Mapping[str, Profile],
        how: DisaggregationConfig,
        num_batches: int,
    ) -> None:
        self._decode = profiles[DECODE]
        self._prefill = profiles.get(PREFILL)
        self._order = how.order
        self._decider: DisaggregationDecider | None = None if how.decider is None else parts.build(how.decider)
        self._decode_of: dict[RequestView, ReplicaId] = {}
        """Replica that each living request is to decode on, where that is decided."""
        is_decode_first = self._prefill is None or how.order == "decode-first"
        super().__init__(parts, self._decode if is_decode_first else profiles[PREFILL], num_batches)
        self._forward_departures = getattr(self, "on_departures", None)
        self.on_departures = self._forget

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The replica that computes the prompt: the one that decodes, where the decider refuses or no other is left."""
        up = figures.those_up(replicas)
        chosen = self._both(request, up, now)
        if not chosen or (DECODE not in chosen and self._order != "decode-after-prompt"):
            return None
        if DECODE in chosen:
            self._decode_of[request] = chosen[DECODE]
        self._notify(request, chosen, up, now)
        return chosen.get(PREFILL, chosen.get(DECODE))

    def may_take(self, pool: str, role: str) -> bool:
        """See `LeavesOutPools`; without a decider no prompt is computed apart where the decode replica is chosen first."""
        is_prefill_asked = self._prefill is not None and (self._order != "decode-first" or self._decider is not None)
        asked = (self._decode, self._prefill if is_prefill_asked else None)
        return any(one is not None and one.may_take(pool, role) for one in asked)

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """The replica chosen at arrival, while it is up; else the choice of the decode profile."""
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
    """Build the router of these parameters."""
    parts, num_batches = Parts(config.producers, context), context.limits.pipeline_stages
    if not config.profiles:
        assert config.scorers is not None
        assert config.picker is not None
        profile = _profile(config.filters, config.scorers, config.picker, parts)
        return EndpointPicker(parts, profile, num_batches)
    if context.limits.kv_parallel_groups > 1:
        raise ValueError("profiles move requests with their KV, which is spread over KV-parallel groups here")
    profiles: dict[str, Profile] = {
        name: _profile(one.filters, one.scorers, one.picker, parts) for name, one in config.profiles.items()
    }
    assert config.disaggregation is not None
    return DisaggregatedEndpointPicker(parts, profiles, config.disaggregation, num_batches)


SPEC = PolicySpec(
    name="endpoint_picker",
    layer=Layer.REPLICASET_SCHEDULER,
    config=EndpointPickerPolicyConfig,
    build=build,
    summary="Filters, weighted scorers and a picker, chosen by name: each arriving request to the best score.",
    source="llm-d endpoint picker (llm-d-router)",
    advice=("Use it to compose a router from parts, and to compare with llm-d. Not where one rule does it."),
)
