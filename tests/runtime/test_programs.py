"""Programs as policies see them: what their views say, when they end, and what becomes of calls that need a lost result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.contract import EndReason, KeyMotion, ProgramEnd, ProgramView, RequestView
from vajra_py.contract.observer import Observer
from vajra_py.latency import AffineModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.support.clock import to_seconds
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload import PromptContent, RequestSpec

SECOND = AffineModel(base_s=1.0, per_token_s=0.0)
"""Every step takes a second."""


class Watch:
    """First come, first served; notes what the views of programs say when calls arrive, and their ends."""

    key_motion = KeyMotion.STATIC

    def __init__(self) -> None:
        self.arrivals: dict[str, dict[str, Any]] = {}
        self.siblings: dict[str, Sequence[str]] = {}
        self.hits: dict[str, int] = {}
        self.programs: dict[str, ProgramView] = {}
        self.ends: list[tuple[str, ProgramEnd | None, float]] = []

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        for one in requests:
            if one.program is None:
                continue
            program = self.programs[one.request_id] = one.program
            names = ("num_calls", "num_alive", "num_ended", "run_s", "wait_s", "service_tokens", "next_call_at")
            self.arrivals[one.request_id] = {name: getattr(program, name) for name in names}
            self.siblings[one.request_id] = program.siblings(one)

    def key(self, request: RequestView, now: float) -> float:
        self.hits[request.request_id] = request.prefix_hit_tokens()
        return request.arrived_at

    def on_program_end(self, program: ProgramView, now: float) -> None:
        self.ends.append((program.program_id, program.end_reason, now))


class Ends(Observer):
    """Notes how requests and programs end."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[EndReason, str]] = {}
        self.programs: list[str] = []
        self.cached: dict[str, int] = {}
        self.until_s = 0.0

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.requests[request.request_id] = (reason, detail)
        self.cached[request.request_id] = request.num_cached_tokens

    def on_program_end(self, program: ProgramView, now: float) -> None:
        self.programs.append(program.program_id)


def served(
    specs: Sequence[RequestSpec],
    aborts: dict[str, float] | None = None,
    idle_s: float | None = None,
    **options: Any,
) -> tuple[Watch, Ends, Harness]:
    watch, ends = Watch(), Ends()
    harness = Harness(watch, "round_robin", "fixed_chunk", HarnessOptions(latency=SECOND, **options))
    harness.controller.programs.idle_s = idle_s
    harness.controller.watch((ends,))
    simulator = harness.simulator(SimulationOptions(check_every_steps=1))
    for name, seconds in (aborts or {}).items():
        simulator.abort_at(seconds, name)
    simulator.run(specs)
    harness.controller.check_conservation()
    ends.until_s = to_seconds(simulator.now)
    return watch, ends, harness


def call(name: str, follows: Any = None, **facts: Any) -> RequestSpec:
    parents = () if follows is None else (follows,) if isinstance(follows, str) else follows
    arrived_at = facts.pop("arrived_at", 0.0)
    return RequestSpec(name, arrived_at, 4, 3, program_id="p", follows=follows, **{"parent_calls": parents, **facts})


FORK = [
    call("plan", next_call_after_s=2.0),
    call("left", "plan", think_time_s=2.0),
    call("right", "plan", think_time_s=2.0),
    call("join", ("left", "right"), is_last_call=True),
]


def test_a_view_counts_calls_and_attained_service() -> None:
    watch, _, _ = served(FORK)
    assert watch.arrivals["plan"] == {
        **{"num_calls": 1, "num_alive": 1, "num_ended": 0, "run_s": 0.0, "wait_s": 0.0},
        **{"service_tokens": 0, "next_call_at": None},
    }
    left, join = watch.arrivals["left"], watch.arrivals["join"]
    assert (left["num_calls"], left["num_ended"], left["run_s"], left["service_tokens"]) == (2, 1, 3.0, 7)
    assert (join["num_calls"], join["num_alive"], join["num_ended"], join["run_s"]) == (4, 1, 3, 9.0)
    assert watch.programs["plan"] is watch.programs["join"]
    assert watch.programs["plan"].num_output_tokens == 12


def test_siblings_are_the_calls_with_the_same_parents() -> None:
    watch, _, _ = served(FORK)
    assert watch.siblings == {"plan": (), "left": (), "right": ("left",), "join": ()}


def test_the_next_call_is_due_while_a_tool_runs() -> None:
    seen: list[float | None] = []

    class Looker(Observer):
        def on_arrival(self, request: RequestView, now: float) -> None:
            if request.program is None:
                seen.append(watch.programs["plan"].next_call_at)

    watch = Watch()
    harness = Harness(watch, "round_robin", "fixed_chunk", HarnessOptions(latency=SECOND))
    harness.controller.watch((Looker(),))
    alone = [RequestSpec("while it runs", 1.0, 4, 1), RequestSpec("while a tool runs", 4.0, 4, 1)]
    harness.simulator(SimulationOptions()).run([*FORK, *alone])
    assert seen == [None, 5.0]


@pytest.mark.parametrize(
    ("facts", "reason", "at"),
    [
        ({"is_last_call": True}, ProgramEnd.LAST_CALL, 9.0),
        ({"num_program_calls": 3}, ProgramEnd.ALL_CALLS, 9.0),
        ({}, ProgramEnd.IDLE, 19.0),
    ],
)
def test_a_program_ends_once_by_declaration_or_idleness(facts: dict[str, Any], reason: ProgramEnd, at: float) -> None:
    specs = [call("a"), call("b", "a"), call("c", "b", **facts), RequestSpec("later", 30.0, 4, 1)]
    watch, ends, harness = served(specs, idle_s=10.0)
    assert watch.ends == [("p", reason, at)]
    assert ends.programs == ["p"]
    assert not len(harness.controller.programs)


def test_a_program_does_not_idle_while_a_call_lives_and_begins_anew_after_its_end() -> None:
    specs = [
        *(call("a"), call("b", "a", think_time_s=9.0), call("c", "b", think_time_s=11.0)),
        RequestSpec("later", 60.0, 4, 1),
    ]
    watch, _, _ = served(specs, idle_s=10.0)
    assert [at for _, _, at in watch.ends] == [25.0, 39.0]
    assert watch.programs["a"] is watch.programs["b"]
    assert watch.programs["c"] is not watch.programs["a"]


def test_a_waiting_end_does_not_keep_a_run_going() -> None:
    _, ends, _ = served([call("a")], idle_s=1000.0)
    assert ends.until_s == 3.0


def test_calls_that_need_a_lost_result_end_by_name() -> None:
    watch, ends, _ = served([*FORK[:3], call("join", ("left", "right"), num_program_calls=4)], aborts={"left": 6.5})
    assert ends.requests["right"][0] is EndReason.STOP
    reason, detail = ends.requests["join"]
    assert reason is EndReason.REJECTED
    assert detail == "call 'left' of its program, whose result it needs, ended without one (aborted)"
    assert [reason for _, reason, _ in watch.ends] == [ProgramEnd.ALL_CALLS]


def test_a_failure_goes_down_the_whole_chain_and_nothing_waits() -> None:
    chain = [call("c0"), *(call(f"c{n}", f"c{n - 1}", think_time_s=1.0) for n in range(1, 6))]
    _, ends, harness = served(chain, aborts={"c1": 4.5})
    assert [ends.requests[f"c{n}"][0] for n in range(6)] == [
        *(EndReason.STOP, EndReason.ABORTED),
        *[EndReason.REJECTED] * 4,
    ]
    assert harness.controller.num_alive == 0


def test_a_call_that_is_sent_again_with_success_has_a_result() -> None:
    specs = [call("a"), call("a", arrived_at=10.0), call("b", arrived_at=20.0, parent_calls=("a",))]
    _, ends, _ = served(specs, aborts={"a": 1.5})
    assert ends.requests["b"][0] is EndReason.STOP


def test_requests_without_a_program_have_none() -> None:
    watch, ends, harness = served([RequestSpec("alone", 0.0, 4, 2, session_id="s")])
    assert watch.programs == {}
    assert ends.programs == []
    assert len(harness.controller.programs) == 0


def test_a_prioritizer_sees_prefix_hits_of_waiting_requests() -> None:
    shared = PromptContent((("shared", 48),))
    longer = PromptContent((("shared", 48), ("own", 16)))
    specs = [
        RequestSpec("first", 0.0, 48, 2, content=shared),
        RequestSpec("same", 10.0, 64, 2, content=longer),
        RequestSpec("other", 20.0, 48, 2, content=PromptContent((("other", 48),))),
    ]
    watch, ends, _ = served(specs, prefix_cache=PrefixCacheOptions())
    assert watch.hits == {"first": 0, "same": 48, "other": 0}
    without, _, _ = served(specs, prefix_cache=PrefixCacheOptions(), keeps_steps=False)
    assert without.hits == watch.hits, "also while decode steps are fast-forwarded"
    assert ends.cached["same"] == 48


class Ignorant(Watch):
    """The same without reading hits."""

    def key(self, request: RequestView, now: float) -> float:
        return request.arrived_at


def test_reading_prefix_hits_changes_nothing_in_the_cache() -> None:
    contents = [PromptContent(((f"text {n * n % 7}", 64),)) for n in range(30)]
    specs = [RequestSpec(str(n), n * 1.7, 64, 3, content=one) for n, one in enumerate(contents)]
    cached = []
    for policy in (Watch(), Ignorant()):
        options = HarnessOptions(num_blocks=16, latency=SECOND, prefix_cache=PrefixCacheOptions())
        harness, ends = Harness(policy, "round_robin", "fixed_chunk", options), Ends()
        harness.controller.watch((ends,))
        harness.simulator(SimulationOptions()).run(specs)
        cached.append(ends.cached)
    assert cached[0] == cached[1]
    assert any(cached[0].values())


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[RequestSpec], dict[str, float]]:
    specs: list[RequestSpec] = []
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 6))
        declares = draw(st.booleans())
        for index in range(size):
            parents = tuple(
                f"{number}.{one}"
                for one in sorted(draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else ())
            )
            specs.append(
                RequestSpec(
                    f"{number}.{index}",
                    float(number),
                    draw(st.integers(1, 40)),
                    draw(st.integers(1, 6)),
                    program_id=str(number),
                    parent_calls=parents,
                    follows=parents or None,
                    think_time_s=draw(st.sampled_from((0.0, 0.5, 3.0))) if parents else 0.0,
                    num_program_calls=size if declares else None,
                )
            )
    names = draw(st.sets(st.sampled_from([spec.request_id for spec in specs]), max_size=3))
    return specs, {name: draw(st.floats(0.1, 20.0)) for name in sorted(names)}


@given(programs(), st.sampled_from((None, 2.0)))
@settings(max_examples=60, deadline=None)
def test_every_call_ends_once_and_every_program_at_most_once(
    given_: tuple[list[RequestSpec], dict[str, float]], idle_s: float | None
) -> None:
    specs, aborts = given_
    watch, ends, harness = served(specs, aborts, idle_s, num_blocks=12, max_batch_size=3)
    assert ends.requests.keys() == {spec.request_id for spec in specs}
    lost = {name for name, (reason, _) in ends.requests.items() if reason not in (EndReason.STOP, EndReason.LENGTH)}
    for spec in specs:
        if lost.intersection(spec.parents) and idle_s is None:
            assert ends.requests[spec.request_id][0] in (EndReason.REJECTED, EndReason.ABORTED)
    for program in {id(one): one for one in watch.programs.values()}.values():
        assert program.num_alive == 0
        assert program.num_ended == program.num_calls
    declared = [name for name, reason, _ in watch.ends if reason is ProgramEnd.ALL_CALLS]
    assert len(declared) == len(set(declared))
    open_ones = {program.program_id for program in harness.controller.programs}
    complete = {spec.program_id for spec in specs if spec.num_program_calls is not None}
    assert idle_s is not None or not open_ones & complete
