"""Requests that a replica scheduler hands off: in the middle of their prompts, and while they decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from tests.sim.handing_off import HandsOff, registry_of, scheduler_of
from tests.sim.split_pools import POLICIES, Finished, nothing_is_left, prepared, settings, simulate
from tests.sim.test_sim_hand_off_machine import FAULTS, HAND_OFF, LINKS, loses_nothing, requests
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicySpec,
    Refusal,
    RequestView,
)
from vajra_py.contract.observer import EndReason, Observer, StepRecord
from vajra_py.errors import PolicyError
from vajra_py.runtime.records.decision_reader import step_row
from vajra_py.testing.conformance import conformance_checks
from vajra_py.testing.reference_policies import PlainChunks
from vajra_py.workload import RequestSpec


class Chunks(Observer):
    """Tokens by request and replica, and the decision log's rows."""

    wants_steps = True

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], int] = {}
        self.rows: list[dict[str, Any]] = []

    def on_step_begin(self, step: StepRecord) -> None:
        self.rows.append(step_row(step))
        for chunk in step.chunks:
            key = chunk.request.request_id, step.replica_id
            self.tokens[key] = self.tokens.get(key, 0) + chunk.num_tokens


def at_half(request: RequestView) -> bool:
    """True once half of the prompt is computed, and not all of it."""
    return request.num_prompt_tokens <= 2 * request.num_computed_tokens < 2 * request.num_prompt_tokens


def split(**keys: Any) -> dict[str, Any]:
    return settings(scheduling={**POLICIES, "replica_scheduler": "hands_off"}, **keys)


def test_half_of_a_prompt_is_computed_here_and_the_rest_there() -> None:
    run, simulator, ways = prepared(split(), registry=registry_of(at_half))
    chunks = Chunks()
    run.controller.watch((ways, chunks))
    simulator.run([RequestSpec("a", 0.0, 200, 10)])
    assert chunks.tokens == {("a", 0): 100, ("a", 1): 100 + 9}
    way = ways.of["a"]
    assert way.reason is EndReason.STOP
    assert way.num_moved == 100
    assert (way.held, way.arrived) == (pytest.approx(0.03), pytest.approx(0.04)), (
        "two steps of 15 ms; then 100 MB over 10 GB/s"
    )
    assert way.first_token == pytest.approx(0.04 + 0.03)
    assert [row["notes"] for row in chunks.rows if "notes" in row] == [{"a": {"handed_off": 100}}]
    assert run.controller.num_alive == 0


@pytest.mark.parametrize(
    "rules",
    [
        {"reserve": "before_prompt"},
        {"reserve": "at_admission"},
        {"first_token": "recompute"},
        {"takes_effect": "at_step_boundary"},
        {"when_full": "retry"},
    ],
)
def test_every_rule_of_a_hand_off_allows_it(rules: dict[str, Any]) -> None:
    mapping = split(hand_off={"kv_bytes_per_token": 1_000_000, **rules})
    specs = [RequestSpec(f"r{one}", 0.01 * one, 130 + one, 20) for one in range(6)]
    done = simulate(mapping, specs, registry=registry_of(at_half))
    assert {way.reason for way in done.ways.values()} == {EndReason.STOP}
    assert all(way.num_moved is not None and way.num_moved < 130 for way in done.ways.values())


def mixed(**keys: Any) -> dict[str, Any]:
    mapping = split(**keys)
    del mapping["pools"]
    mapping["num_replicas"] = 2
    mapping["scheduling"]["replicaset_scheduler"] = "elsewhere"
    return mapping


def test_a_request_that_decodes_goes_on_elsewhere_without_losing_a_token() -> None:
    def after_ten(request: RequestView) -> bool:
        return request.num_output_tokens == 10

    specs = [RequestSpec(f"r{one}", 0.0, 60, 30) for one in range(3)]
    alone = simulate(mixed(), specs, registry=registry_of(lambda one: False, stays=True))
    _, simulator, ways = prepared(mixed(), registry=registry_of(after_ten))
    simulator.run(specs)
    for name, way in ways.of.items():
        assert way.reason is EndReason.STOP
        before = alone.ways[name].ended
        assert before is not None
        assert way.ended is not None
        assert way.ended > before
    assert [what for what, name, _ in ways.order if name == "r0"].count("held") >= 2, (
        "after its prompt, and after ten tokens"
    )


def test_what_may_stay_stays_and_is_not_asked_about_again_in_that_state() -> None:
    refusals: list[tuple[str, Refusal]] = []
    registry = registry_of(lambda one: one.num_computed_tokens == 100, refusals, stays=True)
    done = simulate(mixed(), [RequestSpec("a", 0.0, 200, 10)], registry=registry)
    assert done.ways["a"].reason is EndReason.STOP
    assert refusals == [("a", Refusal.STAYS)]
    plain = simulate(mixed(), [RequestSpec("a", 0.0, 200, 10)], registry=registry_of(lambda one: False, stays=True))
    assert done.ways["a"].ended == plain.ways["a"].ended, "it lost no time"


def refused(mapping: dict[str, Any]) -> tuple[Finished, set[Refusal]]:
    refusals: list[tuple[str, Refusal]] = []
    done = simulate(mapping, [RequestSpec("a", 0.0, 200, 10)], registry=registry_of(at_half, refusals))
    return done, {refusal for _, refusal in refusals}


def test_without_another_replica_that_could_go_on_it_is_refused() -> None:
    alone = mixed()
    alone["num_replicas"] = 1
    plain = mixed()
    plain["scheduling"]["replicaset_scheduler"] = "round_robin"
    for mapping in (alone, plain):
        done, refusals = refused(mapping)
        assert refusals == {Refusal.NO_TARGET}
        assert done.ways["a"].reason is EndReason.STOP


def test_only_what_runs_can_be_handed_off() -> None:
    class OfThoseThatWait(HandsOff):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            batch.hand_off(next(replica.waiting()))

    registry = registry_of(at_half)
    offer = scheduler_of(at_half, [])
    spec = type(offer)(
        offer.name + "_2", offer.layer, offer.config, lambda c, x: OfThoseThatWait(at_half, []), "Wrong."
    )
    mapping = split()
    mapping["scheduling"]["replica_scheduler"] = "hands_off_2"
    with pytest.raises(PolicyError, match=r"cannot hand off what is waiting. Running requests can be handed off"):
        simulate(mapping, [RequestSpec("a", 0.0, 20, 2)], registry=registry.with_policies([spec]))


def test_a_request_that_ends_with_the_step_in_flight_is_not_handed_off() -> None:
    """The second stage is free while the first computes a long prompt; `x` is aborted then."""
    refusals: list[tuple[str, Refusal]] = []

    class AtLast(HandsOff):
        def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
            for one in replica.running():
                if one.request_id == "x" and one.num_output_tokens >= 2:
                    if now > 0.35 and (refusal := batch.hand_off(one)) is not None:
                        refusals.append((one.request_id, refusal))
                else:
                    batch.add(one, batch.max_chunk(one))
            for one in replica.waiting():
                batch.add(one, batch.max_chunk(one))

    spec = PolicySpec(
        "at_last", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda c, x: AtLast(at_half, []), "Hands off after a while."
    )
    mapping = settings(pools={"mixed": {"num_replicas": 1}, "decode": {}})
    mapping["scheduling"] = {**POLICIES, "replica_scheduler": "at_last"}
    mapping["replica"]["pipeline_stages"] = 2
    run, simulator, ways = prepared(mapping, registry=registry_of(at_half).with_policies([spec]))
    simulator.abort_at(0.35, "x")
    simulator.run([RequestSpec("w", 0.0, 20, 50), RequestSpec("x", 0.0, 20, 50), RequestSpec("y", 0.3, 1500, 20)])
    assert {name: way.reason for name, way in ways.of.items()} == {
        "w": EndReason.STOP, "x": EndReason.ABORTED, "y": EndReason.STOP,
    }  # fmt: skip
    assert set(refusals) == {("x", Refusal.STAYS)}
    nothing_is_left(run)


class HalfOf(PlainChunks):
    """Plain chunks of prompts that leave when half of them is computed; if `loses`, it forgets those that come."""

    def __init__(self, *, loses: bool = False) -> None:
        super().__init__(num_tokens=16)
        self._loses = loses
        self._lost: set[str] = set()

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        for request in replica.partial_prefills():
            if at_half(request):
                batch.hand_off(request)
        waiting = list(replica.waiting())
        if self._loses:
            self._lost.update(one.request_id for one in waiting if not one.is_resident and one.num_computed_tokens)
        if any(one.request_id in self._lost for one in waiting):
            return
        super().schedule(replica, batch, now)


def test_conformance_lets_requests_go_on_where_they_are_handed_to() -> None:
    (check,) = [one for one in conformance_checks(Layer.REPLICA_SCHEDULER) if one.name.startswith("hands off")]

    def spec(*, loses: bool) -> PolicySpec:
        build = lambda config, context: HalfOf(loses=loses)  # noqa: E731
        return PolicySpec("half", Layer.REPLICA_SCHEDULER, PolicyConfig, build, "Half here, half there.")

    check(spec(loses=False))
    with pytest.raises(AssertionError, match="hands off without losing anybody"):
        check(spec(loses=True))


@settings_of_hypothesis(max_examples=40)
@given(
    specs=requests(),
    hand_off=HAND_OFF,
    links=LINKS,
    num_blocks=st.sampled_from([20, 30, 200]),
    is_split=st.booleans(),
    every=st.integers(2, 40),
    faults=FAULTS,
)
def test_whatever_is_handed_off_wherever_nothing_is_lost(
    specs: list[RequestSpec],
    hand_off: dict[str, Any],
    links: dict[str, Any],
    num_blocks: int,
    is_split: bool,
    every: int,
    faults: list[tuple[str, float, int]],
) -> None:
    replica = {"memory": {"num_blocks": num_blocks, "watermark_fraction": 0.0}, "max_batch_size": 6}
    keys = {"hand_off": hand_off, "links": links, "replica": replica}
    mapping = split(**keys) if is_split else mixed(**keys)
    registry = registry_of(lambda one: (one.num_computed_tokens + 7 * one.index) % every == 0)
    loses_nothing(mapping, specs, faults, registry, num_replicas=2)
