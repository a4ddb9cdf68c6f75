"""The engine's loop with a worker driven by hand."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from typing import Any, cast

from vajra_py.config import PolicyChoice
from vajra_py.contract import Layer, SharedState
from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.executor import EngineExecutor
from vajra_py.engine.loop import EngineLoop
from vajra_py.engine.outputs import OutputBuffer, Submission
from vajra_py.engine.replica import EngineReplica, LoopOptions, Message
from vajra_py.engine.worker import Finished, Worker
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.queues import make_queue
from vajra_py.runtime.records.input_log import PolicyChange
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.runtime.serving.policy_binding import LayerPolicies
from vajra_py.testing import Harness
from vajra_py.testing.reference_policies import PlainChunks

REPLICA = ("harness", 0)


class Script:
    """A clock that hands the loop one message after the other and then tells it to stop; and a worker that only listens."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.steps: list[Any] = []
        self.tick = 0
        self.loop: EngineLoop | None = None

    def now(self) -> int:
        self.tick += 1000
        return self.tick

    def wait(self, inbox: SimpleQueue[Any], until: int) -> Any:
        if self.messages:
            return self.messages.popleft()
        assert self.loop is not None
        self.loop.stop()
        return inbox.get_nowait()

    def submit(self, step: Any) -> None:
        self.steps.append(step)


class BreaksOverB(PlainChunks):
    """Raises over the arrival of one request."""

    def on_arrivals(self, requests: Any, now: float) -> None:
        if requests[0].request_id == "b":
            raise LookupError("never heard of it")


class HeldPolicies:
    """As much of a replicaset's policies as being taken out of service needs; no other can be built."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.shared = SharedState()
        self.asks_listeners_each_step = False

    def new_queue(self) -> Any:
        return make_queue(self._harness.prioritizer)

    def layer(self, layer: Layer) -> LayerPolicies:
        return LayerPolicies((PolicyChoice(policy="this one"),), ())

    def make(self, layer: Layer, choice: PolicyChoice) -> Any:
        raise ConfigError(Problem("policy", "was asked for, and cannot be built"))


def submission(name: str) -> Submission:
    facts = RequestFacts(name, 4, 20)
    return Submission(facts, [1, 2, 3, 4], 0, OutputBuffer(SamplingParams(max_tokens=20), ()), shares=False)


def test_a_policy_change_does_not_wait_for_a_worker_that_is_lost() -> None:
    harness, script = Harness("fcfs", "round_robin", lambda context: BreaksOverB()), Script()
    harness.replicaset.policies = cast(Any, HeldPolicies(harness))
    one = EngineReplica(harness.replica(), EngineExecutor(8), cast(Worker, script))
    script.loop = loop = EngineLoop(
        harness.controller, {REPLICA: one}, script, LoopOptions(serves=True, isolates_policies=True)
    )
    answers: list[Any] = []
    loop.submit(submission("a"))
    loop.run()
    assert len(script.steps) == 1, "a is being computed"
    loop._stops = False  # as if it had not received the request
    loop.submit(submission("b"))
    change = PolicyChange("harness", Layer.REPLICA_SCHEDULER, PolicyChoice(policy="another"))
    loop.swap_policy(change, answers.append)
    script.messages.append(Finished(REPLICA, None, "its device is gone"))
    loop.run()
    assert one.is_lost
    assert [str(answer) for answer in answers] == [
        str(ConfigError(Problem("policy", "was asked for, and cannot be built")))
    ]
