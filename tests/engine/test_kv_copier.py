"""Copies between a worker's device and host memory run beside its steps, and no step overwrites what they read or write."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.engine.fake_runner import FakeRunner, expected_output
from vajra_py import AsyncLLM, SamplingParams
from vajra_py.engine import processes
from vajra_py.engine.compute import Chunk, NewRow, RunnerOptions, StepInput, StepOutput, TableUpdate
from vajra_py.engine.compute import SamplingParams as RowParams
from vajra_py.engine.kv_copier import KvCopier, written_blocks
from vajra_py.engine.kv_copy import KvMove
from vajra_py.engine.processes import ProcessWorker
from vajra_py.engine.requests import RequestOutput
from vajra_py.engine.worker import Finished, InlineWorker, KvMoved, ThreadWorker, Worker, WorkerNews
from vajra_py.errors import ExecutorError
from vajra_py.runtime.kv import BlockCopy, CopyDirection

KEY = ("default", 0)
OPTIONS = RunnerOptions(model="none", block_size=4)
ROW = NewRow(0, RowParams(temperature=0.0), 0)
PROMPT = [5, 6, 7, 8, 9]


def down(number: int, block: int, place: int) -> KvMove:
    return KvMove(number, [BlockCopy(block, place, CopyDirection.TO_HOST)])


def up(number: int, place: int, block: int, before: Sequence[BlockCopy] = ()) -> KvMove:
    return KvMove(number, [BlockCopy(place, block, CopyDirection.TO_DEVICE)], before)


def step(*blocks: int) -> StepInput:
    """The prompt of a new request, in these blocks."""
    return StepInput([Chunk(0, PROMPT, 0, True)], new=[ROW], tables=[TableUpdate(0, 0, blocks)])


class Gated(FakeRunner):
    """Copies of other threads wait at a gate, which somebody has to open for each of them; `log` has what was done, in order."""

    def __init__(self, options: RunnerOptions = OPTIONS) -> None:
        super().__init__(options)
        self.gate = threading.Semaphore(0)
        self._owner = threading.current_thread()
        self.log: list[Any] = []

    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        assert threading.current_thread() is self._owner or self.gate.acquire(timeout=30)
        super().move_kv(copies, after)
        self.log += [(one.source, one.target) for one in copies]

    def run(self, step: StepInput) -> StepOutput:
        output = super().run(step)
        self.log.append("step")
        return output


class Opens(threading.Condition):
    """A condition that calls something whenever one thread has to wait for it."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call
        self._thread = threading.current_thread()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        if threading.current_thread() is self._thread and not predicate():
            self._call()
        return super().wait_for(predicate, timeout)


class Bench:
    """A worker that computes in the test's thread, the runner under it, and what it delivers."""

    def __init__(self, call: Callable[[], object] | None = None) -> None:
        """`call`: called when a step has to wait, in place of opening the gate for one copy."""
        self.news: SimpleQueue[WorkerNews] = SimpleQueue()
        self.runner = Gated()
        self.worker = InlineWorker(KEY, self.runner)
        self.num_waits = 0
        self.worker._copier._changed = Opens(call or self._open)
        self.worker.start(8, 8, self.news.put)

    def _open(self) -> None:
        self.num_waits += 1
        self.runner.gate.release()

    def next(self) -> WorkerNews:
        return self.news.get(timeout=30)


def test_steps_do_not_wait_for_copies_of_other_blocks() -> None:
    bench = Bench()
    bench.worker.copy_kv(down(0, 0, 0))
    bench.worker.copy_kv(up(1, 1, 1))
    bench.worker.submit(step(2, 3))
    first = bench.next()
    assert isinstance(first, Finished)
    assert first.output is not None
    assert first.output.token_ids == expected_output(PROMPT, 1)
    assert bench.runner.log == ["step"]
    bench.runner.gate.release(2)
    assert {bench.next(), bench.next()} == {KvMoved(KEY, 0), KvMoved(KEY, 1)}
    bench.worker.close()
    assert bench.num_waits == 0


@pytest.mark.parametrize("move", [down(0, 3, 0), up(0, 0, 3)], ids=["stored", "no_longer_loaded"])
def test_a_step_waits_for_the_copy_whose_block_it_overwrites(move: KvMove) -> None:
    bench = Bench()
    bench.worker.copy_kv(move)
    bench.worker.submit(step(2, 3))
    assert bench.runner.log == [(move.copies[0].source, move.copies[0].target), "step"]
    news = [bench.next(), bench.next()]
    assert KvMoved(KEY, 0) in news
    bench.worker.close()
    assert bench.num_waits == 1


def test_swapped_content_does_not_come_back_to_a_block_that_is_being_copied() -> None:
    bench = Bench()
    back = BlockCopy(7, 3, CopyDirection.TO_DEVICE)
    bench.worker.copy_kv(down(0, 3, 0))
    bench.worker.submit(StepInput(copies=[back]))
    bench.worker.copy_kv(down(1, 3, 1))
    bench.worker.copy_kv(up(2, 5, 5, [back]))
    assert bench.runner.log == [(3, 0), "step", (3, 1), (7, 3)]
    bench.runner.gate.release()
    bench.worker.close()
    assert bench.num_waits == 2


def test_a_copy_follows_the_steps_that_came_before_it_and_no_others() -> None:
    marks: list[object] = []

    class Notes(FakeRunner):
        def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
            marks.append(after)
            super().move_kv(copies, after)

    worker, news = InlineWorker(KEY, Notes(OPTIONS)), SimpleQueue[WorkerNews]()
    worker.start(8, 8, news.put)
    worker.submit(step(2, 3))
    worker.copy_kv(up(0, 0, 1, [BlockCopy(1, 1, CopyDirection.TO_HOST)]))
    worker.submit(StepInput(decodes=[0]))
    worker.copy_kv(down(1, 1, 0))
    for _ in range(4):
        news.get(timeout=30)
    worker.close()
    assert marks == [None, 1, 2]  # swaps of a step are executed in order


def test_content_that_is_found_may_be_read_while_it_is_copied() -> None:
    tables = [TableUpdate(0, 0, [1, 2, 3]), TableUpdate(1, 2, [4, 5]), TableUpdate(2, 1, [6])]
    copies = [BlockCopy(0, 7, CopyDirection.TO_DEVICE), BlockCopy(8, 0, CopyDirection.TO_HOST)]
    found = StepInput([Chunk(0, [1], 9, True), Chunk(1, [1], 4, True)], [2], tables=tables, copies=copies)
    assert list(written_blocks(found, 4)) == [3, 4, 5, 6, 7]


def test_a_copy_to_the_device_waits_for_the_one_that_reads_its_block() -> None:
    may_read = threading.Event()

    class Reads(FakeRunner):
        def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
            if copies[0].direction is CopyDirection.TO_HOST:
                assert may_read.wait(30)
            super().move_kv(copies, after)

    class Waits(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            if worker._copier._up.moves and not predicate():
                may_read.set()
            return super().wait_for(predicate, timeout)

    worker, news = InlineWorker(KEY, Reads(OPTIONS)), SimpleQueue[WorkerNews]()
    worker._copier._changed = Waits()
    worker.start(8, 8, news.put)
    worker.copy_kv(down(0, 3, 0))
    worker.copy_kv(up(1, 1, 3))
    assert news.get(timeout=30) == KvMoved(KEY, 0)
    assert news.get(timeout=30) == KvMoved(KEY, 1)
    worker.close()


def test_a_copy_comes_after_decodes_that_were_begun_ahead() -> None:
    bench = Bench()
    bench.runner.begin_ahead = lambda: bench.runner.log.append("ahead")  # type: ignore[method-assign]
    bench.runner.gate.release()
    bench.worker.copy_kv(up(0, 0, 0))
    assert bench.next() == KvMoved(KEY, 0)
    assert bench.runner.log == ["ahead", (0, 0)]
    bench.worker.close()


def test_after_a_copy_that_failed_steps_fail_and_no_copy_is_begun() -> None:
    began, may_fail, may_end = threading.Event(), threading.Event(), threading.Event()
    made: list[Sequence[BlockCopy]] = []

    class Fails(FakeRunner):
        def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
            made.append(copies)
            if copies[0].direction is CopyDirection.TO_HOST:
                assert may_fail.wait(30)
                raise ExecutorError("KV copy: out of memory")
            began.set()
            assert may_end.wait(30)

    def failed(why: str) -> Finished:
        return Finished(KEY, None, why)

    worker, news = InlineWorker(KEY, Fails(OPTIONS)), SimpleQueue[WorkerNews]()
    worker.start(8, 8, news.put)
    worker.copy_kv(up(0, 0, 0))
    assert began.wait(30)
    for number in (1, 2):
        worker.copy_kv(down(number, number, number))
    may_fail.set()
    assert news.get(timeout=30) == failed("KV copy: out of memory")
    may_end.set()
    assert news.get(timeout=30) == KvMoved(KEY, 0)  # it had begun
    worker.submit(step(4, 5))
    worker.copy_kv(up(3, 0, 0))
    for _ in range(2):
        assert news.get(timeout=30) == failed("a copy of KV failed before (KV copy: out of memory)")
    worker.close()
    assert len(made) == 2
    assert news.empty()


def test_a_step_that_waits_for_a_copy_ends_with_the_worker() -> None:
    closing: list[threading.Thread] = []

    def close() -> None:
        closing.append(threading.Thread(target=bench.worker.close))
        closing[0].start()

    bench = Bench(close)
    bench.worker.copy_kv(down(0, 2, 0))
    bench.worker.submit(step(2, 3))
    ended = bench.next()
    bench.runner.gate.release()
    closing[0].join(30)
    assert ended == Finished(KEY, None, "the worker has been closed")


@pytest.mark.parametrize("how", ["close", "discard"])
def test_a_worker_ends_with_the_copy_that_is_being_made(how: str) -> None:
    began = threading.Event()

    class Slow(Gated):
        def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
            began.set()
            super().move_kv(copies, after)

    class Closing(threading.Condition):
        def notify_all(self) -> None:
            super().notify_all()
            if began.is_set():
                runner.gate.release(2)

    runner, news = Slow(), SimpleQueue[WorkerNews]()
    worker = InlineWorker(KEY, runner)
    worker._copier._changed = Closing()
    worker.start(8, 8, news.put)
    for number in range(2):
        worker.copy_kv(down(number, number, number))
        if not number:
            assert began.wait(30)
            began.clear()
    began.set()
    getattr(worker, how)()
    assert runner.log == [(0, 0)]  # the other one was not begun
    with pytest.raises(ExecutorError, match="the worker has been closed"):
        worker._copier.begin(down(2, 2, 2))


def test_a_copy_that_does_not_end_keeps_what_it_uses() -> None:
    runner = Gated()
    copier = KvCopier(runner, lambda move, error: None)
    runner.allocate(4, 4)
    copier.begin(down(0, 0, 0))
    with pytest.raises(ExecutorError, match="does not return from a copy"):
        copier.close(0.0)
    runner.gate.release()
    copier.close()


# Threads and processes


class CopiesBesideSteps(FakeRunner):
    """A runner whose copies end once a later step has been computed."""

    def __init__(self, options: RunnerOptions) -> None:
        super().__init__(options)
        self._has_run = threading.Event()

    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        if not self._has_run.wait(30):
            raise ExecutorError("no step was computed meanwhile")
        super().move_kv(copies, after)

    def run(self, step: StepInput) -> StepOutput:
        output = super().run(step)
        self._has_run.set()
        return output


class FailsCopying(FakeRunner):
    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        raise ExecutorError("step: out of memory on host")


class CopiesForEver(FakeRunner):
    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        threading.Event().wait()


def on_threads(load: Callable[[RunnerOptions], FakeRunner]) -> Worker:
    return ThreadWorker(KEY, load(OPTIONS))


def on_processes(load: Callable[[RunnerOptions], FakeRunner]) -> Worker:
    return ProcessWorker(KEY, OPTIONS, 0, load)


@contextmanager
def at_work(
    place: Callable[[Callable[[RunnerOptions], FakeRunner]], Worker], load: Callable[[RunnerOptions], FakeRunner]
) -> Iterator[tuple[Worker, SimpleQueue[WorkerNews]]]:
    """A worker that has begun, and what it delivers."""
    news: SimpleQueue[WorkerNews] = SimpleQueue()
    worker = place(load)
    try:
        worker.wait_loaded()
        worker.start(8, 8, news.put)
        yield worker, news
    finally:
        worker.close()


@pytest.mark.parametrize("place", [on_threads, on_processes])
def test_a_slow_copy_holds_up_no_step(
    place: Callable[[Callable[[RunnerOptions], FakeRunner]], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the process finds this module
    with at_work(place, CopiesBesideSteps) as (worker, news):
        worker.copy_kv(down(4, 0, 0))
        worker.submit(step(2, 3))
        got = [news.get(timeout=30), news.get(timeout=30)]
    assert KvMoved(KEY, 4) in got
    (finished,) = (one for one in got if isinstance(one, Finished))
    assert finished.output is not None
    assert finished.output.token_ids == expected_output(PROMPT, 1)


@pytest.mark.parametrize("place", [on_threads, on_processes])
def test_a_copy_that_fails_loses_its_worker(
    place: Callable[[Callable[[RunnerOptions], FakeRunner]], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    with at_work(place, FailsCopying) as (worker, news):
        worker.copy_kv(down(4, 0, 0))
        assert news.get(timeout=30) == Finished(KEY, None, "step: out of memory on host")


def test_a_process_ends_though_a_copy_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.setattr(processes, "_CLOSE_S", 0.2)  # of this process: the other one is killed first
    news: SimpleQueue[WorkerNews] = SimpleQueue()
    worker = ProcessWorker(KEY, OPTIONS, 0, CopiesForEver)
    worker.wait_loaded()
    worker.start(8, 8, news.put)
    (process,) = worker._processes
    pid = process.pid
    worker.copy_kv(down(0, 0, 0))
    worker.submit(step(2, 3))
    assert isinstance(news.get(timeout=30), Finished)
    worker.close()
    assert not Path(f"/proc/{pid}").exists()
    assert news.empty()


# Under an engine

SIZES: dict[str, Any] = {
    "replica": {
        "max_model_len": 200,
        "memory": {
            "block_size": 8,
            "num_blocks": 30,
            "tiers": [{"name": "host", "num_blocks": 60, "bandwidth_gb_s": 1.0}],
        },
    },
    "backend": {"engine": {"random_weights": True}},
}


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[number] * 80 for number in range(1, 8)]


class Loads:
    """Loads of an engine's runner, which wait at a gate."""

    def __init__(self) -> None:
        self.began, self.gate = began, gate = threading.Event(), threading.Event()

        class SlowLoads(FakeRunner):
            def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
                if copies[0].direction is CopyDirection.TO_DEVICE:
                    began.set()
                    assert gate.wait(30)
                super().move_kv(copies, after)

        self.runner = SlowLoads

    async def begin(self, llm: AsyncLLM) -> asyncio.Task[RequestOutput]:
        """Return a request whose load has begun."""
        for prompt in PROMPTS[:4]:
            assert (await llm.generate(prompt, GREEDY)).token_ids == expected_output(prompt, 12)
        task = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
        assert await asyncio.to_thread(self.began.wait, 30)
        return task


def test_a_request_waits_for_its_load_and_others_go_on(hollow_model: Path) -> None:
    loads = Loads()

    async def main() -> None:
        async with AsyncLLM(hollow_model, SIZES, load=loads.runner) as llm:
            loaded = await loads.begin(llm)
            for prompt in PROMPTS[4:]:  # they take blocks whose content is stored meanwhile
                assert (await llm.generate(prompt, GREEDY)).token_ids == expected_output(prompt, 12)
            assert not loaded.done()
            loads.gate.set()
            output = await loaded
            assert output.token_ids == expected_output(PROMPTS[0], 12)
            assert output.metrics.num_cached_tokens == 72

    asyncio.run(main())


def test_blocks_of_a_load_that_was_called_off_are_used_when_it_has_ended(hollow_model: Path) -> None:
    loads = Loads()

    async def main() -> None:
        async with AsyncLLM(hollow_model, SIZES, load=loads.runner) as llm:
            loading = await loads.begin(llm)
            loading.cancel()
            others = [asyncio.create_task(llm.generate(prompt, GREEDY)) for prompt in PROMPTS[4:]]
            await asyncio.sleep(0)  # they are sent
            loads.gate.set()
            for prompt, other in zip(PROMPTS[4:], others, strict=True):
                assert (await other).token_ids == expected_output(prompt, 12)
            assert (await llm.generate(PROMPTS[0], GREEDY)).token_ids == expected_output(PROMPTS[0], 12)

    asyncio.run(main())


def test_an_engine_ends_with_copies_under_way(hollow_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, close = Loads(), KvCopier.close

    def open_and_close(copier: KvCopier, timeout_s: float | None = None) -> None:
        loads.gate.set()
        close(copier, timeout_s)

    monkeypatch.setattr(KvCopier, "close", open_and_close)

    async def main() -> None:
        async with AsyncLLM(hollow_model, SIZES, load=loads.runner) as llm:
            loading = await loads.begin(llm)
        with pytest.raises(ExecutorError):
            await loading

    asyncio.run(main())
    assert not [one for one in threading.enumerate() if one.name.startswith("vajra-copies")]
