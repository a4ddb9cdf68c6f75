"""In which order are programs served by least attained service, Justitia and Continuum?"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_policies.programs.continuum import Continuum, ContinuumConfig
from vajra_policies.programs.justitia import FluidShares
from vajra_policies.programs.least_attained_service import LeastAttainedService, LeastAttainedServiceConfig
from vajra_policies.programs.tool_gaps import ToolGapConfig, ToolGaps
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec


@dataclass(eq=False)
class Program:
    """A program of which nothing matters but when it came."""

    program_id: str = "p"
    arrived_at: float = 0.0
    end_reason: None = None


@dataclass(eq=False)
class Call:
    """Attributes of a call that these policies read."""

    program: Program | None = None
    arrived_at: float = 0.0
    num_prompt_tokens: int = 10
    num_output_tokens: int = 5
    admitted_index: int = 1
    is_resident: bool = False
    is_last_call: bool = False
    stage: str = ""
    tenant: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def program_id(self) -> str:
        return "" if self.program is None else self.program.program_id


# Least attained service


def test_service_halves_with_time() -> None:
    policy = LeastAttainedService(LeastAttainedServiceConfig(half_life_s=10.0))
    call: Any = Call(Program("p"), num_prompt_tokens=100, num_output_tokens=50)
    policy.on_departures([call], 5.0)
    assert [policy.service("program p", 5.0 + 10.0 * k) for k in range(4)] == [200.0, 100.0, 50.0, 25.0]
    policy.on_departures([call], 25.0)
    assert policy.service("program p", 25.0) == 50.0 + 200.0
    policy.on_program_end(call.program, 25.0)
    assert policy.service("program p", 25.0) == 0.0


def test_service_is_dropped_after_an_hour_without_more() -> None:
    policy = LeastAttainedService(LeastAttainedServiceConfig(half_life_s=1e12))
    idle, busy = (Call(Program(name), num_prompt_tokens=100, num_output_tokens=0) for name in ("idle", "busy"))
    policy.on_departures([busy, idle], 0.0)  # type: ignore[list-item]
    policy.on_departures([busy], 3600.0)  # type: ignore[list-item]
    assert [round(policy.service(f"program {name}", 3600.0)) for name in ("idle", "busy")] == [100, 200]
    policy.on_departures([busy], 3601.0)  # type: ignore[list-item]
    assert [round(policy.service(f"program {name}", 3601.0)) for name in ("idle", "busy")] == [0, 300]


def test_the_score_weighs_little_service_against_a_long_wait() -> None:
    policy = LeastAttainedService(LeastAttainedServiceConfig(half_life_s=1e12))
    calls: dict[str, Any] = {name: Call(Program(name), at) for name, at in (("new", 9.0), ("old", 0.0), ("mid", 6.0))}
    policy.on_departures([Call(Program("old"), num_prompt_tokens=1000)], 8.0)  # type: ignore[list-item]
    policy.on_departures([Call(Program("mid"), num_prompt_tokens=495)], 8.0)  # type: ignore[list-item]
    policy.on_arrivals(list(calls.values()), 9.0)
    scores = {name: -policy.group_key(policy.group(call)) for name, call in calls.items()}
    assert scores["new"] == pytest.approx(0.8)
    assert scores["old"] == pytest.approx(0.2)
    assert scores["mid"] == pytest.approx(0.8 * 0.5 + 0.2 / 3)


def test_a_program_whose_only_request_was_moved_waits_again() -> None:
    policy = LeastAttainedService(LeastAttainedServiceConfig())
    moved, other = Call(Program("moved")), Call(Program("other"))
    policy.on_departures([Call(Program("other"))], 0.0)  # type: ignore[list-item]
    policy.on_arrivals([moved, other], 0.0)  # type: ignore[list-item]
    policy.on_admission(moved, 0, 0.0)  # type: ignore[arg-type]
    policy.on_moved(moved, 0, 1, 1.0)  # type: ignore[arg-type]
    assert [policy.group_key(f"program {name}") for name in ("moved", "other")] == [-0.8, 0.0]


def test_a_tenant_named_like_a_program_shares_nothing_with_it() -> None:
    policy = LeastAttainedService(LeastAttainedServiceConfig())
    call, alone, other = Call(Program("alice")), Call(tenant="alice"), Call(tenant="bob")
    policy.on_departures([call], 0.0)  # type: ignore[list-item]
    policy.on_arrivals([call, alone, other], 0.0)  # type: ignore[list-item]
    keys = [policy.group_key(policy.group(one)) for one in (call, alone, other)]  # type: ignore[arg-type]
    assert keys == [0.0, -0.8, -0.8]


def test_a_program_that_was_served_little_overtakes_one_that_was_served_much_until_they_are_even() -> None:
    one = Harness("las", "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1))
    one.submit("a0", 100, 5, program_id="a")
    one.steps_until_idle()
    for index in range(1, 6):
        one.submit(f"a{index}", 30, 5, program_id="a")
    for index in range(6):
        one.submit(f"b{index}", 30, 5, program_id="b")
    order = "".join(name[0] for step in one.steps_until_idle() for name in step.admitted)
    assert order.startswith("bbb")
    assert "ab" in order, "once they are even, they take turns"


# Justitia

agents = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=14)


def even_sharing(agents: list[tuple[int, int]]) -> list[Fraction]:
    """Ends of agents (arrival, cost) on a server that does one unit of work a second and shares it evenly."""
    left = [Fraction(cost) for _, cost in agents]
    ends = [Fraction(0)] * len(agents)
    now = Fraction(0)
    while any(left):
        present = [index for index, (at, _) in enumerate(agents) if at <= now and left[index]]
        later = [Fraction(at) - now for at, _ in agents if at > now]
        span = min([*later, *(left[index] * len(present) for index in present)])
        now += span
        for index in present:
            left[index] -= span / len(present)
            if not left[index]:
                ends[index] = now
    return ends


def tags_of(agents: list[tuple[int, int]]) -> list[float]:
    shares, now, tags = FluidShares(), 0, []
    for at, cost in agents:
        shares.serve(at - now)
        now = at
        tags.append(shares.join(cost))
    return tags


@given(agents)
def test_finish_tags_stand_in_the_order_of_ends_under_even_sharing(agents: list[tuple[int, int]]) -> None:
    agents.sort(key=lambda one: one[0])
    ends, tags = even_sharing(agents), tags_of(agents)
    for one in range(len(agents)):
        for other in range(len(agents)):
            if ends[one] < ends[other]:
                assert tags[one] <= tags[other] + 1e-9


@given(agents)
def test_served_one_by_one_in_that_order_nobody_ends_later_than_under_even_sharing_by_more_than_one_agent(
    agents: list[tuple[int, int]],
) -> None:
    agents.sort(key=lambda one: one[0])
    ends, tags = even_sharing(agents), tags_of(agents)
    waiting = set(range(len(agents)))
    now = 0
    while waiting:
        present = [index for index in waiting if agents[index][0] <= now]
        if not present:
            now = min(agents[index][0] for index in waiting)
            continue
        served = min(present, key=lambda index: (tags[index], index))
        now += agents[served][1]
        waiting.remove(served)
        assert now <= ends[served] + max(cost for _, cost in agents)


def test_the_agent_that_would_end_first_has_all_of_its_calls_served_first() -> None:
    lengths = {f"large{index}": 20 for index in range(4)} | {f"small{index}": 6 for index in range(4)}
    options = HarnessOptions(
        max_batch_size=2, latency=AffineModel(1.0), output_lengths=OracleLengths(lengths), num_blocks=400
    )
    one = Harness("justitia", "round_robin", "fixed_chunk", options)
    for index in range(4):
        one.submit(f"large{index}", 10, 20, program_id="large", num_program_calls=4)
    for index in range(4):
        one.submit(f"small{index}", 10, 6, program_id="small", num_program_calls=4)
    order = [name for step in one.steps_until_idle() for name in step.admitted]
    assert order == [f"small{index}" for index in range(4)] + [f"large{index}" for index in range(4)]


def test_a_stated_cost_counts_instead_of_a_predicted_one() -> None:
    one = Harness("justitia", "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1))
    one.submit("running", 10, 5)
    one.step()
    one.submit("dear", 10, 5, program_id="dear", metadata={"agent_cost": 5e9})
    one.submit("cheap", 900, 5, program_id="cheap", metadata={"agent_cost": 10})
    assert [name for step in one.steps_until_idle() for name in step.admitted] == ["cheap", "dear"]


@pytest.mark.parametrize("stated", [10**400, 1e300, -1e300, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_predicted(stated: float) -> None:
    one = Harness("justitia", "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1))
    one.submit("running", 10, 5)
    one.step()
    one.submit("odd", 900, 5, program_id="odd", metadata={"agent_cost": stated})
    one.submit("cheap", 900, 5, program_id="cheap", metadata={"agent_cost": 10})
    assert [name for step in one.steps_until_idle() for name in step.admitted] == ["cheap", "odd"]


# Continuum


def test_a_call_in_time_goes_before_all_and_the_rest_is_first_come_by_programs() -> None:
    policy = Continuum(ContinuumConfig(ttl_s=2.0))
    old, new, other = (Program(name, at) for name, at in (("old", 0.0), ("new", 5.0), ("other", 3.0)))
    for program in (old, new):
        policy.on_departures([Call(program)], 10.0)  # type: ignore[list-item]
    late: Any = Call(old, 12.5)
    in_time: Any = Call(new, 11.0)
    fresh: Any = Call(other, 11.5)
    alone: Any = Call(None, 4.0)
    policy.on_arrivals([in_time], 11.0)
    policy.on_arrivals([fresh, alone], 11.5)
    policy.on_arrivals([late], 12.5)
    keys = {name: policy.key(call, 13.0) for name, call in zip("lifa", (late, in_time, fresh, alone), strict=True)}
    assert sorted(keys, key=lambda name: keys[name]) == ["i", "l", "f", "a"]


def test_all_parallel_calls_in_time_count_and_a_call_that_never_ran_pins_nothing() -> None:
    policy = Continuum(ContinuumConfig(ttl_s=2.0))
    program, aborted = Program("parallel"), Program("aborted")
    policy.on_departures([Call(program), Call(aborted, admitted_index=0)], 10.0)  # type: ignore[list-item]
    calls: list[Any] = [Call(program, 11.0), Call(program, 11.5), Call(program, 12.5), Call(aborted, 11.0)]
    for call in calls:
        policy.on_arrivals([call], call.arrived_at)
    assert [policy.key(call, 13.0)[0] for call in calls] == [0.0, 0.0, 1.0, 1.0]


def test_tools_that_take_long_in_the_mean_are_not_waited_for() -> None:
    gaps = ToolGaps(ToolGapConfig(ttl_s=2.0, max_mean_gap_s=2.0))
    slow, fast = Program("slow"), Program("fast")
    calls: dict[str, Any] = {
        "test": Call(slow, metadata={"tool": "pytest"}),
        "list": Call(fast, metadata={"tool": "ls"}),
        "last": Call(fast, is_last_call=True),
        "alone": Call(None),
    }
    assert gaps.ttl_s(calls["test"]) == 2.0, "nothing is known of the tool"
    for name, gap in (("test", 30.0), ("list", 0.5)):
        gaps.depart([calls[name]], 0.0)
        gaps.arrive([Call(calls[name].program)], gap)  # type: ignore[list-item]
    assert {name: gaps.ttl_s(call) for name, call in calls.items()} == {
        "test": 0.0,
        "list": 2.0,
        "last": 0.0,
        "alone": 0.0,
    }
    for _ in range(20):
        gaps.depart([calls["test"]], 0.0)
        gaps.arrive([Call(slow)], 0.1)  # type: ignore[list-item]
    assert gaps.ttl_s(calls["test"]) == 2.0, "the mean has fallen to (30 + 20 * 0.1) / 21 s"


def test_one_time_of_a_tool_is_its_mean() -> None:
    gaps, program = ToolGaps(ToolGapConfig(ttl_s=2.0, max_mean_gap_s=2.0)), Program("one")
    call: Any = Call(program, metadata={"tool": "make"})
    gaps.depart([call], 0.0)
    gaps.arrive([call], 3.0)
    assert gaps.ttl_s(call) == 0.0, "3 s are more than 2 s"


def test_names_of_tools_without_end_are_not_kept() -> None:
    gaps, program = ToolGaps(ToolGapConfig(max_mean_gap_s=2.0)), Program("one")

    def use(tool: str, gap_s: float) -> Any:
        call: Any = Call(program, metadata={"tool": tool})
        gaps.depart([call], 0.0)
        gaps.arrive([Call(program)], gap_s)  # type: ignore[list-item]
        return call

    forgotten = use("slow", 30.0)
    kept = use("slow too", 30.0)
    tracemalloc.start()
    for index in range(20_000):
        use(f"tool {index}", 0.0)
        use("slow too", 30.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 500_000
    assert (gaps.ttl_s(forgotten), gaps.ttl_s(kept)) == (2.0, 0.0)


def test_programs_keep_their_place_under_continuum_as_a_whole() -> None:
    one = Harness("continuum", "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1))
    specs = [
        RequestSpec(
            f"{program}{index}", at, 20, 4, program_id=program, follows=f"{program}{index - 1}" if index else None
        )
        for program, at in (("first", 0.0), ("second", 0.001), ("third", 0.002))
        for index in range(3)
    ]
    one.run(specs)
    order = [name for step in one.steps for name in step.admitted]
    assert order == [f"{program}{index}" for program in ("first", "second", "third") for index in range(3)]


# Parrot


def mean_completion_time(prioritizer: str, num_chains: int) -> float:
    """Mean completion time of chains of two calls of one step each, which are there at once, on a replica that runs one at a time, steps of 1 s."""
    one = Harness(prioritizer, "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1, latency=AffineModel(1.0)))
    specs = [
        RequestSpec(f"{index} {call}", 0.0, 1, 1, program_id=f"p{index}", follows=f"{index} a" if call == "b" else None)
        for index in range(num_chains)
        for call in "ab"
    ]
    one.run(specs)
    return sum(one.request(f"{index} b").ended_at or 0.0 for index in range(num_chains)) / num_chains


@pytest.mark.parametrize("num_chains", [1, 2, 5, 12])
def test_chains_of_two_calls_end_as_soon_as_the_closed_form_says(num_chains: int) -> None:
    assert mean_completion_time("parrot", num_chains) == pytest.approx(num_chains + 1)
    assert mean_completion_time("fcfs", num_chains) == pytest.approx((3 * num_chains + 1) / 2)


def test_depth_follows_the_longest_way_through_the_calls_that_were_stated() -> None:
    one = Harness("parrot", "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1))
    one.submit("running", 10, 9)
    one.step()
    for name, parents in (("plan", ()), ("draft", ("plan",)), ("check", ("plan",)), ("merge", ("plan", "draft"))):
        one.submit(name, 10, 1, program_id="p", parent_calls=parents)
    one.submit("alone", 10, 1)
    order = [name for step in one.steps_until_idle() for name in step.admitted]
    assert order == ["merge", "draft", "check", "plan", "alone"]
