"""The end of a replica's processes."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.engine.fake_runner import FakeRunner
from vajra_py.engine.compute import Chunk, LookaheadStep, NewRow, RunnerOptions, SamplingParams, StepInput, TableUpdate
from vajra_py.engine.processes import ProcessWorker
from vajra_py.engine.worker import Finished, LeftFirstStage
from vajra_py.errors import ExecutorError


class CannotBegin(FakeRunner):
    """Computes what it is told, and nothing before."""

    def begin_ahead(self) -> None:
        """See `LookaheadRunner`."""
        raise ExecutorError("step: out of memory")


def test_a_step_comes_back_before_the_next_one_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the process finds this module
    worker = ProcessWorker(("default", 0), RunnerOptions(model="none"), 0, CannotBegin)
    news: SimpleQueue[Finished | LeftFirstStage] = SimpleQueue()
    try:
        worker.wait_loaded()
        worker.start(4, 0, news.put)
        new, table = NewRow(0, SamplingParams(temperature=0.0), 0), TableUpdate(0, 0, [0])
        worker.submit(LookaheadStep(StepInput([Chunk(0, [5, 6], 0, True)], new=[new], tables=[table])))
        first, second = news.get(timeout=30), news.get(timeout=30)
    finally:
        worker.close()
    assert isinstance(first, Finished)
    assert first.output is not None
    assert first.output.slots == [0]
    assert second == Finished(("default", 0), None, "step: out of memory")


def test_a_worker_may_be_closed_and_discarded_at_once() -> None:
    """As when an engine ends while somebody replaces a worker that it lost."""
    worker = ProcessWorker(("default", 0), RunnerOptions(model="none"), 0, FakeRunner)
    worker.wait_loaded()
    starts, errors = threading.Barrier(4), []

    def end(how: str) -> None:
        starts.wait()
        try:
            getattr(worker, how)()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=end, args=(how,)) for how in ("close", "discard") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
