"""Wake-ups: policies are asked again at the time that they name, and at no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vajra_py.config import PolicyChoice
from vajra_py.contract import ACCEPT, Layer, PolicyConfig, PolicySpec, SchedulerTraits, SteadyState, fill
from vajra_py.errors import PolicyError
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import PolicyChange
from vajra_py.runtime.serving import waking
from vajra_py.runtime.serving.alarms import MAX_WAKES_PER_TICK
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions, simulated
from vajra_py.testing.simulated import simulated_system
from vajra_py.workload.request import RequestSpec


def requests(*arrivals: float, num_output_tokens: int = 1) -> list[RequestSpec]:
    return [RequestSpec(f"r{index}", at, 10, num_output_tokens) for index, at in enumerate(arrivals)]


class BatchingWindow:
    """Waits a window after the first arrival, then takes everyone who came."""

    def __init__(self, context: Any, window_s: float = 0.05) -> None:
        self.window_s = window_s
        self.asked: list[float] = []

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        self.asked.append(now)
        oldest = min((one.arrived_at for one in replica.waiting()), default=now)
        if not replica.num_running and now < oldest + self.window_s:
            batch.idle_until(oldest + self.window_s)
            return
        fill(replica, batch, lambda request, batch, replica: batch.max_chunk(request))


def test_a_batching_window_is_idle_until_its_end_and_then_runs_everyone() -> None:
    harness = Harness("fcfs", "round_robin", BatchingWindow)
    steps = harness.run(requests(1.0, 1.02, 1.04, 1.2))
    assert [(step.formed_at, sorted(step.tokens)) for step in steps] == [
        (1.05, ["r0", "r1", "r2"]),
        (1.25, ["r3"]),
    ]
    scheduler = harness.replica_schedulers[0]
    assert scheduler.asked == [1.0, 1.02, 1.04, 1.05, 1.2, 1.25]


def test_a_batching_window_ends_in_a_system_whose_policies_can_be_replaced() -> None:
    made: list[BatchingWindow] = []

    def build(config: PolicyConfig, context: Any) -> BatchingWindow:
        made.append(BatchingWindow(context))
        return made[-1]

    spec = PolicySpec("window", Layer.REPLICA_SCHEDULER, PolicyConfig, build, "For this test.")
    controller, simulator = simulated_system(spec, {"replica_scheduler": "window"}, {})
    assert controller.replicasets["default"].policies is not None
    simulator.run(requests(1.0, 1.02))
    assert [one.asked for one in made] == [[1.0, 1.02, 1.05]]


@pytest.mark.parametrize("until", [1.0, 0.5, float("nan"), float("inf")])
def test_idle_until_a_time_that_is_not_finite_and_after_now_is_refused(until: float) -> None:
    class Backwards:
        def __init__(self, context: Any) -> None: ...

        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            batch.idle_until(until)

    with pytest.raises(PolicyError, match=r"^policy Backwards, .*is not a finite time after now"):
        Harness("fcfs", "round_robin", Backwards).run(requests(1.0))


def test_an_idle_replica_that_would_wait_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "MAX_FRUITLESS_WAKES", 100)

    class Sleepy:
        def __init__(self, context: Any) -> None: ...

        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            batch.idle_until(now + 1.0)

    with pytest.raises(PolicyError, match=r"Sleepy.*was woken 100 times in a row.*scheduled nothing"):
        Harness("fcfs", "round_robin", Sleepy).run(requests(1.0))


class Periodic:
    """FCFS that asks to be woken every 0.1 s."""

    key_motion = None

    def __init__(self, context: Any) -> None:
        from vajra_py.contract import KeyMotion

        self.key_motion = KeyMotion.STATIC
        self.wake = context.wake
        self.woken: list[tuple[str, float]] = []
        self.wake.at(0.0, "tick")

    def key(self, request: Any, now: float) -> float:
        return 0.0

    def on_wake(self, key: str, now: float) -> None:
        self.woken.append((key, now))
        self.wake.at(now + 0.1, key)


def test_periodic_wake_ups_come_on_time_and_end_with_the_last_request() -> None:
    harness = Harness(Periodic, "round_robin", "fixed_chunk")
    harness.run(requests(0.0, 0.35))
    assert harness.prioritizer.woken == [("tick", pytest.approx(0.1 * index)) for index in range(4)]


def test_an_admission_policy_is_woken_under_its_key() -> None:
    class Waits(Periodic):
        def admit(self, request: Any, replicasets: Any, now: float) -> Any:
            return ACCEPT

    harness = Harness("fcfs", "round_robin", "fixed_chunk", admission=Waits)
    harness.run(requests(0.0, 0.35))
    assert harness.admission.woken == [("tick", pytest.approx(0.1 * index)) for index in range(4)]


def test_asking_again_moves_a_wake_up_and_cancelling_takes_it_away() -> None:
    class Moves(Periodic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.wake.at(0.3, "tick")
            self.wake.at(0.2, "other")
            self.wake.at(0.25, "gone")
            self.wake.cancel("gone")
            self.wake.cancel("never asked for")

        def on_wake(self, key: str, now: float) -> None:
            self.woken.append((key, now))

    harness = Harness(Moves, "round_robin", "fixed_chunk")
    harness.run(requests(0.0, 1.0))
    assert harness.prioritizer.woken == [("other", 0.2), ("tick", 0.3)]


def test_a_policy_that_wakes_itself_without_end_at_one_time_is_named() -> None:
    class Endless(Periodic):
        def on_wake(self, key: str, now: float) -> None:
            self.wake.at(now, key)

    with pytest.raises(
        PolicyError, match=rf"Endless.*sets alarms for one time without end \({MAX_WAKES_PER_TICK} times\)"
    ):
        Harness(Endless, "round_robin", "fixed_chunk").run(requests(0.0))


@pytest.mark.parametrize(
    ("time_s", "key", "match"), [(float("inf"), "", "must be finite"), (1.0, 3, "must be a string")]
)
def test_a_wake_up_at_no_time_or_under_no_string_is_refused_with_the_policys_name(
    time_s: float, key: Any, match: str
) -> None:
    class Wrong(Periodic):
        def on_wake(self, _: str, now: float) -> None:
            self.wake.at(time_s, key)

    with pytest.raises(PolicyError, match=rf"Wrong.*{match}"):
        Harness(Wrong, "round_robin", "fixed_chunk").run(requests(0.0))


def test_a_policy_may_name_a_time_after_the_end_of_the_clock() -> None:
    class Late(BatchingWindow):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.wake.at(1e308)

        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            if replica.num_waiting < 2:
                batch.idle_until(1e308)  # at most until the second request arrives
                return
            super().schedule(replica, batch, now)

    steps = Harness("fcfs", "round_robin", Late).run(requests(1.0, 2.0))
    assert [step.formed_at for step in steps] == [2.0]


def test_endless_idling_is_blamed_on_the_policy_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(BatchingWindow):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            batch.idle_until(now + 1e-13)

    def spec(name: str, kind: Callable[[Any], Any]) -> PolicySpec:
        return PolicySpec(
            name, Layer.REPLICA_SCHEDULER, PolicyConfig, lambda _, context: kind(context), "For this test."
        )

    endless, window = spec("endless", Endless), spec("window", BatchingWindow)
    monkeypatch.setattr(simulated, "load_registry", lambda: load_registry().with_policies([endless]))
    _, simulator = simulated_system(window, {"replica_scheduler": "window"}, {})
    change = PolicyChange("default", Layer.REPLICA_SCHEDULER, PolicyChoice(policy="endless"))
    simulator.inject(to_ticks(2.0), Phase.POLICY, change)
    with pytest.raises(PolicyError, match=r"^policy endless, .*without end"):
        simulator.run(requests(1.0, 3.0))


def test_a_wake_up_ends_a_run_of_repeated_decodes_so_that_the_scheduler_is_asked() -> None:
    class Stops:
        """Repeats decodes, as it claims, until it is woken; from then on it idles for a second once."""

        traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}))

        def __init__(self, context: Any) -> None:
            context.wake.at(0.5)
            self.pause = False

        def on_wake(self, key: str, now: float) -> None:
            self.pause = True

        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            if self.pause:
                self.pause = False
                batch.idle_until(now + 1.0)
                return
            fill(replica, batch, lambda request, batch, replica: batch.max_chunk(request))

    ends = []
    for fast_forward in (True, False):
        harness = Harness("fcfs", "round_robin", Stops, HarnessOptions(num_blocks=1000, keeps_steps=False))
        simulator = harness.simulator(SimulationOptions(fast_forward=fast_forward, check_every_steps=1))
        simulator.run(requests(0.0, num_output_tokens=400))
        ends.append((harness.request("r0").ended_at, simulator.num_steps))
    assert ends[0] == ends[1]
    # one step of 10 tokens, 399 steps of one token, and one pause that begins with the step in flight at 0.5 s
    assert ends[0] == (pytest.approx(0.006 + 399 * 0.0051 + 1.0), 400)


def test_a_router_that_is_woken_offers_the_shared_queue_to_idle_replicas() -> None:
    class OpensAt:
        def __init__(self, context: Any) -> None:
            context.wake.at(2.0, "open")
            self.is_open = False

        def on_wake(self, key: str, now: float) -> None:
            self.is_open = True

        def assign(self, request: Any, replicas: Any, now: float) -> int | None:
            return None

        def pull(self, replica: Any, queued: Any, now: float) -> list[str]:
            return [one.request_id for one in queued] if self.is_open else []

    harness = Harness("fcfs", OpensAt, "fixed_chunk", HarnessOptions(num_replicas=2))
    steps = harness.run(requests(0.0, 0.1))
    assert [(step.formed_at, sorted(step.tokens)) for step in steps] == [(2.0, ["r0", "r1"])]
