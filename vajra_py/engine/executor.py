"""Translate step plans into messages to workers, and workers' answers into step results.

The worker keeps slots, block tables and last tokens, so a step contains changes only. A request keeps its slot through
preemptions; when slots run short, a request that is not in the step loses its slot and gets another one later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from vajra_py.engine.compute import Chunk, LookaheadDecodes, NewRow, StepInput, StepOutput, TableUpdate, TokenLogprobs
from vajra_py.engine.compute.interface import LOST_ROW, NOTHING_LEFT
from vajra_py.engine.compute.sampling.needs import forbids_tokens, needs_outputs, needs_prompt
from vajra_py.engine.drafts import NgramIndex, NgramRules, may_have_drafts
from vajra_py.engine.outputs import OutputBuffer, Submission, detokenize
from vajra_py.runtime.kv import KvMemory
from vajra_py.runtime.requests.decode_pool import DecodePool
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.step.plan import PlannedChunk, PlannedDrafts, StepPlan, StepResult


@dataclass(slots=True)
class _Row:
    """State of a request in the worker, as far as the controller tracks it."""

    slot: int
    num_blocks: dict[int, int] = field(default_factory=dict)
    """Number of block-table entries already sent, for each KV-parallel group."""
    sampling_group: int | None = None
    """KV-parallel group that holds the request's newest tokens and samples the next one; None without KV parallelism
    and before the first chunk."""
    allows_lookahead: bool = True
    """True if the worker can undo a decode: the request has no log-probabilities, and earlier outputs do not affect its
    sampling."""
    goes_on: bool = False
    """True if the worker has the request's newest token, so that the next step need not send it."""


_Sampled: TypeAlias = tuple[Request, OutputBuffer]
"""A request that a step samples a token for, and its output buffer."""


@dataclass(slots=True)
class _Changes:
    """Input of a step while it is assembled."""

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """Data of a step in flight that are needed to interpret its output.

    Attributes:
        entries: by slot, the request whose row the step computes.
        sampled: by slot, the request and output buffer of a row that is sampled.
        scored: by slot, for each request with prompt tokens to score: its output buffer, and the number of its prompt
            tokens that this step and earlier ones have scored.
        drafts: by slot, the drafts to verify; only slots that have any.
    """

    entries: dict[int, Request] = field(default_factory=dict)
    sampled: dict[int, _Sampled] = field(default_factory=dict)
    scored: dict[int, tuple[OutputBuffer, int]] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PoolRows:
    """Rows of the last step's decode pool, kept if the worker had the newest token of every member.

    As long as no request joins or leaves the pool, the rows of the next step are the same.
    """

    members: list[Request]
    slots: list[int]
    entries: dict[int, Request]
    sampled: dict[int, _Sampled]


class EngineExecutor:
    """Controller side of the protocol with one replica's worker."""

    def __init__(
        self, num_slots: int, block_size: int = 16, *, sends_tokens: bool = False, ngrams: NgramRules | None = None
    ) -> None:
        """Create the executor.

        `sends_tokens`: steps contain the tokens of all rows, also of decodes, since ranks may lack tokens that other
        ranks sampled.
        `ngrams`: rules for looking up drafts; None: no drafts.
        """
        self._submissions: dict[Request, Submission] = {}
        self._rows: dict[Request, _Row] = {}
        self._num_slots = num_slots
        self._block_size = block_size
        self._free = list(range(num_slots))
        self._freed: list[int] = []
        self._sends_tokens = sends_tokens
        self._steps: deque[_Step] = deque()
        """Steps in flight, in order."""
        self._pool_rows: _PoolRows | None = None
        """Pool rows of the last step, if the next step may repeat them."""
        self._ngrams = ngrams
        self._indices: dict[Request, NgramIndex] = {}
        self._proposals: dict[Request, tuple[int, list[int]]] = {}
        """By request, its number of output tokens when its drafts were looked up, and these drafts."""
        self._withheld: dict[Request, tuple[int, TokenLogprobs | None]] = {}
        """By request, a sampled token that does not count as output unless the request stays on this replica."""

    # Called by the mechanism

    def known_output_tokens(self, request: Request) -> int | None:
        """Return the number of output tokens after which the request ends, if its submission states it; else None."""
        return self._submissions[request].num_output_tokens

    def num_drafts(self, requests: Sequence[Request], at_most: int) -> Sequence[int]:
        """See `Executor`."""
        return [self._num_drafts(one, at_most) for one in requests]

    def _num_drafts(self, request: Request, at_most: int) -> int:
        """Return the number of drafts that the lookup finds, but at most `at_most`.

        Return 0 without a lookup, or if drafts of this request cannot be verified (`may_have_drafts`).
        """
        submission = self._submissions[request]
        if self._ngrams is None or not may_have_drafts(submission.output.sampling):
            return 0
        found = self._proposals.get(request)
        if found is None or found[0] != request.num_output_tokens:
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = NgramIndex(self._ngrams, submission.prompt_token_ids)
            index.extend(submission.output.token_ids[len(index) - request.num_prompt_tokens :])
            found = self._proposals[request] = request.num_output_tokens, index.drafts()
            if found[1]:
                request.note_proposal(len(found[1]))
        return min(len(found[1]), at_most)

    def withheld_token(self, request: Request) -> StepResult:
        """See `Executor`; the token counts as output from now on."""
        token, logprobs = self._withheld.pop(request)
        buffer = self._submissions[request].output
        if not buffer.append(token, logprobs) and buffer.looks_for_stop_strings:
            detokenize((buffer,))
        return StepResult([(request, token)], frozenset((request,) if buffer.stopped_by is not None else ()))

    def release(self, request: Request) -> None:
        """Forget a request that has ended."""
        if self._submissions.pop(request, None) is not None:
            self.leave(request)
            self._indices.pop(request, None)
            self._proposals.pop(request, None)

    # Called by the engine loop

    def expect(self, request: Request, submission: Submission) -> None:
        """Register a request that may run on this replica, and make the worker drop any old state of the request."""
        self._submissions[request] = submission
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Make the worker forget a request, for example because it continues on another replica."""
        self._drop_row(request)
        self._withheld.pop(request, None)

    def start_again(self) -> None:
        """Reset the state, since the worker was replaced by one without state."""
        self._rows.clear()
        self._free = list(range(self._num_slots))
        self._freed = []
        self._withheld.clear()
        self.forget_steps()

    def forget_steps(self) -> None:
        """Ignore the results of all steps in flight."""
        self._steps.clear()
        self._pool_rows = None

    def submission(self, request: Request) -> Submission:
        """Return the submission of a request."""
        return self._submissions[request]

    def step_input(self, plan: StepPlan, memory: KvMemory) -> StepInput:
        """Return the worker's input for a plan."""
        changes = _Changes()
        members = [] if plan.pool is None else list(plan.pool)
        self._make_room([*(entry.request for entry in plan.chunks), *members])
        step = _Step()
        self._steps.append(step)
        for entry in plan.chunks:
            drafts = plan.drafts.get(entry.request)
            if drafts is None:
                self._add_chunk(entry, memory, changes, step)
            else:
                self._add_drafts(entry, drafts, memory, changes, step)
        last = self._pool_rows
        if plan.pool is not None and last is not None and last.members == members and memory.num_groups == 1:
            self._add_same_pool(plan.pool, last, memory, changes, step)
        else:
            self._add_pool(members, memory, changes, step)
        freed, self._freed = self._freed, []
        return StepInput(changes.chunks, changes.decodes, changes.new, freed, changes.tables, plan.copies)

    def requests_of(self, step: StepInput) -> list[Request]:
        """Return the requests whose rows a step computes."""
        slots = {*step.decodes, *(chunk.slot for chunk in step.chunks)}
        return [request for request, row in self._rows.items() if row.slot in slots]

    def parts(self, step: StepInput, suspects: Collection[Request]) -> list[StepInput]:
        """Split a step into parts that together have the same results; each of `suspects` gets a part of its own.

        Suspects are requests that may have made a worker fail. Chunks stay in order, since a chunk may read KV blocks
        that an earlier chunk writes.
        """
        apart = {row.slot for request in suspects if (row := self._rows.get(request)) is not None}
        rows: list[tuple[list[Chunk], list[int]]] = [([], [slot for slot in step.decodes if slot not in apart])]
        for chunk in step.chunks:
            if chunk.slot in apart:
                rows += [([chunk], []), ([], [])]
            else:
                rows[-1][0].append(chunk)
        rows += [([], [slot]) for slot in step.decodes if slot in apart]
        first, *others = [StepInput(*one) for one in rows if one[0] or one[1]]
        return [replace(first, new=step.new, freed=step.freed, tables=step.tables, copies=step.copies), *others]

    def lookahead_decodes(
        self, rows: Iterable[tuple[Request, int]], max_model_len: int, num_spare: int
    ) -> LookaheadDecodes | None:
        """Return decodes to start ahead, one for each of `rows`; None if there are none, or if they cannot start ahead.

        A row is a request and the number of its tokens that are computed before the decode. Requests that have
        `max_model_len` tokens are left out. No decode starts ahead if more than `num_spare` rows need a new block, or
        if any request has penalties, bad words of several tokens or log-probabilities: its decode could not be undone.
        """
        decodes, growing = [], []
        for request, num_computed in rows:
            row = self._rows[request]
            if not row.allows_lookahead:
                return None
            if num_computed >= max_model_len:
                continue
            decodes.append(row.slot)
            if num_computed >= row.num_blocks[0] * self._block_size:
                growing.append(row.slot)
        return LookaheadDecodes(decodes, growing) if decodes and len(growing) <= num_spare else None

    def step_result(self, output: StepOutput, withheld: Collection[Request] = ()) -> StepResult:
        """Return the mechanism's result for a worker's output, and update the requests' output buffers.

        `withheld`: requests whose token does not count as output yet; see `withheld_token`.
        """
        tokens: list[tuple[Request, int]] = []
        stopped: list[Request] = []
        searched: dict[Request, OutputBuffer] = {}
        verified: dict[int, list[int]] = {}
        step, logprobs, faults = self._steps.popleft(), output.logprobs, output.faults
        faulty = {step.entries[slot]: why for slot, why in faults.items() if slot in step.entries}
        for request, why in faulty.items():
            if why == LOST_ROW and forbids_tokens(self._submissions[request].output.sampling):
                faulty[request] = NOTHING_LEFT
        failed = {request: f"{request.request_id}: {why}" for request, why in faulty.items()}
        for request in failed:
            self._submissions[request].output.is_faulty = True
        for slot, token in zip(output.slots, output.token_ids, strict=True):
            if slot in faults:
                continue
            request, buffer = step.sampled[slot]
            if slot in step.drafts:
                verified.setdefault(slot, []).append(token)
                continue
            if request in withheld:
                self._withheld[request] = token, logprobs.get(slot)
                continue
            tokens.append((request, token))
            if buffer.append(token, logprobs.get(slot)):
                stopped.append(request)
            elif buffer.looks_for_stop_strings:
                searched[request] = buffer
        accepted: dict[Request, int] = {}
        for slot, sampled in verified.items():
            request, _ = step.sampled[slot]
            given = self._given(request, step.drafts[slot], sampled)
            tokens += [(request, token) for token in given]
            accepted[request] = len(given) - 1
            if self._submissions[request].output.stopped_by is not None:
                stopped.append(request)
        detokenize(searched.values())
        stopped += [request for request, buffer in searched.items() if buffer.stopped_by is not None]
        for slot, entries in output.prompt_logprobs.items():
            buffer, end = step.scored[slot]
            buffer.prompt_logprobs[end - len(entries) :] = entries
        return StepResult(tokens, frozenset(stopped), failed, accepted)

    def _given(self, request: Request, drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """Append the tokens of a verified row to the request's output, and return them.

        These are the sampled tokens up to and including the first one that differs from its draft or ends the request.

        A draft is accepted only if it equals the token sampled in its place, so the output is the same as without
        drafts.
        """
        submission = self._submissions[request]
        buffer, limit = submission.output, request.max_tokens
        if submission.num_output_tokens is not None:
            limit = min(max(1, submission.num_output_tokens), limit)
        given: list[int] = []
        for token, draft in zip(sampled, [*drafts, None], strict=True):
            given.append(token)
            if not buffer.append(token) and buffer.looks_for_stop_strings:
                detokenize((buffer,))
            if buffer.stopped_by is not None or len(buffer.token_ids) >= limit or token != draft:
                break
        return given

    def _add_same_pool(
        self, pool: DecodePool, last: _PoolRows, memory: KvMemory, changes: _Changes, step: _Step
    ) -> None:
        """Add a pool whose members are those of the last step; only members that began a new block are examined."""
        for request in pool.began_blocks():
            self._send_table(request, self._rows[request], memory, changes)
        changes.decodes = last.slots
        step.entries |= last.entries
        step.sampled |= last.sampled

    def _add_pool(self, members: list[Request], memory: KvMemory, changes: _Changes, step: _Step) -> None:
        entries: dict[int, Request] = {}
        sampled: dict[int, _Sampled] = {}
        for request in members:
            row = self._row(request, changes)
            if row.goes_on:
                self._send_table(request, row, memory, changes)
                entries[row.slot] = request
                sampled[row.slot] = request, self._submissions[request].output
            else:
                entry = PlannedChunk(request, 1, request.num_computed_tokens - 1, "running")
                self._add_chunk(entry, memory, changes, step)
        changes.decodes = list(entries)
        step.entries |= entries
        step.sampled |= sampled
        all_went_on = len(entries) == len(members) > 0
        self._pool_rows = _PoolRows(members, changes.decodes, entries, sampled) if all_went_on else None

    def _add_chunk(self, entry: PlannedChunk, memory: KvMemory, changes: _Changes, step: _Step) -> None:
        request, num_tokens, start, kind = entry
        row = self._row(request, changes)
        if kind != "running":
            row.num_blocks.clear()
        self._send_table(request, row, memory, changes)
        end = start + num_tokens
        samples = end == request.num_known_tokens
        followers = self._followers(request, row.slot, start, end, step)
        groups: Sequence[int] = ()
        if memory.num_groups > 1:
            groups = memory.active_groups(request, start)
            self._send_sampler(request, row, groups[-1], changes)
        tokens = self._tokens(request, start, end)
        count = request.num_output_tokens if samples and self._ngrams is not None else None
        changes.chunks.append(Chunk(row.slot, tokens, start, samples, followers, tuple(groups), num_outputs=count))
        row.goes_on = samples and not self._sends_tokens
        step.entries[row.slot] = request
        if samples:
            step.sampled[row.slot] = request, self._submissions[request].output

    def _add_drafts(
        self, entry: PlannedChunk, drafts: PlannedDrafts, memory: KvMemory, changes: _Changes, step: _Step
    ) -> None:
        """Add a decode and its drafts as one chunk, which holds the ids of the newest token and of the drafts."""
        request, start = entry.request, entry.num_computed_before
        row = self._row(request, changes)
        self._send_table(request, row, memory, changes)
        # Later blocks do not count as sent: they hold only drafts, and may be replaced if the drafts are rejected.
        row.num_blocks[0] = drafts.num_kept_blocks
        row.goes_on = False
        proposed = self._proposals[request][1][: drafts.num_tokens] if drafts.num_tokens else []
        tokens = [*self._tokens(request, start, start + 1), *proposed]
        count = request.num_output_tokens
        changes.chunks.append(Chunk(row.slot, tokens, start, True, num_drafts=len(proposed), num_outputs=count))
        step.entries[row.slot] = request
        step.sampled[row.slot] = request, self._submissions[request].output
        if proposed:
            step.drafts[row.slot] = proposed

    def _followers(self, request: Request, slot: int, start: int, end: int, step: _Step) -> Sequence[int]:
        """Return the prompt tokens to score with the logits of positions `start` to `end` - 1; empty if none."""
        submission = self._submissions[request]
        buffer = submission.output
        if buffer.sampling.prompt_logprobs is None or len(buffer.prompt_logprobs) >= min(
            end, len(submission.prompt_token_ids) - 1
        ):
            return ()
        followers = list(submission.prompt_token_ids[start + 1 : end + 1])
        step.scored[slot] = (buffer, start + len(followers))
        return followers

    def _tokens(self, request: Request, start: int, end: int) -> list[int]:
        """Return the known tokens of a request at positions `start` to `end` - 1."""
        submission = self._submissions[request]
        prompt, num_prompt = submission.prompt_token_ids, request.num_prompt_tokens
        if end <= num_prompt:
            return list(prompt[start:end])
        outputs = submission.output.token_ids[max(0, start - num_prompt) : end - num_prompt]
        return [*prompt[start:num_prompt], *outputs]

    def _send_table(self, request: Request, row: _Row, memory: KvMemory, changes: _Changes) -> None:
        if memory.num_groups == 1:
            known = row.num_blocks.get(0, 0)
            if memory.num_held_blocks(request) != known:
                table = memory.block_table(request)
                changes.tables.append(TableUpdate(row.slot, known, list(table[known:])))
                row.num_blocks[0] = len(table)
            return
        for group, table in zip(memory.groups_of(request), memory.group_tables(request), strict=True):
            known = row.num_blocks.get(group, 0)
            if len(table) != known:
                changes.tables.append(TableUpdate(row.slot, known, list(table[known:]), group))
                row.num_blocks[group] = len(table)

    def _row(self, request: Request, changes: _Changes) -> _Row:
        row = self._rows.get(request)
        if row is None:
            sampling = self._submissions[request].output.sampling
            allows_lookahead = sampling.logprobs is None and not needs_outputs(sampling)
            row = self._rows[request] = _Row(heapq.heappop(self._free), allows_lookahead=allows_lookahead)
            changes.new.append(self._new_row(request, row.slot))
        return row

    def _send_sampler(self, request: Request, row: _Row, group: int, changes: _Changes) -> None:
        """Resend a request's sampling state if another group, which lacks its earlier tokens, samples from now on."""
        if row.sampling_group not in (None, group):
            self._freed.append(row.slot)
            changes.new.append(self._new_row(request, row.slot))
        row.sampling_group = group

    def _new_row(self, request: Request, slot: int) -> NewRow:
        submission = self._submissions[request]
        sampling, outputs = submission.output.sampling, submission.output.token_ids
        prompt = list(submission.prompt_token_ids) if needs_prompt(sampling) else ()
        first_outputs = list(outputs) if needs_outputs(sampling) or prompt else ()
        return NewRow(slot, sampling, submission.seed, prompt, first_outputs, len(outputs), request.adapter)

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Free slots of requests not among `requests` if slots would run out.

        Requests without KV memory lose their slots first, then the others, in the order in which they got their slots.
        """
        num_lacking = len(requests) - sum(map(self._rows.__contains__, requests)) - len(self._free)
        if num_lacking <= 0:
            return
        entries = set(requests)
        victims = [request for request in self._rows if request not in entries]
        # The sort is stable, and puts requests without KV memory first.
        victims.sort(key=lambda request: request.is_resident)
        for request in victims[:num_lacking]:
            self._drop_row(request)

    def _drop_row(self, request: Request) -> None:
        row = self._rows.pop(request, None)
        if row is not None:
            self._pool_rows = None
            heapq.heappush(self._free, row.slot)
            self._freed.append(row.slot)


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """Return the output of a step, merged from those of its parts."""
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}
    faults: dict[int, str] = {}
    for output in outputs:
        logprobs |= output.logprobs
        prompt_logprobs |= output.prompt_logprobs
        faults |= output.faults
    return StepOutput(
        [slot for output in outputs for slot in output.slots],
        [token for output in outputs for token in output.token_ids],
        sum(output.duration_s for output in outputs),
        logprobs,
        prompt_logprobs,
        faults,
    )
