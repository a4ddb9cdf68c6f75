"""Asynchronous generation: stream text to many tasks at once.

    llm = AsyncLLM("models/tiny")
    async for part in llm.stream("Once upon a time", SamplingParams(max_tokens=32)):
        print(part.text, end="")

The engine's loop runs in a thread of its own. A task that stops reading takes its request back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vajra_py.contract import Layer
from vajra_py.contract.observer import EndReason, PolicySwap
from vajra_py.engine.build import Engine
from vajra_py.engine.compute import SamplingParams, TokenLogprobs
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.engine.llm import (
    DEFAULT_REPLICASET,
    Prompt,
    RequestMaker,
    RequestOutput,
    layer_of,
    llm_config,
    load_tokenizer,
    output_of,
)
from vajra_py.engine.outputs import Submission
from vajra_py.engine.services import engine_services
from vajra_py.errors import ExecutorError, VajraError
from vajra_py.plugins import load_registry
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.policy_swap import Swapped


@dataclass(frozen=True, slots=True)
class StreamPart:
    """What is new of a request.

    Attributes:
        text: new text; may be empty while a character or a stop string is incomplete.
        token_ids: new tokens.
        logprobs: of these, when asked for.
        output: everything, with the last part; None before.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    output: RequestOutput | None = None


class _Reader:
    """Carries parts of one request from the loop's thread to a task."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self.parts: asyncio.Queue[StreamPart | Exception] = asyncio.Queue()
        self._num_tokens = 0
        self._num_characters = 0

    def on_progress(self, submission: Submission, request: Request, reason: EndReason | None) -> None:
        """In the loop's thread: hand over what is new."""
        collected = submission.collected
        start, text = self._num_tokens, collected.text
        part = StreamPart(
            text[self._num_characters :],
            collected.token_ids[start:],
            collected.logprobs[start:],
            None if reason is None else output_of(submission, request, reason),
        )
        self._num_tokens, self._num_characters = len(collected.token_ids), len(text)
        self.put(part)

    def put(self, part: StreamPart | Exception) -> None:
        """From any thread; nobody is told once the event loop is closed."""
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self.parts.put_nowait, part)


class AsyncLLM:
    """A model that serves the tasks of an event loop. Made in any thread; `close` ends what is left."""

    def __init__(
        self, model: str | Path, config: Mapping[str, Any] | str | Path | None = None, **replaced: Any
    ) -> None:
        self.config = llm_config(model, config)
        settings: ModelBackendConfig = self.config.backend.settings
        services = engine_services(self.config, load_registry(), {}, **{"threaded": True, **replaced})
        self._engine = Engine.load(self.config, services)
        self.tokenizer = load_tokenizer(settings.model)
        self._requests = RequestMaker(self.config, self._engine, self.tokenizer)
        self._loop = self._engine.start(serves=True)
        self._readers: dict[str, _Reader] = {}
        self._gate = threading.Lock()
        self._ended: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="vajra-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def failed(self) -> str | None:
        """Why nothing can be computed any more: every replica was lost and given up. For good; None: requests are served."""
        return self._loop.failed

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamPart]:
        """What is new of the request, step by step; the last part has the whole output.

        Raises `ConfigError` when the request cannot be served, `VajraError` when the engine ends. Leaving the iteration
        early (`break`, cancellation) takes the request back.
        """
        submission = self._requests.make(prompt, params or SamplingParams())
        reader = _Reader(asyncio.get_running_loop())
        submission.on_progress = reader.on_progress
        name = submission.facts.request_id
        with self._gate:
            if self._ended is not None:
                raise self._ended
            if self._loop.failed is not None:
                raise ExecutorError(f"LLM: no replica is left ({self._loop.failed}). Make another one.")
            self._readers[name] = reader
            self._loop.submit(submission)
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
            self._readers.pop(name, None)
            if not is_done:
                self._loop.abort(name)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """The whole output of one request. Raises like `stream`."""
        output = None
        async for part in self.stream(prompt, params):
            output = part.output
        assert output is not None  # the last part has it
        return output

    async def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> RequestOutput:
        """The answer to a conversation, by the model's chat template. Raises like `stream`."""
        return await self.generate(self._requests.chat(messages), params)

    async def swap_policy(
        self,
        layer: Layer | str,
        policy: str,
        params: Mapping[str, Any] | None = None,
        *,
        replicaset: str = DEFAULT_REPLICASET,
    ) -> PolicySwap:
        """Put another policy in force between two steps, under whatever is being served; what was and what is.

        Raises `ConfigError` (and what the policy raises when it is tried); then nothing has changed.
        """
        named = layer_of(layer)
        change = await asyncio.to_thread(self._engine.check_change, replicaset, named, policy, params or {})
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[Swapped | VajraError] = event_loop.create_future()

        def hand_over(outcome: Swapped | VajraError) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def tell(outcome: Swapped | VajraError) -> None:
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(hand_over, outcome)

        with self._gate:
            if self._ended is not None:
                raise self._ended
            self._loop.swap_policy(change, tell)
        outcome = await answer
        if isinstance(outcome, VajraError):
            raise outcome
        return outcome.swap

    def close(self) -> None:
        """End the engine; requests that are left raise. May be called twice."""
        self._loop.stop()
        self._thread.join()

    def _serve(self) -> None:
        error: Exception = ExecutorError("LLM: it is closed. Make another one.")
        try:
            self._loop.run()
        except VajraError as raised:
            error = raised
        except Exception as raised:
            error = ExecutorError(f"engine: {type(raised).__name__}: {raised}")
        finally:
            with self._gate:
                self._ended = error
            self._loop.refuse_swaps()
            for reader in list(self._readers.values()):
                reader.put(error)
            self._engine.close()
