"""Run coroutines eagerly, so that a task is made only for those that have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any


def begin(work: Awaitable[None]) -> asyncio.Task[None] | None:
    """Run it until it is done (None), or until it first waits, and return the task that continues it.

    Raises what it raises before it waits. Tasks with `eager_start` would do the same, but need Python 3.12, and are made for
    what never waits too.
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
