"""A client that does not take what is sent to it holds nobody up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from vajra_py.serve.http.eager import begin

NUM_OUTPUTS = 32
NUM_TOKENS = 200


def test_a_client_that_does_not_read_holds_nobody_up_and_gets_everything_later(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server({"replica": {"max_batch_size": NUM_OUTPUTS, "memory": {"num_blocks": 1024}}})
    with server.asked_for_much(n=NUM_OUTPUTS, max_tokens=NUM_TOKENS) as connection:
        until(lambda: server.service.session.controller.num_ended.total() == NUM_OUTPUTS, "the engine is done with it")
        assert server.post().status_code == 200
        assert server.service.num_generating == 1  # most of it is yet to be sent
        received = bytearray()
        while piece := connection.recv(65536):
            received += piece
    # chunks of the transfer end in line breaks, and so do events
    events = [
        line[6:] for line in received.split(b"\r\n") for line in line.split(b"\n\n") if line.startswith(b"data: ")
    ]
    assert events[-1] == b"[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    for index in range(NUM_OUTPUTS):
        said = [choice for choice in choices if choice["index"] == index]
        assert [token for choice in said for token in choice["token_ids"]] == [
            10 + (3 + number) % 50 for number in range(NUM_TOKENS)
        ]
        assert said[-1]["finish_reason"] == "length"
    assert len(choices) < NUM_OUTPUTS * NUM_TOKENS / 2  # tokens generated meanwhile were sent in one chunk
    until(lambda: server.service.num_generating == 0, "nothing is left of it")


def test_work_begins_at_once_and_goes_on_in_a_task_when_it_has_to_wait() -> None:
    seen: list[str] = []

    async def work(event: asyncio.Event) -> None:
        seen.append("begun")
        await event.wait()
        await asyncio.sleep(0)
        seen.append("done")

    async def main() -> None:
        ready, later = asyncio.Event(), asyncio.Event()
        assert begin(asyncio.sleep(0, None)) is not None
        task = begin(work(later))
        assert seen == ["begun"]
        assert task is not None
        later.set()
        await task
        assert seen == ["begun", "done"]
        never = begin(work(ready))
        assert never is not None
        never.cancel()
        with pytest.raises(asyncio.CancelledError):
            await never

    asyncio.run(main())


def test_work_that_need_not_wait_has_no_task_and_raises_at_once() -> None:
    async def quick() -> None:
        return

    async def wrong() -> None:
        raise ValueError("wrong")

    async def late() -> None:
        await asyncio.sleep(0)
        raise ValueError("late")

    async def main() -> None:
        assert begin(quick()) is None
        with pytest.raises(ValueError, match="wrong"):
            begin(wrong())
        task = begin(late())
        assert task is not None
        with pytest.raises(ValueError, match="late"):
            await task

    asyncio.run(main())
