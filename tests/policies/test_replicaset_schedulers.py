"""Where do requests go under each replicaset scheduler, by load, by chance and by turn?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vajra_policies.least_loaded import LeastLoaded, LeastLoadedConfig
from vajra_policies.power_of_two import PowerOfTwo, PowerOfTwoConfig
from vajra_policies.prefix_affinity import PrefixAffinity, PrefixAffinityConfig
from vajra_policies.pull import Pull
from vajra_policies.random_replica import RandomReplica
from vajra_policies.round_robin import RoundRobin
from vajra_py.contract import ReplicaLimits, ReplicasetScheduler
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import PromptContent, RequestSpec


@dataclass
class Load:
    """A replica's figures, as a router sees them."""

    replica_id: int
    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    is_up: bool = True
    hit_tokens: int = 0
    free_blocks: int = 10
    num_blocks: int = 10
    max_batch_size: int = 4
    num_stages: int = 1
    role: str = "mixed"
    age_s: float = 0.0

    @property
    def limits(self) -> ReplicaLimits:
        return ReplicaLimits(16, self.num_blocks, self.max_batch_size, None, 1000, self.num_stages)

    def prefix_hit_tokens(self, request: object) -> int:
        return self.hit_tokens


@dataclass
class Prompt:
    """The facts of a request that routing reads."""

    num_prompt_tokens: int = 100
    request_id: str = "r"


def rng(seed: int = 0) -> Any:
    return np.random.default_rng(seed)


def assign(policy: Any, replicas: list[Load]) -> Any:
    return policy.assign(Prompt(), replicas, 0.0)


ALL: dict[str, ReplicasetScheduler] = {
    "round_robin": RoundRobin(),
    "least_loaded": LeastLoaded(LeastLoadedConfig()),
    "power_of_two": PowerOfTwo(PowerOfTwoConfig(), rng()),
    "random": RandomReplica(rng()),
    "prefix_affinity": PrefixAffinity(PrefixAffinityConfig()),
    "pull": Pull(),
}
BINDING = [name for name in ALL if name != "pull"]


@pytest.mark.parametrize("name", ALL)
def test_is_a_replicaset_scheduler(name: str) -> None:
    assert isinstance(ALL[name], ReplicasetScheduler)


@pytest.mark.parametrize("name", BINDING)
def test_a_replica_that_is_down_gets_nothing(name: str) -> None:
    replicas = [Load(0, is_up=False), Load(1, num_running=9), Load(2, is_up=False), Load(3, num_running=9)]
    assert {assign(ALL[name], replicas) for _ in range(40)} <= {1, 3}
    one = [Load(0, is_up=False), Load(1, num_running=9)]
    assert {assign(ALL[name], one) for _ in range(5)} == {1}
    assert assign(ALL[name], [Load(0, is_up=False)]) is None


@pytest.mark.parametrize("name", BINDING)
def test_what_came_while_none_was_up_goes_to_the_first_that_comes_up(name: str) -> None:
    queue: Any = [Prompt(request_id="a"), Prompt(request_id="b")]
    assert list(ALL[name].pull(Load(1, is_up=False), queue, 0.0)) == []
    assert list(ALL[name].pull(Load(1), queue, 0.0)) == ["a", "b"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("num_running", "pulled"), [(7, ["a"]), (8, [])])
def test_a_replica_with_pipeline_stages_has_the_slots_of_all_steps_in_flight(
    name: str, num_running: int, pulled: list[str]
) -> None:
    queue: Any = [Prompt(request_id="a")]
    assert list(ALL[name].pull(Load(1, num_running=num_running, num_stages=2), queue, 0.0)) == pulled


def two_replicas(**sizes: Any) -> HarnessOptions:
    return HarnessOptions(num_replicas=2, **sizes)


@pytest.mark.parametrize("name", ["round_robin", "random", "pull"])
def test_policies_that_say_so_read_no_load(name: str) -> None:
    policy = ALL[name]
    assert not policy.traits.reads_load

    class Bare:
        replica_id, is_up = 0, True

    assert policy.assign(Prompt(), [Bare(), Bare()], 0.0) in (0, None)  # type: ignore[arg-type, list-item]


# In turn


def test_round_robin_goes_round_and_skips_the_missing() -> None:
    policy, replicas = RoundRobin(), [Load(i) for i in range(3)]
    assert [assign(policy, replicas) for _ in range(4)] == [0, 1, 2, 0]
    replicas[1].is_up = False
    assert [assign(policy, replicas) for _ in range(3)] == [2, 0, 2]
    replicas[1].is_up = True
    assert [assign(policy, replicas) for _ in range(3)] == [0, 1, 2]


# By load


def test_least_loaded_by_requests_and_by_tokens() -> None:
    replicas = [
        Load(0, num_running=1, num_waiting=1, num_pending_tokens=10, num_context_tokens=10),
        Load(1, num_running=1, num_waiting=0, num_pending_tokens=5000, num_context_tokens=0),
        Load(2, num_running=2, num_waiting=0, num_pending_tokens=0, num_context_tokens=15),
    ]
    assert assign(LeastLoaded(LeastLoadedConfig()), replicas) == 1
    assert assign(LeastLoaded(LeastLoadedConfig(by="tokens")), replicas) == 2


def test_least_loaded_ties_go_to_the_lowest_id() -> None:
    replicas = [Load(2, num_running=1), Load(1, num_running=1), Load(0, num_running=2)]
    assert assign(LeastLoaded(LeastLoadedConfig()), replicas) == 1


def test_least_loaded_keeps_the_replicas_even() -> None:
    harness = Harness("fcfs", "least_loaded", "fixed_chunk", HarnessOptions(num_replicas=4))
    for index in range(10):
        harness.submit(f"r{index}", 10)
    assert [len(harness.waiting(replica_id)) for replica_id in range(4)] == [3, 3, 2, 2]


def test_token_load_counts_what_waits_and_what_is_held() -> None:
    harness = Harness("fcfs", ("least_loaded", {"by": "tokens"}), "fixed_chunk", two_replicas())
    harness.submit("long", 500, 9)
    harness.submit("s1", 100)
    harness.submit("s2", 100)
    assert harness.waiting(1) == ["s1", "s2"]
    harness.step(0)  # the long prompt is computed: it waits no longer, and is held
    harness.submit("s3", 100)
    assert harness.waiting(1) == ["s1", "s2", "s3"]


# By chance


def test_random_is_uniform_over_those_up() -> None:
    replicas = [Load(i, is_up=i != 2) for i in range(5)]
    policy = RandomReplica(rng(3))
    counts = Counter(assign(policy, replicas) for _ in range(8000))
    assert set(counts) == {0, 1, 3, 4}
    assert all(abs(count - 2000) < 200 for count in counts.values())  # five standard deviations


def test_power_of_two_takes_the_less_loaded_of_two_distinct_replicas() -> None:
    """Of four replicas the k-th lightest wins against those that are heavier: in 3, 2, 1 and 0 of the 6 pairs."""
    replicas = [Load(0, num_running=2), Load(1, num_running=3), Load(2, num_running=1), Load(3, num_running=0)]
    policy = PowerOfTwo(PowerOfTwoConfig(), rng(5))
    counts = Counter(assign(policy, replicas) for _ in range(12_000))
    assert counts[1] == 0, "the heaviest never wins: both choices are distinct"
    for replica_id, expected in [(3, 6000), (2, 4000), (0, 2000)]:
        assert abs(counts[replica_id] - expected) < 300  # more than five standard deviations


def test_power_of_two_spreads_ties_evenly() -> None:
    policy, replicas = PowerOfTwo(PowerOfTwoConfig(), rng(7)), [Load(i) for i in range(4)]
    counts = Counter(assign(policy, replicas) for _ in range(8000))
    assert all(abs(counts[i] - 2000) < 200 for i in range(4))


def test_power_of_two_by_tokens() -> None:
    replicas = [Load(0, num_running=9), Load(1, num_pending_tokens=50), Load(2, num_context_tokens=60)]
    policy = PowerOfTwo(PowerOfTwoConfig(by="tokens"), rng(1))
    assert Counter(assign(policy, replicas) for _ in range(300)).keys() == {0, 1}


@pytest.mark.parametrize("name", ["random", "power_of_two"])
def test_draws_repeat_with_the_seed_and_change_with_it(name: str) -> None:
    def draws(seed: int) -> list[Any]:
        harness = Harness("fcfs", name, "fixed_chunk", HarnessOptions(num_replicas=8, seed=seed))
        return [harness.submit(f"r{index}", 10).replica_id for index in range(40)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_two_choices_leave_shorter_queues_than_one() -> None:
    """The effect that gives the policy its name: the longest of n queues shrinks to about log log n."""
    longest = Counter[str]()
    for name in ("random", "power_of_two"):
        for seed in range(10):
            harness = Harness("fcfs", name, "fixed_chunk", HarnessOptions(num_replicas=64, num_blocks=4, seed=seed))
            for index in range(64):
                harness.submit(f"r{index}", 10)
            longest[name] += max(len(harness.waiting(replica_id)) for replica_id in range(64))
    assert 10 * 2 <= longest["power_of_two"] <= 10 * 3
    assert longest["random"] > 10 * 3.5


# By prefix


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([Load(0), Load(1, num_running=3, hit_tokens=80)], 1),
        ([Load(0), Load(1, num_running=3, hit_tokens=9)], 0),
        ([Load(0), Load(1, num_running=11, hit_tokens=80)], 0),
        ([Load(0), Load(1, num_running=10, hit_tokens=80)], 1),
        ([Load(0, num_running=2, hit_tokens=64), Load(1, hit_tokens=64), Load(2, hit_tokens=64)], 1),
        ([Load(0, num_running=1), Load(1)], 1),
        ([Load(0, hit_tokens=100, is_up=False), Load(1, hit_tokens=32), Load(2)], 1),
    ],
    ids=["follows", "too little cached", "too uneven", "just even enough", "ties", "nothing cached", "holder down"],
)
def test_prefix_affinity(replicas: list[Load], expected: int) -> None:
    assert assign(PrefixAffinity(PrefixAffinityConfig()), replicas) == expected


def test_a_prompt_follows_its_prefix() -> None:
    harness = Harness("fcfs", "prefix_affinity", "fixed_chunk", two_replicas(prefix_cache=PrefixCacheOptions()))
    shared = ("system", 64)
    first = harness.submit("a", 96, content=PromptContent((shared, ("a", 32))))
    harness.step(first.replica_id)
    harness.submit("other", 96, content=PromptContent((("x", 96),)))
    follower = harness.submit("b", 96, content=PromptContent((shared, ("b", 32))))
    assert follower.replica_id == first.replica_id
    step = harness.step(first.replica_id)
    assert step is not None
    assert step.entries[-1].num_computed_before == 64


# Late binding


def test_pull_binds_late_and_in_order_of_urgency() -> None:
    harness = Harness("priority", "pull", "fixed_chunk", two_replicas(max_batch_size=1))
    for name, priority in [("slow", 0), ("next", 1), ("last", 2)]:
        harness.submit(name, 50, 3, priority=priority)
    assert harness.request("slow").replica_id == -1
    assert [step.admitted for step in (harness.step(1), harness.step(0)) if step] == [["slow"], ["next"]]
    assert harness.request("last").replica_id == -1
    harness.submit("urgent", 50, 1, priority=-1)
    while not (step := harness.step(0)) or not step.admitted:
        assert step is not None
    assert step.admitted == ["urgent"]
    assert harness.request("urgent").replica_id == 0


def test_a_full_replica_does_not_look_into_the_shared_queue() -> None:
    harness = Harness("fcfs", "pull", "fixed_chunk", two_replicas(max_batch_size=1, num_blocks=4))
    harness.submit("a", 40, 20)
    harness.step(0)
    harness.submit("b", 10)
    assert harness.waiting(0) == []
    assert harness.waiting(1) == ["b"]

    class Full(Load):
        def __iter__(self) -> Any:
            raise AssertionError("it looked")

    queue: Any = Full(0)
    for busy in (Load(0, num_running=4), Load(0, free_blocks=0), Load(0, is_up=False)):
        assert list(Pull().pull(busy, queue, 0.0)) == []


def test_pulling_looks_no_further_than_it_must() -> None:
    seen = []

    class Queue:
        def __len__(self) -> int:
            return 1000

        def __iter__(self) -> Any:
            for index in range(1000):
                seen.append(index)
                yield Prompt(request_id=f"r{index}")

    pulled = iter(Pull().pull(Load(0), Queue(), 0.0))
    assert [next(pulled), next(pulled)] == ["r0", "r1"]
    assert seen == [0, 1]


def test_a_preempted_request_stays_with_its_replica() -> None:
    """Two requests fill one replica's memory; the one that is preempted does not move, though the other replica is idle."""
    harness = Harness("fcfs", "pull", "fixed_chunk", two_replicas(num_blocks=4))
    harness.submit("a", 32, 30)
    harness.submit("b", 31, 30)
    steps = []
    while (step := harness.step(0)) is not None:
        steps.append(step)
    assert [victim for step in steps for victim, _ in step.preempted] == ["b"]
    assert harness.request("b").replica_id == 0
    assert harness.controller.num_alive == 0


def test_one_replica_makes_pull_and_round_robin_equal() -> None:
    workload = [RequestSpec(f"r{i}", 0.013 * i, 20 + 31 * i % 150, 3 + 7 * i % 25) for i in range(40)]
    runs = []
    for name in ("pull", "round_robin"):
        harness = Harness("fcfs", name, "fixed_chunk", HarnessOptions(num_blocks=24))
        runs.append([(step.formed_at, step.tokens, step.preempted) for step in harness.run(workload)])
    assert runs[0] == runs[1]
