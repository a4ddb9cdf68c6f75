"""Client of one engine: load it, submit requests, and make sure that each of them ends.

`LLM` runs the engine's loop in the caller's thread until no request is left; `AsyncLLM` and the server run it in a
separate thread.

Invariants:
    - Each request that `submit` accepted is reported as ended, even if the engine fails: by a call of its `on_progress`
      or of its `on_engine_end`.
    - Once the engine has ended, `submit` raises.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from vajra_py.config import SystemConfig, naming_lines
from vajra_py.contract.observer import EndReason
from vajra_py.engine.build import Engine
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.engine.loop import EngineLoop
from vajra_py.engine.outputs import Submission
from vajra_py.engine.requests import load_tokenizer
from vajra_py.engine.services import engine_services
from vajra_py.engine.tokenizer import Tokenizer
from vajra_py.engine.worker import set_passive_omp_wait
from vajra_py.errors import ExecutorError, VajraError
from vajra_py.latency.services.output_length import refuse_oracle
from vajra_py.plugins import Registry
from vajra_py.runtime.records.input_log import Input, PolicyChange
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.policy_swap import Swapped

CLOSED = "LLM: it is closed. Make another one."


class EngineClient:
    """One engine, and the accepted requests that have not ended.

    Attributes:
        tokenizers: by replicaset, the tokenizer of its model; None for a model without tokenizer.
        engine: the loaded engine; set after loading.
        loop: the engine's loop; set by `start`.
        refusal: creates the exception for a request that is not accepted.
        on_ended: called in the loop's thread for every request that ended, before the request's own `on_progress`.
    """

    def __init__(self, config: SystemConfig, registry: Registry, **replaced: Any) -> None:
        """Store the configuration; loads nothing. `replaced`: fields of `EngineServices` to override."""
        self.config = config
        self.tokenizers: dict[str, Tokenizer | None] = {}
        self.engine: Engine | None = None
        self.loop: EngineLoop | None = None
        self.refusal: Callable[[], Exception] = lambda: as_vajra_error(self._error)
        self.on_ended: Callable[[Submission, Request, EndReason], None] | None = None
        self._registry = registry
        self._replaced = replaced
        self._gate = threading.Lock()
        self._accepts = False
        self._error: BaseException | None = None
        self._open: dict[Submission, None] = {}

    def load(self) -> Engine:
        """Load tokenizers and models, and return the engine.

        Raises `ConfigError` for wrong settings, `ExecutorError` if a worker fails.
        """
        # This call precedes loading tokenizers: they load a tensor library, which reads the setting only once.
        set_passive_omp_wait()
        settings: ModelBackendConfig = self.config.backend.settings
        refuse_oracle(settings.output_length.type, f"backend.{settings.kind}.output_length")
        services = engine_services(self.config, self._registry, {}, **self._replaced)
        folders = {name: settings.of(name).model for name in self.config.effective_replicasets}
        loaded = {folder: load_tokenizer(folder) for folder in dict.fromkeys(folders.values())}
        self.tokenizers = {name: loaded[folder] for name, folder in folders.items()}
        with naming_lines(self.config):
            return Engine.load(self.config, services)

    def start(
        self,
        *,
        serves: bool,
        note: Callable[[Input], None] | None = None,
        isolates_policies: bool = False,
    ) -> EngineLoop:
        """Create the loop of the loaded engine; its clock starts now. If this fails, the engine is closed."""
        assert self.engine is not None
        try:
            self.loop = self.engine.start(serves=serves, note=note, isolates_policies=isolates_policies)
        except BaseException:
            self.engine.close()
            raise
        self.loop.on_ended = self._on_ended
        return self.loop

    def accept(self) -> None:
        """Accept requests from now on."""
        with self._gate:
            self._accepts = True

    def refuse(self) -> None:
        """Accept no more requests; those already accepted continue."""
        with self._gate:
            self._accepts = False

    @property
    def num_open(self) -> int:
        """Number of accepted requests that have not ended."""
        return len(self._open)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model; only for an engine with one model."""
        return next(iter(self.tokenizers.values()))

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Submit all these requests; if the engine accepts none now, raise the exception that `refusal` creates."""
        with self._gate:
            if not self._accepts:
                raise self.refusal()
            assert self.loop is not None  # the loop starts before requests are accepted
            for submission in submissions:
                self._open[submission] = None
                self.loop.submit(submission)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests in the loop's next turn; ended requests are not affected."""
        if self.loop is not None:
            for request_id in request_ids:
                self.loop.abort(request_id)

    def request_swap(self, change: PolicyChange, done: Callable[[Swapped | VajraError], None]) -> None:
        """Request a policy swap between two steps; `done` is called with the result in the loop's thread.

        If the engine accepts no requests now, raises the exception that `refusal` creates.
        """
        with self._gate:
            if not self._accepts:
                raise self.refusal()
            assert self.loop is not None
            self.loop.swap_policy(change, done)

    async def swap(self, change: PolicyChange) -> Swapped:
        """Swap a policy between two steps, and return the result.

        Raises like `request_swap`. Also raises the error that makes the swap impossible; the old policy then stays.
        """
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[Swapped | VajraError] = event_loop.create_future()

        def deliver(outcome: Swapped | VajraError) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def done(outcome: Swapped | VajraError) -> None:
            with suppress(RuntimeError):  # raised once the event loop is closed
                event_loop.call_soon_threadsafe(deliver, outcome)

        self.request_swap(change, done)
        outcome = await answer
        if isinstance(outcome, VajraError):
            raise outcome
        return outcome

    def run(self) -> BaseException | None:
        """Run the loop in this thread until it ends; return the error that ended it, or None.

        The caller must then call `end`, which ends the remaining requests.
        """
        assert self.loop is not None
        error: BaseException | None = None
        try:
            self.loop.run()
        except BaseException as raised:  # whatever the error, every client must be notified
            error = raised
        return error

    def end(self, error: BaseException | None) -> None:
        """Stop accepting requests and end all remaining ones, after the loop has ended with `error` (None: closed)."""
        self._error = error
        self.refuse()
        if self.loop is not None:
            self.loop.refuse_swaps()
        self.end_open(error)

    def end_open(self, error: BaseException | None) -> None:
        """Call `on_engine_end` of every remaining request; this works even if the loop hangs."""
        for submission in list(self._open):
            if submission.on_engine_end is not None:
                submission.on_engine_end(error)
        self._open.clear()

    def _on_ended(self, submission: Submission, request: Request, reason: EndReason) -> None:
        if self.on_ended is not None:
            self.on_ended(submission, request, reason)
        self._open.pop(submission, None)


def as_vajra_error(error: BaseException | None) -> VajraError:
    """Return the exception for callers of an engine that ended with `error` (None: the engine was closed)."""
    if error is None:
        return ExecutorError(CLOSED)
    return error if isinstance(error, VajraError) else ExecutorError(f"engine: {type(error).__name__}: {error}")
