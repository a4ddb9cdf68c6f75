"""Deliveries from the engine's thread to the event loop's."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

from vajra_py.serve.session.output_streams import LoopBridge, OutputStream, ResponseState


class Loop:
    """An event loop whose time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (when, self._number, function))

    def call_soon_threadsafe(self, function: Callable[[], None]) -> None:
        self.call_at(self.now, function)

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            when, _, function = heapq.heappop(self._due)
            self.now = max(self.now, when)
            function()
        self.now = max(self.now, end)


def served(delivery_s: float, step_s: float, num_steps: int = 1000) -> tuple[float, list[tuple[float, int]]]:
    """Part of the time that deliveries took, and what a stream was told when: (time, tokens so far)."""
    loop = Loop()
    bridge = LoopBridge(cast(asyncio.AbstractEventLoop, loop))
    response = ResponseState(is_streaming=True)
    stream = OutputStream(0, cast(Any, None), response)
    told: list[tuple[float, int]] = []
    spent = 0.0

    def write() -> None:
        nonlocal spent
        told.append((loop.now, stream.num_tokens))
        loop.now += delivery_s
        spent += delivery_s

    response.on_change = write
    for step in range(1, num_steps + 1):
        bridge.post(stream, (step, "x" * step, None))
        loop.run_until(step * step_s)
    loop.run_until(loop.now + 1.0)
    return spent / (num_steps * step_s), told


def test_writing_takes_a_fifth_of_the_time_at_most_and_loses_nothing() -> None:
    part, told = served(delivery_s=0.004, step_s=0.002)
    assert part <= 0.21
    assert told[-1][1] == 1000
    assert [tokens for _, tokens in told] == sorted({tokens for _, tokens in told})


def test_nothing_waits_where_steps_are_longer_than_writing() -> None:
    part, told = served(delivery_s=0.0005, step_s=0.01)
    assert [tokens for _, tokens in told] == list(range(1, 1001))
    assert all(at == (step - 1) * 0.01 or abs(at - (step - 1) * 0.01) < 1e-9 for step, (at, _) in enumerate(told, 1))
    assert part < 0.06


def test_no_token_waits_longer_than_25_ms() -> None:
    _, told = served(delivery_s=0.5, step_s=0.01, num_steps=20)
    gaps = [later - at - 0.5 for (at, _), (later, _) in pairwise(told)]
    assert all(gap <= 0.0251 for gap in gaps)
