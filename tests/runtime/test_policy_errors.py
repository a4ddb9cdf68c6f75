"""A policy's mistake is named with its file and line, wherever it comes up."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import fill
from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks, Shared
from vajra_py.workload import RequestSpec

HERE = str(Path(__file__).relative_to(Path.cwd()))


class Counting(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return {}[""]  # key


class Told(ByArrival):
    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        raise LookupError(request.tenant)  # on_admission


class Routing(InTurn):
    def assign(self, request: Any, replicas: Any, now: float) -> int:
        return replicas[7].replica_id  # assign


class Pulling(Shared):
    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        yield [request.request_id for request in queued][7]  # pull


class Scheduling(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        self._share(replica)

    def _share(self, replica: Any) -> None:
        return {}[""]  # _share


class Filling(PlainChunks):
    """Fails in what the shared fill loop calls."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        fill(replica, batch, self._rule)

    def _rule(self, request: Any, batch: Any, replica: Any) -> int:
        return int(np.concatenate([]))  # _rule


class Asking(PlainChunks):
    """Asks the builder for what makes no sense."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        batch.add(next(replica.waiting()), 0)  # schedule


class Refusing(PlainChunks):
    def refuses(self, request: Any, replica: Any, now: float) -> str:
        return request.metadata["adapter"]  # refuses


def line_of(policy: Any, method: str) -> str:
    """The line that is marked by a comment with the method's name."""
    lines, first = inspect.getsourcelines(type(policy))
    (number,) = [first + at for at, line in enumerate(lines) if line.rstrip().endswith(f"# {method}")]
    return f"({HERE}:{number} in {method})"


@pytest.mark.parametrize(
    ("policies", "failing", "method"),
    [
        ((Counting(), InTurn(), PlainChunks()), 0, "key"),
        ((Told(), InTurn(), PlainChunks()), 0, "on_admission"),
        ((ByArrival(), Routing(), PlainChunks()), 1, "assign"),
        ((ByArrival(), Pulling(), PlainChunks()), 1, "pull"),
        ((ByArrival(), InTurn(), Scheduling()), 2, "_share"),
        ((ByArrival(), InTurn(), Filling()), 2, "_rule"),
        ((ByArrival(), InTurn(), Asking()), 2, "schedule"),
        ((ByArrival(), InTurn(), Refusing()), 2, "refuses"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_line_of_the_policy_stands_in_the_error(policies: Any, failing: int, method: str) -> None:
    harness = Harness(*policies)

    def serve() -> None:
        harness.submit("a", 10, 3)
        harness.step()

    with pytest.raises(PolicyError) as caught:
        serve()
    assert str(caught.value).endswith(line_of(policies[failing], method))


def test_a_wrong_answer_is_blamed_on_the_method_that_gave_it() -> None:
    class Nowhere(InTurn):
        def assign(self, request: Any, replicas: Any, now: float) -> int:
            return 7

    harness = Harness(ByArrival(), Nowhere(), PlainChunks())
    with pytest.raises(
        PolicyError, match=r"assigned a request to replica 7\. .* \(.*test_policy_errors\.py:\d+ in assign\)"
    ):
        harness.submit("a", 10, 3)


@pytest.mark.parametrize("answer", [False, True, 0])
def test_a_refusal_that_is_no_text_is_no_refusal(answer: Any) -> None:
    class Doubting(PlainChunks):
        def refuses(self, request: Any, replica: Any, now: float) -> Any:
            return answer

    harness = Harness(ByArrival(), InTurn(), Doubting())
    with pytest.raises(PolicyError, match=rf"^policy Doubting, request a: refuses\(\) is .*got {answer}.* in refuses"):
        harness.submit("a", 10, 3)


@pytest.mark.parametrize("answer", [None, 0, "12", KeyError("mine")])
def test_a_wrong_solo_chunk_is_blamed_on_the_scheduler_and_not_on_who_asks_for_prefill_times(answer: Any) -> None:
    class Chunks(PlainChunks):
        def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    harness = Harness("lrs", InTurn(), Chunks())
    with pytest.raises(PolicyError, match=r"^policy Chunks.*test_policy_errors\.py:\d+ in solo_chunk_size\)") as caught:
        harness.submit("a", 10, 3)
    expected = "KeyError: 'mine'" if isinstance(answer, Exception) else f"got {answer!r}. Allowed: a whole number of at"
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda queued: None, r"pull\(\) returned None\. Allowed: an iterable of request ids"),
        (lambda queued: "a", r"pull\(\) returned 'a'\. Allowed: an iterable of request ids"),
        (list, r"pulled Request\('a', .*\); expected the id of a request"),
        (lambda queued: [7], "pulled 7; expected the id of a request"),
        (lambda queued: ["a", "a"], "pulled a request twice"),
        (lambda queued: ["b"], "pulled a request that is not in the shared queue"),
    ],
)
def test_what_a_scheduler_wrongly_pulls_is_named(answer: Any, said: str) -> None:
    class Pulls(Shared):
        def pull(self, replica: Any, queued: Any, now: float) -> Any:
            return answer(queued)

    harness = Harness(ByArrival(), Pulls(), PlainChunks())
    harness.submit("a", 10, 3)
    with pytest.raises(PolicyError, match=rf"{said} \(.*test_policy_errors\.py:\d+ in pull\)"):
        harness.step()


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("score", [None, float("nan"), [1], np.array([1, 2]), EndReason.STOP])
def test_a_note_that_is_no_number_or_text_is_refused_even_if_nobody_keeps_it(score: Any, is_kept: bool) -> None:
    class Notes(PlainChunks):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            batch.note(next(replica.waiting()), score=score)

    harness = Harness(ByArrival(), InTurn(), Notes())
    harness.replica().builder.keep_notes(on=is_kept)
    harness.submit("a", 10, 3)
    with pytest.raises(PolicyError, match=r"note\(score\): got .*Allowed: a finite number, a text, .* in schedule\)"):
        harness.step()


def test_the_replica_is_named() -> None:
    harness = Harness(ByArrival(), InTurn(), Scheduling())
    harness.submit("a", 10, 3)
    with pytest.raises(PolicyError, match=r"^policy Scheduling, replica 0, step 0: KeyError: '' \("):
        harness.step()


class AsksForEverything:
    """Asks for whole prompts, whatever the step's token budget."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        for request in replica.waiting():
            batch.add(request, request.num_remaining_tokens)


class Idle:
    def schedule(self, replica: Any, batch: Any, now: float) -> None: ...


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (AsksForEverything(), r"The builder had refused it: TOKEN_BUDGET \(the step's token budget is spent\)"),
        (Idle(), "The builder was asked for nothing that it refused"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_stall_tells_what_the_builder_had_refused(scheduler: Any, said: str) -> None:
    harness = Harness(ByArrival(), InTurn(), scheduler, HarnessOptions(max_batch_tokens=64))
    with pytest.raises(PolicyError, match=rf"scheduled nothing although one request remains.*{said}.*in schedule\)"):
        harness.run([RequestSpec("long", 0.0, 100, 2)])


class LooksThenFails(PlainChunks):
    """Fails once, after it has looked at a request of the shared queue."""

    has_failed = False

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        for request in replica.waiting():
            batch.max_chunk(request)
        if not self.has_failed:
            self.has_failed = True
            raise LookupError("once")
        super().schedule(replica, batch, now)


def test_a_replica_serves_again_after_its_policy_has_failed() -> None:
    one = Harness("fcfs", "pull", LooksThenFails(), HarnessOptions())
    failed = one.submit("a", 10, 3)
    with pytest.raises(PolicyError, match="once"):
        one.step()
    one.replica().clear()
    one.controller.abort("a", EndReason.FAILED, 1)
    request = one.submit("b", 10, 3)
    one.steps_until_idle()
    assert (failed.end_reason, request.end_reason) == (EndReason.FAILED, EndReason.STOP)
