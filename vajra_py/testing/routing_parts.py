"""Conformance suite of routing parts.

Each part is tested in a router that contains only this part, acts as the replicaset scheduler, and checks the part's
contract.

A package's own tests need one function:

    @pytest.mark.parametrize("spec", vajra_routing_parts(), ids=lambda spec: spec.name)
    def test_keeps_the_contract(spec):
        check_routing_part(spec)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ProducerChoice,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)
from vajra_py.plugins import check_part_shape, load_registry
from vajra_py.plugins.shapes import CACHE_METHODS, LISTENING_METHODS
from vajra_py.testing.arguments import require_spec
from vajra_py.testing.checking import POLICY_TIMEOUT_S, require
from vajra_py.testing.conformance import check_policy


def check_routing_part(
    spec: RoutingPartSpec, params: Mapping[str, Any] | None = None, *, policy_timeout_s: float = POLICY_TIMEOUT_S
) -> None:
    """Run every check that applies to a routing part, with its default parameters or `params`.

    Scores must be one finite number or None per replica, and the same in a second call; filters must keep at least one
    of the given replicas, in order; pickers must return one of the candidates; deciders must return True or False. All
    parts must decide the same in equal runs, read only what the contract offers, write nothing, and forget ended
    requests. Raises `AssertionError` and warns like `check_policy`.
    """
    require_spec(spec, RoutingPartSpec)
    wrapped = PolicySpec(
        name=spec.name,
        layer=Layer.REPLICASET_SCHEDULER,
        config=spec.config,
        build=_BuildProbe(spec),
        summary=spec.summary,
    )
    try:
        check_policy(wrapped, params, policy_timeout_s=policy_timeout_s)
    except AssertionError as error:
        text = str(error).replace(
            f"{Layer.REPLICASET_SCHEDULER.value} {spec.name!r}", f"{spec.kind.value} {spec.name!r}"
        )
        raise AssertionError(text) from error


def routing_parts_under_test() -> list[RoutingPartSpec]:
    """Return every installed routing part, by kind and name, for `pytest.mark.parametrize`."""
    registry = load_registry()
    return [offer.spec for kind in RoutingPartKind for offer in registry.routing_parts(kind).values()]


class _BuildProbe:
    """Function that builds a `PartProbe`; its `__module__` is that of the part's `build`, as the checks expect."""

    def __init__(self, spec: RoutingPartSpec) -> None:
        self._spec = spec
        self.__module__ = spec.build.__module__

    def __call__(self, config: PolicyConfig, context: PolicyContext) -> PartProbe:
        producers: dict[str, Any] = {}

        def producer(name: str) -> Any:
            if name not in producers:
                choice = ProducerChoice(producer=name)
                producers[name] = context.build_part(choice, RoutingContext(context, producer))
            return producers[name]

        part = self._spec.build(config, RoutingContext(context, producer))
        what = f"{self._spec.kind.value} {self._spec.name!r}"
        check_part_shape(self._spec.kind, part, what, "under test")
        return PartProbe(self._spec.kind, part, [*producers.values(), part])


class PartProbe:
    """Router with a single part; raises `AssertionError` if the part breaks its contract."""

    def __init__(self, kind: RoutingPartKind, part: Any, parts: Sequence[Any]) -> None:
        self._kind = kind
        self._part = part
        self._learners = [one.on_placement for one in reversed(parts) if hasattr(one, "on_placement")]
        self._count = 0
        for name in (*LISTENING_METHODS, *CACHE_METHODS):
            methods = [getattr(one, name) for one in parts if hasattr(one, name)]
            # `on_step_run` is left out, as in routers: without it, every step is reported by `on_step_end`.
            if methods and name != "on_step_run":
                setattr(self, name, _notify_all(methods))

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return a replica that is up, chosen with the help of the part; None if none is up.

        A scorer selects the replica with the highest score, a filter one of the replicas that it keeps, and a picker
        the replica that it picks. If a decider returns True, the last replica is selected. In all other cases, the
        next replica in turn is selected.
        """
        up = [one for one in replicas if one.is_up]
        if not up:
            return None
        self._count += 1
        chosen = self._choice(request, up, now)
        for learn in self._learners:
            learn(request, {"default": chosen}, now)
        return chosen.replica_id

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Yield requests that arrived while no replica was up."""
        return [one.request_id for one in queued] if replica.is_up else ()

    def _choice(self, request: RequestView, up: Sequence[ReplicaLoadView], now: float) -> ReplicaLoadView:
        in_turn = up[self._count % len(up)]
        if self._kind is RoutingPartKind.SCORER:
            scores = self._scores(request, up, now)
            return up[scores.index(max(scores))]
        if self._kind is RoutingPartKind.FILTER:
            kept = self._kept(request, up, now)
            return kept[self._count % len(kept)] if kept else in_turn
        if self._kind is RoutingPartKind.PICKER:
            return self._picked(request, up, now)
        if self._kind is RoutingPartKind.DECIDER:
            return up[-1] if self._decided(request, in_turn, now) else in_turn
        return in_turn

    def _scores(self, request: RequestView, up: Sequence[ReplicaLoadView], now: float) -> list[float]:
        found = list(self._part.scores(request, list(up), now))
        name = request.request_id
        require(len(found) == len(up), f"scores({name}) are {len(found)} numbers for {len(up)} replicas: {found}")
        finite = all(one is None or math.isfinite(one) for one in found)
        require(finite, f"scores({name}) are not finite numbers or None: {found}")
        again = list(self._part.scores(request, list(up), now))
        require(again == found, f"scores({name}) are {found}, and asked again {again}")
        return [0.0 if one is None else float(one) for one in found]

    def _kept(self, request: RequestView, up: Sequence[ReplicaLoadView], now: float) -> list[ReplicaLoadView]:
        given = list(up)
        kept = list(self._part.keeps(request, given, now))
        require(given == list(up), "keeps() changes the sequence that it is given")
        positions = [next((place for place, one in enumerate(up) if one is each), -1) for each in kept]
        is_part = positions == sorted(set(positions)) and -1 not in positions
        text = f"keeps({request.request_id}) gave {len(kept)} of {len(up)} replicas that are not some of them in their order"
        require(is_part, text)
        return kept

    def _picked(self, request: RequestView, up: Sequence[ReplicaLoadView], now: float) -> ReplicaLoadView:
        scores = [((self._count + one.replica_id) % 3) / 2 for one in up]
        before = list(scores)
        picked = self._part.pick(request, list(up), scores, now)
        require(scores == before, "pick() changes the scores that it is given")
        ids = [one.replica_id for one in up]
        require(picked in ids, f"pick({request.request_id}) is {picked!r}; candidates: {ids}")
        return up[ids.index(picked)]

    def _decided(self, request: RequestView, decode: ReplicaLoadView, now: float) -> bool:
        answer = self._part.disaggregates(request, decode, now)
        require(isinstance(answer, bool), f"disaggregates({request.request_id}) is {answer!r}; expected True or False")
        again = self._part.disaggregates(request, decode, now)
        require(again is answer, f"disaggregates({request.request_id}) is {answer!r}, and asked again {again!r}")
        return bool(answer)


def _notify_all(methods: Sequence[Any]) -> Any:
    def notify(*facts: Any) -> None:
        for method in methods:
            method(*facts)

    return notify
