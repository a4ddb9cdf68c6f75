"""Run coroutines eagerly, so that a task is created only for those that have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any


def begin(work: Awaitable[None]) -> asyncio.Task[None] | None:
    """Run `work` until it is done and return None, or until it first waits and return the task that continues it.

    Raises errors that occur before it waits. `asyncio.eager_task_factory` would do the same, but needs Python 3.12, and
    creates tasks even for coroutines that never wait.
    """
    steps = work.__await__()
    try:
        awaited = next(steps)
    except StopIteration:
        return None

    @coroutine
    def rest() -> Generator[Any, Any, None]:
        try:
            yield awaited
            yield from steps
        finally:
            steps.close()

    async def go_on() -> None:
        await rest()

    return asyncio.get_running_loop().create_task(go_on())
