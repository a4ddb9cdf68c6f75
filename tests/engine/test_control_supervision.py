"""Lost replicas are started again after growing pauses, are given up when starts fail, and end side by side."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.engine.fake_runner import FakeRunner, expected_output
from vajra_py import LLM, AsyncLLM, SamplingParams
from vajra_py.engine.compute import RunnerOptions, StepInput, StepOutput
from vajra_py.engine.compute.model.exclusion import LOADING
from vajra_py.engine.step_watch import StepWatch
from vajra_py.engine.supervision import GivenUp, Outcome, Restarted, RestartLimits, Supervisor
from vajra_py.engine.worker import ReplicaKey, close_all
from vajra_py.errors import ExecutorError

KEY = ("default", 0)


class FakeWorker:
    """Nothing to compute with; `discard` fails `num_stuck` times."""

    def __init__(self, num_stuck: int = 0) -> None:
        self._num_stuck = num_stuck

    def discard(self) -> None:
        self._num_stuck -= 1
        if self._num_stuck >= 0:
            raise ExecutorError("its thread does not return")


class Trial:
    """A supervisor under a clock of its own; loads fail while `fails` is set."""

    def __init__(self, max_restarts: int) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.fails = False
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()
        limits = RestartLimits(max_restarts, 0.5, 60.0)
        self.supervisor = Supervisor(
            limits, self._begin, lambda *_: None, self.outcomes.put, self._pause, lambda: self.now_s
        )

    def _begin(self, replica: ReplicaKey) -> Any:
        if self.fails:
            raise ExecutorError("no device")
        return FakeWorker()

    def _pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now_s += seconds
        return False

    def lose(self, *, has_computed: bool, after_s: float = 0.0, num_stuck: int = 0) -> Outcome | None:
        self.now_s += after_s
        worker: Any = FakeWorker(num_stuck)
        comes_back = self.supervisor.lost(KEY, worker, has_computed=has_computed)
        return self.outcomes.get(timeout=30) if comes_back else None


def test_a_replica_that_computes_is_started_again_however_often_it_is_lost() -> None:
    trial = Trial(max_restarts=3)
    for _ in range(40):
        assert isinstance(trial.lose(has_computed=True, after_s=1.0), Restarted)
    assert trial.pauses[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert set(trial.pauses[7:]) == {30.0}
    assert isinstance(trial.lose(has_computed=True, after_s=61.0), Restarted)
    assert trial.pauses[-1] == 0.5, "it was up for long: pauses begin anew"


def test_starts_that_fail_in_a_row_give_the_replica_up() -> None:
    trial = Trial(max_restarts=3)
    trial.fails = True
    outcome = trial.lose(has_computed=True)
    assert isinstance(outcome, GivenUp)
    assert outcome.why == "3 starts in a row failed; the last: no device"
    assert trial.pauses == [0.5, 1.0, 2.0]


def test_a_replica_that_is_lost_in_its_first_step_again_and_again_is_given_up() -> None:
    trial = Trial(max_restarts=3)
    assert isinstance(trial.lose(has_computed=True), Restarted)
    assert [type(trial.lose(has_computed=False)) for _ in range(3)] == [Restarted, Restarted, type(None)]
    trial = Trial(max_restarts=3)
    for has_computed in (
        True,
        False,
        False,
        True,
        False,
        False,
    ):  # one that computes a step in between fills the count up again
        assert isinstance(trial.lose(has_computed=has_computed), Restarted)


def test_a_replica_whose_worker_does_not_end_is_not_loaded_beside_it() -> None:
    trial = Trial(max_restarts=3)
    assert isinstance(trial.lose(has_computed=True, num_stuck=3), Restarted)
    assert trial.pauses == [0.5, 1.0, 2.0], "two starts failed until the worker had ended"
    outcome = trial.lose(has_computed=True, num_stuck=9)
    assert isinstance(outcome, GivenUp)
    assert outcome.why == "3 starts in a row failed; the last: its thread does not return"


class Closing:
    """A worker whose end waits until every other one was asked to end, too."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def close(self) -> None:
        self._barrier.wait(30)


def test_workers_end_side_by_side() -> None:
    barrier = threading.Barrier(5)
    workers: list[Any] = [Closing(barrier) for _ in range(4)]
    closing = threading.Thread(target=close_all, args=(workers,))
    closing.start()
    barrier.wait(30)
    closing.join(30)
    assert not closing.is_alive()
    assert not barrier.broken


class Broken(FakeRunner):
    """Computes a few steps in its first life, and none after."""

    lives = 0

    def __init__(self, options: RunnerOptions) -> None:
        super().__init__(options)
        type(self).lives += 1
        if type(self).lives > 1:
            raise ExecutorError("no such device any more")

    def run(self, step: StepInput) -> StepOutput:
        output = super().run(step)
        if self._num_steps > 3:
            raise ExecutorError("the device fell off the bus")
        return output


def test_an_engine_that_failed_for_good_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(Broken, "lives", 0)
    recovery = {"backoff_s": 0.0, "max_restarts": 2}
    config = {
        "replica": {"max_model_len": 200, "memory": {"block_size": 8, "num_blocks": 60}},
        "backend": {"engine": {"random_weights": True, "recovery": recovery}},
    }

    async def serve() -> None:
        async with AsyncLLM(tmp_path, config, load=Broken) as llm:
            assert llm.failed is None
            output = await llm.generate([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
            assert output.finish_reason == "failed"
            assert "2 starts in a row failed; the last: no such device any more" in output.detail
            assert llm.failed is not None
            assert "no such device any more" in llm.failed
            with pytest.raises(ExecutorError, match="no replica is left"):
                await llm.generate([1, 2, 3])

    asyncio.run(serve())


def test_a_worker_that_starts_again_after_the_last_request_is_closed(tmp_path: Path) -> None:
    class Late(FakeRunner):
        """One of two fails, and starts again only when `may_start` is set."""

        def __init__(self, options: RunnerOptions) -> None:
            super().__init__(options)
            self.is_first = not made
            if len(made) == 2:
                may_start.wait(30)
            made.append(self)
            opened.add(self)

        def run(self, step: StepInput) -> StepOutput:
            if self.is_first:
                raise ExecutorError("the device fell off the bus")
            return super().run(step)

        def close(self) -> None:
            opened.discard(self)

    made: list[FakeRunner] = []
    opened: set[FakeRunner] = set()
    may_start = threading.Event()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {
        "num_replicas": 2,
        "replica": {"max_model_len": 200, "memory": {"block_size": 8, "num_blocks": 60}},
        "backend": {"engine": {"random_weights": True, "recovery": {"backoff_s": 0.0, "max_restarts": 2}}},
    }
    with LLM(tmp_path, config, load=Late) as llm:
        outputs = llm.generate([[1], [2]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert sorted(output.finish_reason for output in outputs) == ["failed", "length"]
        may_start.set()
        assert llm.engine is not None
        restarter = llm.engine.restarter
        assert isinstance(restarter, Supervisor)
        for thread in restarter._threads.values():
            thread.join(30)
    assert len(made) == 3
    assert not opened


class Sharing(FakeRunner):
    """Computes no step while a model is loaded, as the real runner; `at_step` is called within each step."""

    def __init__(self, options: RunnerOptions, at_step: Callable[[int], None]) -> None:
        super().__init__(options)
        self._at_step = at_step

    def run(self, step: StepInput) -> StepOutput:
        with LOADING.shared():
            self._at_step(self._num_steps)
            return super().run(step)


def two_replicas(tmp_path: Path, max_restarts: int) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    recovery = {"backoff_s": 0.0, "max_restarts": max_restarts, "max_reruns": 3, "step_timeout_s": 1.0}
    return {
        "num_replicas": 2,
        "replica": {"max_model_len": 200, "memory": {"block_size": 8, "num_blocks": 60}},
        "backend": {"engine": {"random_weights": True, "recovery": recovery}},
    }


PROMPTS = [[number, 2, 3] for number in range(4)]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


def test_a_step_that_waits_while_another_replica_is_loaded_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeRunner] = []
    loads, was_watched = threading.Event(), threading.Event()
    num_looks = 0
    is_late = StepWatch._is_late

    def look(watch: StepWatch, timer: Any, passed_s: float) -> bool:
        nonlocal num_looks
        num_looks += loads.is_set() and timer.replica == ("default", 1)
        if num_looks > 8:  # by then, a step that counted its waiting would have taken too long
            was_watched.set()
        return is_late(watch, timer, passed_s)

    def fail(num_steps: int) -> None:
        if num_steps == 3:
            raise ExecutorError("the device fell off the bus")

    class Waiting(Sharing):
        """Begins a step only when the other replica is being loaded."""

        def run(self, step: StepInput) -> StepOutput:
            if self._num_steps == 3:
                loads.wait(30)
            return super().run(step)

    def load(options: RunnerOptions) -> FakeRunner:
        if len(made) == 2:
            with LOADING.exclusively():
                loads.set()
                was_watched.wait(30)
        kind = Waiting if len(made) == 1 else Sharing
        made.append(kind(options, (lambda num_steps: None) if made else fail))
        return made[-1]

    monkeypatch.setattr(StepWatch, "_is_late", look)
    with LLM(tmp_path, two_replicas(tmp_path, max_restarts=2), load=load) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [expected_output(prompt, 20) for prompt in PROMPTS]
    assert len(made) == 3, "the other replica was lost, too"


def test_a_replica_whose_thread_hangs_is_given_up_and_the_other_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeRunner] = []
    may_end = threading.Event()

    def hang(num_steps: int) -> None:
        if num_steps == 3:
            may_end.wait(120)

    def load(options: RunnerOptions) -> FakeRunner:
        with LOADING.exclusively():
            made.append(Sharing(options, (lambda num_steps: None) if made else hang))
        return made[-1]

    def does_end(call: Callable[[], None]) -> bool:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(30)
        return not thread.is_alive()

    def load_another() -> None:
        with LOADING.exclusively():
            pass

    async def serve(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))
        assert [output.token_ids for output in outputs] == [expected_output(prompt, 20) for prompt in PROMPTS]

    monkeypatch.setattr("vajra_py.engine.worker._END_S", 0.1, raising=False)
    llm = AsyncLLM(tmp_path, two_replicas(tmp_path, max_restarts=2), load=load)
    try:
        asyncio.run(serve(llm))
        restarter: Any = llm.engine.restarter if llm.engine is not None else None
        assert does_end(restarter._threads["default", 0].join), "it is started again for ever"
        assert does_end(load_another), "no model can be loaded any more"
        asyncio.run(serve(llm))
        assert len(made) == 2
        assert does_end(llm.close)
    finally:
        may_end.set()
