"""Policies that do not return are interrupted and named."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicySpec
from vajra_py.contract.observer import Observer
from vajra_py.errors import PolicyError, RunError
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks, Shared, check_policy
from vajra_py.workload import RequestSpec

OPTIONS = HarnessOptions(num_blocks=16, policy_timeout_s=0.2)
REQUESTS = [RequestSpec("a", 0.0, 20, 3), RequestSpec("b", 0.1, 20, 3)]


def for_ever() -> None:
    """Do nothing, and catch whatever a policy would catch."""
    while True:
        try:
            sum(range(100))
        except Exception:
            continue


def block_until(released: threading.Event) -> None:
    """Ignore every interruption."""
    while not released.is_set():
        try:
            for_ever()
        except BaseException:
            continue


@contextmanager
def released_when_logged() -> Iterator[threading.Event]:
    """An event that is set as soon as the watchdog writes to its log."""
    released = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            released.set()

    handler = Heard()
    logging.getLogger("vajra_py.plugins.watchdog").addHandler(handler)
    try:
        yield released
    finally:
        logging.getLogger("vajra_py.plugins.watchdog").removeHandler(handler)


class EndlessKey(ByArrival):
    def key(self, request: Any, now: float) -> float:
        if request.request_id == "b":
            for_ever()
        return 0.0


class EndlessAssign(InTurn):
    def assign(self, request: Any, replicas: Any, now: float) -> Any:
        for_ever()


class EndlessPull(Shared):
    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        while True:
            yield from (request.request_id for request in queued if request.index > 9)


class EndlessSchedule(PlainChunks):
    """Asks the builder again and again for what it refuses."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        request = next(replica.waiting())
        while batch.add(request, 20, reserve_tokens=4096) is not None:
            pass


class EndlessTold(PlainChunks):
    def on_step_end(self, step: Any) -> None:
        for_ever()


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ((EndlessKey(), InTurn(), PlainChunks()), r"policy EndlessKey, request b, at 0\S* s: .*in for_ever"),
        (
            (ByArrival(), EndlessAssign(), PlainChunks()),
            r"policy replicaset scheduler, request a, at 0\S* s: .*in for_ever",
        ),
        (
            (ByArrival(), EndlessPull(), PlainChunks()),
            r"policy replicaset scheduler, replica 0, step 0: .*in (pull|<genexpr>)",
        ),
        ((ByArrival(), InTurn(), EndlessSchedule()), r"policy EndlessSchedule, replica 0, step 0: .*in schedule"),
        ((ByArrival(), InTurn(), EndlessTold()), r"policy EndlessTold, replica 0, step 0: .*in for_ever"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_ends_with_the_name_of_who_does_not_return(policies: Any, said: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Harness(*policies, OPTIONS).run(REQUESTS)
    assert re.match(said, str(caught.value))
    assert "did not return within 0.2 s (" in str(caught.value)
    assert "test_watchdog.py:" in str(caught.value)


def test_driven_by_hand_too() -> None:
    harness = Harness(ByArrival(), InTurn(), EndlessSchedule(), OPTIONS)
    harness.submit("a", 20, 3)
    with pytest.raises(PolicyError, match=r"EndlessSchedule, replica 0, step 0: did not return within 0\.2 s"):
        harness.steps_until_idle()


def test_the_conformance_suite_names_it_and_asks_no_more() -> None:
    spec = PolicySpec(
        "endless", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda c, x: EndlessSchedule(), "Never returns."
    )
    with pytest.raises(AssertionError) as caught:
        check_policy(spec, policy_timeout_s=0.2)
    assert len(str(caught.value).splitlines()) == 2
    assert "did not return within 0.2 s" in str(caught.value)


def test_an_observer_that_does_not_return_ends_the_run() -> None:
    class Endless(Observer):
        def on_first_token(self, request: Any, now: float) -> None:
            for_ever()

    harness = Harness(ByArrival(), InTurn(), PlainChunks(), OPTIONS)
    harness.controller.watch((Endless(),))
    with pytest.raises(RunError, match=r"a plug-in did not return within 0\.2 s"):
        harness.run(REQUESTS)


def test_what_takes_a_call_that_cannot_be_interrupted_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class BlockedOnce(ByArrival):
        def on_arrivals(self, requests: Any, now: float) -> None:
            block_until(released)

    with released_when_logged() as released:
        Harness(BlockedOnce(), InTurn(), PlainChunks(), OPTIONS).run(REQUESTS)
    (record,) = caplog.records
    assert re.search(
        r"test_watchdog\.py:\d+ in on_arrivals did not return within 0\.2 s; it is blocked", record.getMessage()
    )


def test_a_policy_that_another_one_calls_is_named_in_the_log_instead_of_its_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class BlockedKey(ByArrival):
        key_motion = KeyMotion.ARBITRARY
        is_read_by_the_scheduler = False

        def key(self, request: Any, now: float) -> float:
            if self.is_read_by_the_scheduler:
                block_until(released)
            return request.arrived_at

    class ReadsUrgency(PlainChunks):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            prioritizer.is_read_by_the_scheduler = True
            for request in replica.waiting():
                replica.urgency(request)
            prioritizer.is_read_by_the_scheduler = False
            super().schedule(replica, batch, now)

    prioritizer = BlockedKey()
    harness = Harness(prioritizer, InTurn(), ReadsUrgency(), OPTIONS)
    harness.submit("a", 20, 3)
    with released_when_logged() as released:
        harness.steps_until_idle()
    (record,) = caplog.records
    assert re.search(r"test_watchdog\.py:\d+ in key did not return within 0\.2 s", record.getMessage())


def test_many_short_calls_and_none_at_all_are_nobodys_fault() -> None:
    with no_endless_calls(0.05):
        for _ in range(60):
            Harness(ByArrival(), InTurn(), PlainChunks(), OPTIONS).run(REQUESTS)


STARTS_THREADS = """
import gc, threading
from vajra_py.plugins.watchdog import no_endless_calls

main = threading.get_ident()

def lets_others_run(phase, info):
    if threading.get_ident() != main:
        threading.Event().wait(0.001)

gc.callbacks.append(lets_others_run)
gc.set_threshold(1)
with no_endless_calls(0.0008):
    for _ in range(500):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
"""


def test_garbage_collected_by_the_watchdog_blocks_no_thread_that_starts() -> None:
    subprocess.run([sys.executable, "-c", STARTS_THREADS], timeout=60, check=True)
