"""Asynchronous generation: stream text to many tasks concurrently.

    llm = AsyncLLM("models/tiny")
    async for part in llm.stream("Once upon a time", SamplingParams(max_tokens=32)):
        print(part.text, end="")

The engine's loop runs in its own thread. When a task stops reading, its request is aborted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vajra_py.contract import Layer
from vajra_py.contract.facts import StatedFacts
from vajra_py.contract.observer import EndReason, PolicySwap
from vajra_py.engine.client import EngineClient, as_vajra_error
from vajra_py.engine.compute import SamplingParams, TokenLogprobs
from vajra_py.engine.llm import DEFAULT_REPLICASET, layer_of, llm_config
from vajra_py.engine.outputs import Submission
from vajra_py.engine.requests import Prompt, RequestMaker, RequestOutput, output_of
from vajra_py.errors import ExecutorError
from vajra_py.plugins import load_registry
from vajra_py.runtime.requests.request import Request


@dataclass(frozen=True, slots=True)
class StreamPart:
    """New output of a request.

    Attributes:
        text: new text; may be empty while a character or a stop string is incomplete.
        token_ids: new tokens.
        logprobs: log-probabilities of the new tokens; empty unless the request has `logprobs`.
        output: the request's whole output, in its last part; None in earlier parts.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    output: RequestOutput | None = None


class _Reader:
    """Passes the `StreamPart`s of one request from the engine's thread to a task."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self.parts: asyncio.Queue[StreamPart | Exception] = asyncio.Queue()
        self._num_tokens = 0
        self._num_characters = 0

    def on_progress(self, submission: Submission, request: Request, reason: EndReason | None) -> None:
        """Pass new output to the task; called in the engine's thread."""
        buffer = submission.output
        start, text = self._num_tokens, buffer.text
        part = StreamPart(
            text[self._num_characters :],
            buffer.token_ids[start:],
            buffer.logprobs[start:],
            None if reason is None else output_of(submission, request, reason),
        )
        self._num_tokens, self._num_characters = len(buffer.token_ids), len(text)
        self.put(part)

    def on_engine_end(self, error: BaseException | None) -> None:
        """Make the task raise the error that ended the engine."""
        self.put(as_vajra_error(error))

    def put(self, part: StreamPart | Exception) -> None:
        """Pass a part to the task; may be called from any thread."""
        with suppress(RuntimeError):  # raised once the event loop is closed
            self._event_loop.call_soon_threadsafe(self.parts.put_nowait, part)


class AsyncLLM(EngineClient):
    """A model that serves asyncio tasks.

    May be created in any thread; `close` ends requests in progress.
    """

    def __init__(
        self, model: str | Path, config: Mapping[str, Any] | str | Path | None = None, **replaced: Any
    ) -> None:
        super().__init__(llm_config(model, config), load_registry(), **{"threaded": True, **replaced})
        self.engine = engine = self.load()
        self._requests = RequestMaker(engine, self.tokenizer)
        self.start(serves=True)
        self.accept()
        self._thread = threading.Thread(target=self._serve, name="vajra-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def failed(self) -> str | None:
        """Reason why no request can ever be served again (every replica was lost and given up); else None."""
        assert self.loop is not None
        return self.loop.failed

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, facts: StatedFacts | None = None
    ) -> AsyncIterator[StreamPart]:
        """Yield the request's new output step by step; the last part also has the whole output.

        `facts` are read by policies and select an adapter: `StatedFacts(adapter="french")`. Raises `ConfigError` if the
        request cannot be served, `VajraError` if the engine ends. Leaving the iteration early (`break`, cancellation)
        aborts the request.
        """
        params = SamplingParams() if params is None else params
        submission = self._requests.make(prompt, params, stated=facts)
        reader = _Reader(asyncio.get_running_loop())
        submission.on_progress, submission.on_engine_end = reader.on_progress, reader.on_engine_end
        if self.failed is not None:
            raise ExecutorError(f"LLM: no replica is left ({self.failed}). Create a new LLM.")
        self.submit([submission])
        is_done = False
        try:
            while not is_done:
                part = await reader.parts.get()
                if isinstance(part, Exception):
                    is_done = True
                    raise part
                is_done = part.output is not None
                yield part
        finally:
            if not is_done:
                self.abort([submission.facts.request_id])

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, facts: StatedFacts | None = None
    ) -> RequestOutput:
        """Return the whole output of one request. Raises like `stream`."""
        output = None
        async for part in self.stream(prompt, params, facts=facts):
            output = part.output
        assert output is not None  # the last part of a stream always has the output
        return output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        facts: StatedFacts | None = None,
    ) -> RequestOutput:
        """Format a conversation by the model's chat template, and return the answer. Raises like `stream`."""
        return await self.generate(self._requests.chat(messages), params, facts=facts)

    async def swap_policy(
        self,
        layer: Layer | str,
        policy: str,
        params: Mapping[str, Any] | None = None,
        *,
        replicaset: str = DEFAULT_REPLICASET,
    ) -> PolicySwap:
        """Swap a policy between two steps while requests are served; return the old and the new policy.

        Raises `ConfigError`, the error that the new policy raises when it is built or first called, or, if the engine
        has ended, the engine's error. In each case, the old policy stays.
        """
        assert self.engine is not None
        named = layer_of(layer)
        change = await asyncio.to_thread(self.engine.check_change, replicaset, named, policy, params or {})
        return (await self.swap(change)).swap

    def close(self) -> None:
        """End the engine; tasks with unfinished requests get an exception. May be called twice."""
        assert self.loop is not None
        self.loop.stop()
        self._thread.join()

    def _serve(self) -> None:
        assert self.engine is not None
        try:
            self.end(self.run())
        finally:
            self.engine.close()
