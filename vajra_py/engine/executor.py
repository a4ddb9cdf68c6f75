"""Translate plans into worker messages, and workers' answers into step results.

The worker remembers slots, block tables and last tokens, so a step names only what changed. A request keeps its slot
through preemptions; when slots run short, one that is not in the step loses its own and gets another one later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vajra_py.engine.compute import Chunk, NewRow, StepInput, StepOutput, TableUpdate
from vajra_py.engine.compute.interface import needs_history
from vajra_py.engine.outputs import Collected, Submission
from vajra_py.runtime.executor import PlannedChunk, StepPlan, StepResult
from vajra_py.runtime.kv import AnyKvMemory
from vajra_py.runtime.request import Request


@dataclass(slots=True)
class _Row:
    """What the worker knows of a request."""

    slot: int
    num_blocks: int = 0
    """Leading entries of its block table."""
    is_foreseeable: bool = True
    """Whether a token of it leaves nothing behind in the worker but itself."""
    goes_on: bool = False
    """Whether it has the request's newest token, so that the next step need not name it."""


@dataclass(slots=True)
class _Changes:
    """A step's input while it is put together."""

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)


class EngineExecutor:
    """One replica's side of the protocol with its worker."""

    def __init__(self, num_slots: int) -> None:
        self._submissions: dict[Request, Submission] = {}
        self._rows: dict[Request, _Row] = {}
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._freed: list[int] = []
        self._by_slot: dict[int, Request] = {}
        self._scored: dict[int, tuple[Collected, int]] = {}
        """By slot, whose prompt tokens this step scores, and the place of the first of them among the scored ones."""

    # What the mechanism asks

    def known_output_tokens(self, request: Request) -> int | None:
        """After how many tokens the request ends, where its submission says so."""
        return self._submissions[request].num_output_tokens

    def release(self, request: Request) -> None:
        """Forget a request that has left."""
        if self._submissions.pop(request, None) is not None:
            self._drop_row(request)

    # What the loop asks

    def expect(self, request: Request, submission: Submission) -> None:
        """A request that may run here."""
        self._submissions[request] = submission

    def start_again(self) -> None:
        """The worker is another one, which knows nothing."""
        self._rows.clear()
        self._free = list(range(self._num_slots))
        self._freed = []
        self._by_slot = {}

    def submission(self, request: Request) -> Submission:
        """What the request was submitted as."""
        return self._submissions[request]

    def step_input(self, plan: StepPlan, memory: AnyKvMemory) -> StepInput:
        """What the worker has to be told to compute the plan."""
        changes = _Changes()
        members = plan.pool or ()
        self._make_room(plan)
        self._by_slot = {}
        self._scored = {}
        for entry in plan.chunks:
            self._add_chunk(entry, memory, changes)
        for request in members:
            row = self._row(request, changes)
            if row.goes_on:
                self._tell_table(request, row, memory, changes)
                changes.decodes.append(row.slot)
                self._by_slot[row.slot] = request
            else:
                entry = PlannedChunk(request, 1, request.num_computed_tokens - 1, "running")
                self._add_chunk(entry, memory, changes)
        freed, self._freed = self._freed, []
        return StepInput(changes.chunks, changes.decodes, changes.new, freed, changes.tables, plan.copies)

    def foreseen(self, members: Iterable[Request], growing: Mapping[Request, int]) -> StepInput | None:
        """The input of a further step of these decodes, some of which get a block; None when one must not be foreseen.

        Penalties and log-probabilities would have to be taken back with a step that was foreseen wrongly.
        """
        decodes, tables = [], []
        for request in members:
            row = self._rows[request]
            if not row.is_foreseeable:
                return None
            decodes.append(row.slot)
            block = growing.get(request)
            if block is not None:
                tables.append(TableUpdate(row.slot, row.num_blocks, [block]))
        return StepInput([], decodes, [], [], tables, [])

    def step_result(self, output: StepOutput) -> StepResult:
        """What the mechanism has to know of a worker's answer; requests' outputs are brought up to date."""
        tokens: list[tuple[Request, int]] = []
        stopped: list[Request] = []
        by_slot, logprobs, faults = self._by_slot, output.logprobs, output.faults
        failed = {by_slot[slot]: f"{by_slot[slot].request_id}: {why}" for slot, why in faults.items()}
        for slot, token in zip(output.slots, output.token_ids, strict=True):
            if slot in faults:
                continue
            request = by_slot[slot]
            tokens.append((request, token))
            if self._submissions[request].collected.append(token, logprobs.get(slot)):
                stopped.append(request)
        for slot, entries in output.prompt_logprobs.items():
            collected, start = self._scored[slot]
            collected.prompt_logprobs[start:] = entries
        return StepResult(tokens, frozenset(stopped), failed)

    # Inside

    def _add_chunk(self, entry: PlannedChunk, memory: AnyKvMemory, changes: _Changes) -> None:
        request, num_tokens, start, kind = entry
        row = self._row(request, changes)
        if kind != "running":
            row.num_blocks = 0
        self._tell_table(request, row, memory, changes)
        end = start + num_tokens
        samples = end == request.num_known_tokens
        followers = self._followers(request, row.slot, start, end)
        changes.chunks.append(Chunk(row.slot, self._tokens(request, start, end), start, samples, followers))
        row.goes_on = samples
        if samples:
            self._by_slot[row.slot] = request

    def _followers(self, request: Request, slot: int, start: int, end: int) -> Sequence[int]:
        """Prompt tokens whose log-probabilities a chunk of positions `start` .. `end` - 1 gives and somebody wants."""
        submission = self._submissions[request]
        collected = submission.collected
        if collected.sampling.prompt_logprobs is None or len(collected.prompt_logprobs) >= min(
            end, len(submission.prompt_token_ids) - 1
        ):
            return ()
        self._scored[slot] = (collected, start)
        return list(submission.prompt_token_ids[start + 1 : end + 1])

    def _tokens(self, request: Request, start: int, end: int) -> list[int]:
        """Known tokens of a request at positions `start` .. `end` - 1."""
        submission = self._submissions[request]
        prompt, num_prompt = submission.prompt_token_ids, request.num_prompt_tokens
        if end <= num_prompt:
            return list(prompt[start:end])
        outputs = submission.collected.token_ids[max(0, start - num_prompt) : end - num_prompt]
        return [*prompt[start:num_prompt], *outputs]

    def _tell_table(self, request: Request, row: _Row, memory: AnyKvMemory, changes: _Changes) -> None:
        known = row.num_blocks
        if memory.held_blocks(request) != known:
            table = memory.table(request)
            changes.tables.append(TableUpdate(row.slot, known, list(table[known:])))
            row.num_blocks = len(table)

    def _row(self, request: Request, changes: _Changes) -> _Row:
        row = self._rows.get(request)
        if row is None:
            sampling = self._submissions[request].collected.sampling
            is_foreseeable = sampling.logprobs is None and not needs_history(sampling)
            row = self._rows[request] = _Row(heapq.heappop(self._free), is_foreseeable=is_foreseeable)
            changes.new.append(self._new_row(request, row.slot))
        return row

    def _new_row(self, request: Request, slot: int) -> NewRow:
        submission = self._submissions[request]
        sampling, outputs = submission.collected.sampling, submission.collected.token_ids
        if not needs_history(sampling):
            return NewRow(slot, sampling, submission.seed, num_output_tokens=len(outputs))
        prompt = list(submission.prompt_token_ids)
        return NewRow(slot, sampling, submission.seed, prompt, list(outputs), len(outputs))

    def _make_room(self, plan: StepPlan) -> None:
        """Free the slots of the longest-known requests that this step does not need, when it would run out of them."""
        entries = {entry.request for entry in plan.chunks}
        if plan.pool is not None:
            entries.update(plan.pool)
        num_lacking = sum(request not in self._rows for request in entries) - len(self._free)
        if num_lacking <= 0:
            return
        victims = [request for request in self._rows if request not in entries]
        victims.sort(key=lambda request: request.is_resident)  # stable: those without memory first
        for request in victims[:num_lacking]:
            self._drop_row(request)

    def _drop_row(self, request: Request) -> None:
        row = self._rows.pop(request, None)
        if row is not None:
            heapq.heappush(self._free, row.slot)
            self._freed.append(row.slot)
