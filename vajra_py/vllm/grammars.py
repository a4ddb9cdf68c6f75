"""Structured output: a request waits until its grammar is compiled, and the grammar then constrains the request's
tokens in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.utils import strip_speculative_padding

from vajra_py.vllm.records import Record


class Grammars:
    """Scheduler's side of grammars; vLLM's structured-output manager compiles and applies them."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._constrained: dict[str, Record] = {}
        self._compiling: list[Record] = []

    @property
    def num_compiling(self) -> int:
        """Number of requests whose grammar is still being compiled."""
        return len(self._compiling)

    def take_in(self, record: Record) -> bool:
        """Start tracking a new request; return True if it must wait for its grammar."""
        if record.request.use_structured_output:
            self._constrained[record.request_id] = record
        waits = record.request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if waits:
            self._compiling.append(record)
        return waits

    def take_compiled(self) -> list[tuple[Record, Exception | None]]:
        """Return the requests that stop waiting, each with the error if its grammar cannot be compiled."""
        waiting, self._compiling = self._compiling, []
        done: list[tuple[Record, Exception | None]] = []
        for record in waiting:
            structured = record.request.structured_output_request
            grammar = None if structured is None else structured.grammar
            if grammar is None:
                self._compiling.append(record)
            elif isinstance(grammar, Exception):
                done.append((record, grammar))
            else:
                record.request.status = RequestStatus.WAITING
                done.append((record, None))
        return done

    def forget(self, record: Record) -> bool:
        """Remove an ended request; return True if it was waiting for its grammar."""
        self._constrained.pop(record.request_id, None)
        was_waiting = record in self._compiling
        if was_waiting:
            self._compiling.remove(record)
        return was_waiting

    def sampling(self, output: SchedulerOutput) -> list[str]:
        """Return the names of a step's requests that sample a token under a grammar."""
        found = []
        for name, record in self._constrained.items():
            own = record.own
            if own is not None and name in output.num_scheduled_tokens and own.num_remaining_tokens <= 0:
                found.append(name)
        return found

    def bitmask(self, output: SchedulerOutput, requests: Mapping[str, VllmRequest]) -> GrammarOutput | None:
        """Return the bit mask of tokens that grammars allow in a step; None if no request samples under a grammar."""
        if not output.has_structured_output_requests:
            return None
        names = self.sampling(output)
        if not names:
            return None
        drafts = output.scheduled_spec_decode_tokens
        counts = [len(strip_speculative_padding(drafts.get(name, []))) for name in names]
        return GrammarOutput(names, self._manager.grammar_bitmask(requests, names, drafts), counts)

    def allowed_drafts(self, request: VllmRequest, tokens: list[int]) -> list[int]:
        """Return the longest prefix of proposed tokens that the request's grammar accepts."""
        if not request.use_structured_output:
            return tokens
        allowed: list[int] = self._manager.validate_tokens(request, tokens)
        return allowed

    def accepts(self, request: VllmRequest, tokens: list[int]) -> bool:
        """Return whether the request's grammar accepts its sampled tokens."""
        return not request.use_structured_output or bool(self._manager.accept_tokens(request, tokens))
