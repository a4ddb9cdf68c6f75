"""Translate plans into messages for vLLM's workers, as changes to the workers' state.

A step is steady if it consists of exactly the decodes of the step before. Its message is built without reading the
requests, except those that need a block: ids do not change, every count grows by one, and it is known beforehand which
requests need a block in which step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add
from types import MappingProxyType

from vllm.v1.core.sched.output import SchedulerOutput

from vajra_py.vllm.managed_kv import ManagedKv
from vajra_py.vllm.mechanism import Mechanism, PlannedChunk, PlannedDrafts, Request, StepPlan
from vajra_py.vllm.records import Record
from vajra_py.vllm.step_message import Scheduled, StepMessage, Tables


class Messages:
    """Builds the `SchedulerOutput` of each plan.

    Attributes:
        next: message of the next step; requests that end or are preempted before that step are added to the message.
    """

    def __init__(self, mechanism: Mechanism, records: dict[str, Record], *, resumes_as_new: bool, zeroes: bool) -> None:
        replica = mechanism.replica
        self.next = StepMessage(replica.limits.max_draft_tokens)
        self._mechanism = mechanism
        self._replica = replica
        self._records = records
        self._resumes_as_new = resumes_as_new
        """True if resumed requests are sent like new ones (vLLM's second model runner)."""
        memory = replica.memory
        self._managed = memory if isinstance(memory, ManagedKv) else None
        """vLLM's own KV manager, which has several block tables; None if this project's memory is used."""
        self._zeroes = zeroes and self._managed is None
        self._block_size = replica.limits.block_size
        self._order: Sequence[Request] | None = None
        """Decodes that the lists below describe; the decode pool replaces this list when a request joins or leaves."""
        self._decodes: list[Record] = []
        self._counts: dict[str, int] = {}
        """Number of tokens of each decode in a step, by request id."""
        self._computed: list[int] = []
        """Number of computed tokens of each decode when the lists were built."""
        self._outputs: list[int] = []
        """Number of output tokens of each decode when the lists were built."""
        self._outputs_ahead: list[int] = []
        """Number of output tokens minus number of computed tokens, by decode."""
        self._by_fill: list[list[int]] = []
        """Positions of the decodes, by the number of tokens in their last block when the lists were built (0: it is
        full).
        """
        self._num_added = 0
        """Number of tokens of each decode since the lists were built."""
        self._at_step = -1
        """The decode pool's `num_committed` at the last plan for which the lists were used."""
        self._last = -1
        """Index of the last step that contained all of these decodes; -1 if there was none since the lists were built.
        """
        self._step = 0
        self._drafted: tuple[Request, ...] = ()
        """Requests of the last step if it had drafts; else empty.

        `_decodes` is empty until these requests have been looked up. From then on, `_decodes`, `_counts`, `_room` and
        `_outputs_ahead` describe them.
        """
        self._room: list[int] = []
        """For each request, the number of tokens that fit into the blocks known to the workers, less the drafter's
        lookahead.
        """
        drafts = replica.parts.options.drafts
        self._lookahead = 0 if drafts is None else drafts.lookahead_tokens

    def empty(self) -> SchedulerOutput:
        """Return an empty step that lists ended requests; the workers remove all requests from their batch."""
        self._step += 1
        return self.next.take()

    def message(self, plan: StepPlan) -> SchedulerOutput:
        """Return the message for a plan; call this before the plan's result is applied."""
        self._step += 1
        if plan.drafts:
            self._add_drafted(plan)
        else:
            if self._drafted:
                self._settle_drafted(())
            self._add_chunks(plan.chunks)
        if plan.pool is not None:
            self._add_decodes(plan)
        if self._managed is not None:
            self.next.clear_numbered(self._managed.take_cleared())
        return self.next.take()

    # Single entries

    def _add_chunks(self, chunks: Iterable[PlannedChunk], drafted_by: StepPlan | None = None) -> None:
        """Add chunks; `drafted_by` is their plan if it has drafts."""
        find, message, step = self._records.get, self.next, self._step
        drafts: Mapping[Request, PlannedDrafts] = MappingProxyType({}) if drafted_by is None else drafted_by.drafts
        verified = (
            {} if drafted_by is None else dict(zip(drafts, self._mechanism.planned_drafts(drafted_by), strict=True))
        )
        for chunk in chunks:
            request, num_tokens, computed, kind = chunk
            planned = drafts.get(request)
            record = find(request.request_id)
            if record is None:  # the request ended during the previous step, so it is left out of this one
                continue
            if kind == "running" and record.ran_in == step - 1:  # the workers know the request: send only new blocks
                record.ran_in = step
                blocks = self._new_blocks(record, request)
                if self._zeroes and not isinstance(blocks, Tables):
                    message.clear(blocks)
                num_outputs = record.num_kept + request.num_output_tokens
                if planned is not None:  # all unverified drafts count; the workers subtract rejected ones
                    computed += planned.num_unverified
                    num_outputs += planned.num_unverified
                message.go_on(record.request_id, num_tokens, computed, num_outputs, blocks)
            else:
                self._add_chunk(record, chunk)
            if planned is not None and planned.num_tokens:
                message.verify({record.request_id: verified[request]})

    def _add_chunk(self, record: Record, chunk: PlannedChunk) -> None:
        request, num_tokens, computed, kind = chunk
        is_resumed = kind != "running"
        if is_resumed:
            record.num_sent = 0
        blocks = self._new_blocks(record, request)
        if self._zeroes and not isinstance(blocks, Tables):
            self.next.clear(blocks[computed // self._block_size :] if is_resumed else blocks)
        scheduled = Scheduled(record.request_id, num_tokens, computed, blocks)
        was_absent, record.ran_in = record.ran_in != self._step - 1, self._step
        if not record.is_known or (is_resumed and self._resumes_as_new):
            vllms = record.request
            tokens = record.all_tokens() if self._resumes_as_new else None
            self.next.add_new(scheduled, vllms.prompt_token_ids, vllms.sampling_params, tokens, vllms.lora_request)
            record.is_known = True
            return
        with_tokens = (was_absent or is_resumed) and not self._resumes_as_new
        self.next.add_known(
            scheduled,
            record.num_kept + request.num_output_tokens,
            is_resumed=is_resumed,
            all_tokens=record.all_tokens() if with_tokens else None,
        )

    def _new_blocks(self, record: Record, request: Request) -> Sequence[int] | Tables:
        """Return the entries of the request's block table (or tables) that have not been sent to the workers."""
        memory, known = self._replica.memory, record.num_sent
        if self._managed is not None:
            record.num_sent = self._managed.num_entries(request)
            return Tables(self._managed.numbers(request, known))
        table = memory.block_table(request)
        if len(table) == known:
            return ()
        record.num_sent = len(table)
        return table[known:]

    # Decodes in bulk

    def _add_decodes(self, plan: StepPlan) -> None:
        assert plan.pool is not None
        order = plan.pool.in_admission_order()
        if order is not self._order or plan.pool.num_committed != self._at_step + 1:
            self._look_at(order)
        self._at_step = plan.pool.num_committed
        if len(self._decodes) != len(order) or self._are_absent():
            self._settle()
            self._add_chunks(chunk for chunk in plan.entries() if chunk.request in plan.pool)
            self._order = None
            return
        num_added = self._num_added
        new: dict[int, Sequence[int] | Tables] = {}
        for index in self._by_fill[-num_added % self._block_size]:
            blocks = self._new_blocks(self._decodes[index], order[index])
            if blocks:
                new[index] = blocks
                if self._zeroes and not isinstance(blocks, Tables):
                    self.next.clear(blocks)
        computed = [count + num_added for count in self._computed]
        self.next.add_decodes(self._counts, new, computed, [count + num_added for count in self._outputs])
        self._last = self._step
        self._num_added += 1

    def _add_drafted(self, plan: StepPlan) -> None:
        """Add the chunks of a plan with drafts, in bulk if they are exactly the decodes of the step before."""
        drafted = plan.as_drafted()
        requests = tuple([one.request for one in plan.chunks] if drafted is None else drafted.requests)
        is_alike = drafted is not None and requests == self._drafted
        if is_alike and not self._decodes:
            self._look_at_drafted(requests)
        if drafted is None or not is_alike or not self._are_all_known() or self._are_absent():
            self._settle_drafted(requests)
            self._add_chunks(plan.chunks, plan)
            return
        computed, counts = drafted.num_computed, [1 + count for count in drafted.num_drafts]
        if self._mechanism.is_ahead_of_drafts:  # all unverified drafts count; the workers subtract rejected ones
            computed = list(map(add, computed, drafted.num_unverified))
        new: dict[int, Sequence[int] | Tables] = {}
        room = self._room
        ends = map(add, computed, counts)
        for index in [index for index, (end, most) in enumerate(zip(ends, room, strict=True)) if end > most]:
            record = self._decodes[index]
            blocks = self._new_blocks(record, requests[index])
            room[index] = record.num_sent * self._block_size - self._lookahead
            if blocks:
                new[index] = blocks
                if self._zeroes and not isinstance(blocks, Tables):
                    self.next.clear(blocks)
        self._counts = dict(zip(self._counts, counts, strict=True))
        self.next.add_decodes(self._counts, new, computed, list(map(add, computed, self._outputs_ahead)))
        tokens = self._mechanism.planned_drafts(plan)
        drafts = dict(zip(self._counts, tokens, strict=True))
        self.next.verify(drafts if all(tokens) else {name: each for name, each in drafts.items() if each})
        self._last = self._step

    def _settle_drafted(self, requests: tuple[Request, ...]) -> None:
        """Store the last step of the decodes handled so far (see `_settle`); select `requests` for bulk handling."""
        self._settle()
        self._drafted, self._decodes, self._last = requests, [], -1

    def _look_at_drafted(self, requests: Sequence[Request]) -> None:
        self._look_up(requests)
        self._room = [one.num_sent * self._block_size - self._lookahead for one in self._decodes]

    def _are_all_known(self) -> bool:
        """Return whether all requests in `_drafted` still have records, so that none has ended for its client."""
        return len(self._counts) == len(self._drafted) and self._counts.keys() <= self._records.keys()

    def _look_at(self, order: Sequence[Request]) -> None:
        self._settle()
        self._order = order
        self._look_up(order)
        self._computed = [one.num_computed_tokens - 1 for one in order]
        self._outputs = list(map(add, self._computed, self._outputs_ahead))
        self._by_fill = [[] for _ in range(self._block_size)]
        for index, count in enumerate(self._computed):
            self._by_fill[count % self._block_size].append(index)
        self._num_added = 0
        self._last = -1

    def _look_up(self, requests: Iterable[Request]) -> None:
        find = self._records.get
        found = [find(request.request_id) for request in requests]
        self._decodes = decodes = [one for one in found if one is not None]
        self._counts = {one.request_id: 1 for one in decodes}
        self._outputs_ahead = [1 - one.request.num_prompt_tokens for one in decodes]

    def _are_absent(self) -> bool:
        """Return whether one of the decodes was not part of the step before, so that its full state must be sent."""
        if self._last == self._step - 1:
            return False
        return any(one.ran_in != self._step - 1 for one in self._decodes)

    def _settle(self) -> None:
        """Store in each decode's record the index of the last step that contained it."""
        if self._last >= 0:
            for record in self._decodes:
                record.ran_in = max(record.ran_in, self._last)
