"""Replicas of one replicaset that differ in sizes, latency model and replica scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vajra_py.config import PolicyChoice, config_from_mapping
from vajra_py.contract import Layer
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import ConfigError, PolicyError
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import NoLengths
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import Failure, PolicyChange
from vajra_py.runtime.requests.request import RequestState
from vajra_py.runtime.serving.build import ModelFacts, ReplicaPlan, Services, build_replicaset, replica_plans
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.eligibility import AdmissionLimits
from vajra_py.runtime.serving.workload_adapter import facts_of, hashes_of
from vajra_py.runtime.step.plan import StepResult
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.executor import SimulatedExecutor, predicted_timers
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.workload import RequestSpec

FAST, SLOW = AffineModel(base_s=0.001, per_token_s=1e-5), AffineModel(base_s=0.001, per_token_s=1e-4)
SMALL, LARGE = {"num_blocks": 10}, {"num_blocks": 100}
CHUNKS = PolicyChoice(policy="fixed_chunk", params={"chunk_size": 32})


class Bench:
    """A replicaset of 16-token blocks whose replicas are given one by one: sizes, latency model, replica scheduler."""

    def __init__(
        self,
        *replicas: tuple[dict[str, Any], AffineModel, PolicyChoice],
        router: str = "round_robin",
        prioritizer: str = "fcfs",
    ) -> None:
        config = config_from_mapping(
            {
                "version": 1,
                "num_replicas": len(replicas),
                "scheduling": {
                    "request_prioritizer": prioritizer,
                    "replicaset_scheduler": router,
                    "replica_scheduler": "fixed_chunk",
                },
                "replica": {"max_model_len": 4096, "memory": {"num_blocks": 10}},
                "workload": {"type": "jsonl", "path": "none"},
                "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
            }
        )
        self.executor = SimulatedExecutor()
        services = Services(
            registry=load_registry(),
            latency=SLOW,
            output_lengths=NoLengths(),
            seeds=SeedTree(0),
            facts=ModelFacts(),
            executor_of=lambda replicaset, replica_id: self.executor,
        )
        settings = config.effective_replicasets["default"]
        plans = [
            ReplicaPlan(plan.settings, replace(plan.limits, **sizes), latency, scheduler)
            for plan, (sizes, latency, scheduler) in zip(replica_plans(settings, services), replicas, strict=True)
        ]
        self.replicaset = build_replicaset("default", settings, plans, AdmissionLimits(), SeedTree(0), services)
        self.controller = Controller({"default": self.replicaset}, lambda request: "default")
        self.timer_of = predicted_timers(SLOW, SeedTree(0))

    def submit(self, name: str, num_prompt_tokens: int, max_tokens: int | None = 1, now: int = 0) -> Any:
        spec = RequestSpec(name, 0.0, num_prompt_tokens, 4, max_tokens=max_tokens)
        facts = facts_of(spec)
        request, _ = self.controller.submit(facts, self.replicaset, lambda size: hashes_of(spec, size, ""), now)
        if request.state is not RequestState.ENDED:
            self.executor.expect(request, 4)
        return request

    def step(self, replica_id: int, now: int = 0) -> dict[str, int]:
        """One step of a replica; tokens by request."""
        replica = self.replicaset.replicas[replica_id]
        plan = replica.next_plan(now)
        if plan is None:
            return {}
        tokens = {entry.request.request_id: entry.num_tokens for entry in plan.entries()}
        self.controller.settle(replica.complete_step(plan, StepResult(), now + 1), now + 1)
        return tokens


def two(router: str = "round_robin", prioritizer: str = "fcfs", scheduler: PolicyChoice = CHUNKS) -> Bench:
    """Replica 0 holds 160 tokens and is fast, replica 1 holds 1,600 and is slow."""
    return Bench((SMALL, FAST, scheduler), (LARGE, SLOW, CHUNKS), router=router, prioritizer=prioritizer)


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "power_of_two", "random", "prefix_affinity"])
def test_a_request_goes_to_a_replica_that_has_room_for_it(router: str) -> None:
    bench = two(router)
    long = [bench.submit(f"long{index}", 400) for index in range(6)]
    assert [one.replica_id for one in long] == [1] * 6
    short = {bench.submit(f"short{index}", 100).replica_id for index in range(12)}
    assert 0 in short


def test_what_no_replica_has_room_for_is_refused_with_the_largest_size() -> None:
    refused = two().submit("a", 1700)
    assert refused.end_reason is EndReason.REJECTED
    assert "(1700 + 1 tokens) can never fit into the KV memory of a replica (100 blocks of 16 tokens)" in refused.detail


def test_a_pulling_replica_is_offered_what_it_has_room_for() -> None:
    bench = two("pull")
    bench.submit("long", 400)
    bench.submit("short", 40)
    assert bench.step(0) == {"short": 32}
    assert bench.step(1)["long"] == 32


def test_without_a_limit_of_its_own_a_request_may_run_on_every_replica_with_room_for_its_prompt() -> None:
    bench = two()
    assert bench.submit("short", 100, None).max_tokens == 61  # 160 tokens and the last, which needs no KV
    assert bench.submit("long", 400, None).max_tokens == 1201


def test_a_loss_leaves_a_request_to_a_replica_that_has_room_for_it() -> None:
    bench = two()
    long, short = bench.submit("long", 400), bench.submit("short", 40)
    assert (long.replica_id, short.replica_id) == (1, 0)
    large = bench.replicaset.replicas[1]
    losses = bench.controller.lose_replica(large, Failure(1, "default", 1, "gone", max_reruns=1), 1)
    assert [(one.request_id, replica) for one, replica in losses.moved] == [("long", None)]
    assert bench.step(0, 2) == {"short": 32}, "the small replica is not offered it"
    refused = bench.submit("long2", 400, now=2)
    assert refused.end_reason is EndReason.REJECTED
    assert refused.detail == "every replica has failed that has room for it (1 of 2)"
    bench.controller.restore_replica(large, 3)
    assert bench.step(1, 4) == {"long": 32}


def test_what_only_the_lost_replica_has_room_for_ends_with_it() -> None:
    bench = two("pull")
    long, short = bench.submit("long", 400), bench.submit("short", 40)
    bench.controller.lose_replica(bench.replicaset.replicas[1], Failure(1, "default", 1, "gone"), 1)
    assert (long.end_reason, short.end_reason) == (EndReason.FAILED, None)


class ToReplicaZero:
    def assign(self, request: Any, replicas: Any, now: float) -> int:
        return 0

    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        return ()


def test_a_policy_that_assigns_to_a_replica_without_room_breaks_the_contract() -> None:
    bench = two()
    bench.replicaset.bind_policy(ToReplicaZero(), "to_zero")
    assert bench.submit("short", 40).replica_id == 0
    with pytest.raises(PolicyError, match=r"to replica 0\. Replicas that are up and can run it: \[1\]"):
        bench.submit("long", 400)


def test_a_replica_is_not_given_what_its_own_scheduler_refuses() -> None:
    orca = PolicyChoice(policy="orca")  # sets memory aside for the longest output
    bench = Bench(({"num_blocks": 10}, SLOW, orca), ({"num_blocks": 10}, SLOW, CHUNKS))
    asked: list[int] = []
    bench.replicaset.replicas[0].parts.policy.refuses = lambda request, replica, now: (  # type: ignore[attr-defined]
        asked.append(replica.replica_id) or "too large for me" if request.num_prompt_tokens > 50 else None
    )
    assert [bench.submit(f"r{index}", 60).replica_id for index in range(3)] == [1, 1, 1]
    assert set(asked) == {0}
    assert {bench.submit(f"s{index}", 20).replica_id for index in range(2)} == {0, 1}


def test_each_replica_is_scheduled_by_its_own_policy_under_its_own_limits() -> None:
    wide = PolicyChoice(policy="fixed_chunk", params={"chunk_size": 64})
    bench = two(scheduler=wide)
    bench.submit("a", 100)
    bench.submit("b", 100)
    assert bench.step(0) == {"a": 64}
    assert bench.step(1) == {"b": 32}
    assert [one.parts.policy_name for one in bench.replicaset.replicas] == ["fixed_chunk", "fixed_chunk"]


def test_prefill_times_are_those_of_the_fastest_replica_that_has_room() -> None:
    policies: Any = two(prioritizer="lrs").replicaset.policies
    fast = policies.prefill_time.total_s(100)
    assert fast == pytest.approx(8 * 0.001 + 256e-5)  # tabulated for 256 tokens, in chunks of 32
    assert policies.prefill_time.total_s(256) == pytest.approx(8 * 0.001 + 256e-4), "the fast one has no room for it"
    assert policies.prefill_time.remaining_s(256, 256) == 0.0


def test_a_swap_gives_every_replica_the_same_scheduler_and_new_prefill_times() -> None:
    wide = PolicyChoice(policy="fixed_chunk", params={"chunk_size": 64})
    bench = two(prioritizer="lrs", scheduler=wide)
    policies: Any = bench.replicaset.policies
    with pytest.raises(ConfigError, match="replicas have different ones"):
        policies.common_choices()
    before = policies.prefill_time.total_s(100)
    swapped = bench.controller.swap_policy(PolicyChange("default", Layer.REPLICA_SCHEDULER, CHUNKS), 0)
    assert (swapped.swap.old_policy, swapped.swap.policy) == ("fixed_chunk", "fixed_chunk")
    assert policies.common_choices()[Layer.REPLICA_SCHEDULER] == CHUNKS
    assert policies.prefill_time.total_s(100) > before, "smaller chunks, more steps"


def test_blocks_have_one_size_in_a_replicaset() -> None:
    with pytest.raises(
        ConfigError, match=r"replicas of one replicaset have blocks of one size \(got \[8, 16\] tokens\)"
    ):
        Bench((SMALL, FAST, CHUNKS), ({"num_blocks": 10, "block_size": 8}, FAST, CHUNKS))


class Places(Observer):
    """Replicas that requests were admitted by."""

    wants_steps = False

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_admitted(self, request: Any, replica_id: int, now: float) -> None:
        self.found[request.request_id] = replica_id


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "pull"])
def test_a_simulation_serves_everyone_where_there_is_room(router: str) -> None:
    bench, places = two(router), Places()
    bench.controller.watch((places,))
    specs = [RequestSpec(f"r{index}", 0.01 * index, 350 if index % 3 == 0 else 60, 40) for index in range(60)]
    simulator = Simulator(bench.controller, bench.executor, bench.timer_of, SimulationOptions(check_every_steps=1))
    simulator.run(specs)
    assert bench.controller.num_ended == {EndReason.STOP: 60} or bench.controller.num_ended == {EndReason.LENGTH: 60}
    assert {places.found[one.request_id] for one in specs if one.num_prompt_tokens == 350} == {1}
    assert {places.found[one.request_id] for one in specs} == {0, 1}


def test_the_only_replica_is_asked_for_by_name() -> None:
    bench = two()
    with pytest.raises(ConfigError, match="there is more than one replica"):
        bench.controller.only_replica()
    assert bench.replicaset.bounds.are_equal is False
    alone = Bench((SMALL, FAST, CHUNKS))
    assert alone.controller.only_replica() is alone.replicaset.replicas[0]
