"""Who takes a request in, where every request went, and whether the books agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from vajra_py.contract import EndedStep
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import PolicyError
from vajra_py.runtime.requests.listeners import listeners_among
from vajra_py.runtime.requests.request import RequestFacts, RequestState
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.step.plan import StepResult
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks, Shared

OPTIONS = HarnessOptions(block_size=4, num_blocks=20, max_batch_size=4)


class Diary(Observer):
    """What an observer was told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    def on_arrival(self, request: Any, now: float) -> None:
        self.events.append(("arrival", request.request_id))

    def on_assigned(self, request: Any, replica_id: int | None, now: float) -> None:
        self.events.append(("assigned", request.request_id, str(replica_id)))

    def on_admitted(self, request: Any, replica_id: int, now: float) -> None:
        self.events.append(("admitted", request.request_id, str(replica_id)))

    def on_first_token(self, request: Any, now: float) -> None:
        self.events.append(("first token", request.request_id))

    def on_ended(self, request: Any, reason: EndReason, detail: str, now: float) -> None:
        self.events.append((reason.value, request.request_id))


def harness(prioritizer: Any = None, chooser: Any = None, options: HarnessOptions = OPTIONS) -> Harness:
    return Harness(prioritizer or ByArrival(), chooser or InTurn(), lambda context: PlainChunks(), options)


def test_observers_see_a_life_from_arrival_to_end() -> None:
    bench, diary = harness(chooser=Shared()), Diary()
    bench.controller.watch((diary,))
    bench.submit("a", 4, 2)
    bench.submit("too long", 500, max_tokens=1)
    for _ in range(2):
        plan = bench.replica().next_plan(0)
        assert plan is not None
        bench.controller.settle(bench.replica().complete_step(plan, StepResult(), 5), 5)
    assert diary.events == [
        ("arrival", "a"),
        ("assigned", "a", "None"),
        ("arrival", "too long"),
        ("rejected", "too long"),
        ("admitted", "a", "0"),
        ("first token", "a"),
        ("stop", "a"),
    ]


def test_every_request_is_counted_once() -> None:
    bench = harness(options=replace(OPTIONS, max_batch_size=1))
    bench.submit("served", 4, 1)
    bench.submit("waiting", 4, 1)
    bench.submit("taken back", 4, 1)
    bench.submit("too long", 500, max_tokens=1)
    controller = bench.controller
    assert controller.abort("taken back", EndReason.ABORTED, 0)
    assert not controller.abort("taken back", EndReason.ABORTED, 0), "it has ended already"
    assert not controller.abort("nobody", EndReason.ABORTED, 0)
    bench.step()
    assert (controller.num_submitted, controller.num_alive) == (4, 1)
    assert controller.num_ended == {EndReason.STOP: 1, EndReason.ABORTED: 1, EndReason.REJECTED: 1}
    assert [request.request_id for request in controller.alive()] == ["waiting"]
    controller.check_conservation()


def test_two_requests_of_one_name_cannot_live_at_once() -> None:
    bench = harness()
    first = bench.submit("a", 4, 1)
    second = bench.submit("a", 4, 1)
    assert (first.state, second.state) == (RequestState.WAITING, RequestState.ENDED)
    assert second.detail == "another request with this id is being served"
    bench.step()
    assert bench.submit("a", 4, 1).state is RequestState.WAITING, "the name is free again"


def test_requests_go_where_the_selector_says() -> None:
    short, long = harness(), harness()
    short.replicaset.name, long.replicaset.name = "short", "long"
    controller = Controller(
        {"short": short.replicaset, "long": long.replicaset},
        lambda facts: "long" if facts.num_prompt_tokens > 10 else "short",
    )
    names = []
    for name, size in (("a", 4), ("b", 30), ("c", 9)):
        facts = RequestFacts(name, size)
        replicaset = controller.replicaset_for(facts)
        request, replica = controller.submit(facts, replicaset, lambda block_size: None, 0)
        assert replica is replicaset.replicas[0]
        assert controller.replica_of(request) is replica
        names.append(request.replicaset)
    assert names == ["short", "long", "short"]
    assert [len(one.queue) for one in controller.replicas()] == [2, 1]
    controller.check_conservation()


@pytest.mark.parametrize("lose", ["request", "state", "block"])
def test_lost_things_are_noticed(lose: str) -> None:
    bench = harness()
    a = bench.submit("a", 8, 5)
    bench.step()
    bench.controller.check_conservation()
    if lose == "request":
        bench.replica().running_set.pool.leave(a)
    elif lose == "state":
        a.state = RequestState.PREEMPTED
    else:
        bench.replica().memory.block_table(a).pop()  # type: ignore[attr-defined]
    with pytest.raises((RuntimeError, AssertionError)):
        bench.controller.check_conservation()


class Listening(ByArrival):
    """A prioritizer that is told about requests."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[str], float]] = []
        self.steps: list[EndedStep] = []

    def on_arrivals(self, requests: Sequence[Any], now: float) -> None:
        self.told.append(("arrivals", [one.request_id for one in requests], now))

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self.told.append(("admission", [f"{request.request_id}@{replica_id}"], now))

    def on_preemption(self, request: Any, replica_id: int, now: float) -> None:
        self.told.append(("preemption", [f"{request.request_id}@{replica_id}"], now))

    def on_step_end(self, step: EndedStep) -> None:
        self.steps.append(step)
        names = [f"{one.request_id}:{one.num_output_tokens}" for one in step.requests]
        self.told.append(("step", names, step.ended_at))

    def on_departures(self, requests: Sequence[Any], now: float) -> None:
        self.told.append(("departures", [one.request_id for one in requests], now))


def test_listening_policies_hear_of_arrivals_steps_and_departures() -> None:
    listening = Listening()
    bench = harness(listening)
    bench.submit("a", 4, 2)
    bench.submit("b", 4, 1)
    bench.submit("c", 4, 1)
    assert bench.controller.abort("c", EndReason.ABORTED, 0)
    bench.step()
    bench.step()
    kinds = [(kind, names) for kind, names, _ in listening.told]
    assert kinds == [
        ("arrivals", ["a"]),
        ("arrivals", ["b"]),
        ("arrivals", ["c"]),
        ("departures", ["c"]),
        ("admission", ["a@0"]),
        ("admission", ["b@0"]),
        ("step", ["a:1", "b:1"]),
        ("departures", ["b"]),
        ("step", ["a:2"]),
        ("departures", ["a"]),
    ]
    times = [now for _, _, now in listening.told]
    assert times == sorted(times)
    first = listening.steps[0]
    assert (first.replica_id, first.step_index, list(first.num_tokens)) == (0, 0, [4, 4])
    assert first.duration_s == first.ended_at - first.formed_at > 0


def test_a_listener_hears_who_gives_way() -> None:
    listening = Listening()
    bench = Harness(listening, InTurn(), PlainChunks(), HarnessOptions(num_blocks=2, block_size=4))
    bench.submit("a", 4, 4)
    bench.submit("b", 3, 4)
    bench.steps_until_idle()
    kinds = [(kind, names) for kind, names, _ in listening.told if kind in ("admission", "preemption")]
    assert kinds == [
        ("admission", ["a@0"]),
        ("admission", ["b@0"]),
        ("preemption", ["b@0"]),
        ("admission", ["b@0"]),
    ]


@pytest.mark.parametrize("hook", ["on_arrivals", "on_admission", "on_step_end", "on_departures"])
def test_one_listening_method_is_enough_to_be_told(hook: str) -> None:
    told: list[str] = []
    kind = type("OnlyOne", (ByArrival,), {hook: lambda self, *facts: told.append(hook)})
    bench = harness(kind())
    bench.submit("a", 4, 1)
    bench.step()
    assert told == [hook]


def test_a_listener_that_fails_is_named() -> None:
    class Forgetful(Listening):
        def on_departures(self, requests: Sequence[Any], now: float) -> None:
            raise LookupError("who?")

    bench = harness()
    bench.replicaset.listeners = listeners_among([(Forgetful(), "forgetful")])
    bench.submit("a", 4, 1)
    with pytest.raises(PolicyError, match=r"policy forgetful, request a: LookupError: who\?"):
        bench.step()


def test_observers_that_watch_no_longer_hear_nothing_and_the_others_go_on() -> None:
    class Hears(Observer):
        def __init__(self) -> None:
            self.ended: list[str] = []

        def on_ended(self, request: Any, reason: Any, detail: str, now: float) -> None:
            self.ended.append(request.request_id)

    bench, leaves, stays = Harness("fcfs", "round_robin", "fixed_chunk"), Hears(), Hears()
    bench.controller.watch((leaves, stays, *bench.controller._observers))
    for name in ("a", "b"):
        bench.submit(name, 4, 2)
        bench.steps_until_idle()
        bench.controller.unwatch((leaves,))
    assert (leaves.ended, stays.ended) == (["a"], ["a", "b"])
