"""Compute a worker's steps: from changes of the batch to sampled tokens.

Invariants:
    - A fault of one row ends only that row: it is reported among the step's faults. On a single rank, a step that fails
      is computed again row by row, as long as the device responds.
    - Host-only work of a step is done before the device is used. Submitting a step does not wait for the device, unless
      the step fails, or swaps blocks in a replica of several KV-parallel groups.
    - After the runner raised an exception it must not be used again: device and host state may differ.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from vajra_py.engine.compute.batch import BatchInputs, BatchState, HostBatch, Ints
from vajra_py.engine.compute.interface import (
    LookaheadDecodes,
    LookaheadStep,
    ModelFacts,
    NewRow,
    PendingStep,
    RunnerOptions,
    StepInput,
    StepOutput,
)
from vajra_py.engine.compute.model.exclusion import LOADING
from vajra_py.engine.compute.model.kv_memory import KvMemory
from vajra_py.engine.compute.model.loading import find_device
from vajra_py.engine.compute.model.prepare import PreparedModel, prepare
from vajra_py.engine.compute.model.ranks import Ranks, join_ranks, leave_ranks, swap_file
from vajra_py.engine.compute.sampling.logprobs import PendingLogprobs
from vajra_py.engine.compute.sampling.sampler import NO_TOKEN, Logprobs, Sampler
from vajra_py.engine.compute.step.checks import check_options
from vajra_py.engine.compute.step.graphs import Capture, CudaCapture, DecodeGraphs
from vajra_py.engine.compute.step.memory import step_bytes, usable_bytes
from vajra_py.engine.compute.step.pending import Computed, JoinedStep, PendingLookahead, TorchStep
from vajra_py.engine.compute.step.warm_up import warm_up
from vajra_py.engine.compute.transfer import marked, to_device, to_host
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.runtime.kv import BlockCopy

_log = logging.getLogger(__name__)
Scores = dict[int, list[PendingLogprobs]]
"""Log-probabilities of prompt tokens, by slot."""
_ROW_ERRORS = (RuntimeError, IndexError, ValueError, OverflowError, TypeError, MemoryError)
"""Errors of a step after which its rows are computed one by one to find the faulty one."""


class TorchRunner:
    """A `LookaheadRunner` in this process."""

    def __init__(
        self,
        model: PreparedModel,
        options: RunnerOptions,
        capture: Capture | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._ranks = ranks or Ranks()
        self._options = options
        facts, device = model.facts, model.device
        self._memory: KvMemory | None = None
        self._capture = capture
        self._graphs: DecodeGraphs | None = None
        self._ahead: PendingLookahead | None = None
        self._to_begin: LookaheadDecodes | None = None
        self._adapters = model.adapters
        self._faults: dict[int, str] = {}
        """Reason why a row cannot be computed, by slot; kept until the slot is freed."""
        self._state = BatchState(
            options.max_requests, facts.max_model_len, options.block_size, device, self._ranks.groups
        )
        self._sampler = Sampler(options.max_requests, facts.vocab_size, facts.eos_token_ids, device)

    @classmethod
    def load(cls, options: RunnerOptions, capture: Capture | None = None) -> TorchRunner:
        """See `load_runner`. `capture` replaces `CudaCapture`."""
        check_options(options)
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        with current(find_device(options.device)):
            ranks = join_ranks(options)
            return cls(prepare(options, ranks), options, capture, ranks)

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""
        return self._model.facts

    @property
    def num_replays(self) -> int:
        """Number of steps so far that replayed a captured graph."""
        return 0 if self._graphs is None else self._graphs.num_replays

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """See `ModelRunner`."""
        if not 0.0 < memory_fraction <= 1.0:
            raise ConfigError(
                Problem("memory fraction", f"out of range ({memory_fraction})", "Allowed: above 0, up to 1")
            )
        facts, device = self._model.facts, self._model.device
        needed = step_bytes(facts, self._model.config, self._options, device)
        usable = usable_bytes(device, memory_fraction, facts.weight_bytes) - needed
        num_blocks = max(0, usable) // (facts.kv_bytes_per_token * facts.block_size) - self._options.spare_blocks
        longest = -(-facts.max_model_len // facts.block_size)
        if num_blocks < longest:
            raise ConfigError(
                Problem(
                    "KV memory",
                    f"{max(0, usable)} bytes of {device} are left for it, which is {max(0, num_blocks)} blocks, and one sequence "
                    f"of {facts.max_model_len} tokens takes {longest}",
                    "Use a shorter max_model_len, a larger memory fraction or a smaller model",
                )
            )
        # Blocks beyond the number that all slots need at full length would never be used.
        return int(min(num_blocks, longest * self._options.max_requests))

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See `ModelRunner`."""
        if self._memory is not None:
            raise ExecutorError("KV memory: allocated already. A runner allocates once.")
        if num_blocks < 1 or num_host_blocks < 0:
            raise ExecutorError(
                f"KV memory: {num_blocks} device and {num_host_blocks} host blocks. One device block or more."
            )
        spare = self._options.spare_blocks
        sizes = (num_blocks, num_host_blocks, self._options.block_size)
        try:
            shared = swap_file(self._options) if num_host_blocks and self._ranks.groups is not None else None
            self._memory = KvMemory(self._model.layers, sizes, self._model.dtype, self._model.device, shared, spare)
        except (RuntimeError, MemoryError) as error:
            raise ExecutorError(
                f"KV memory: {num_blocks} device and {num_host_blocks} host blocks do not fit ({error})"
            ) from error
        with LOADING.shared(), current(self._model.device), torch.inference_mode():
            if self._model.device.type == "cuda":
                warm_up(self._model, self._memory, self._options, self._ranks)
            self._graphs = self._captured(self._memory)

    def _captured(self, memory: KvMemory) -> DecodeGraphs | None:
        options, device = self._options, self._model.device
        largest = min(options.max_graph_rows, options.max_requests)
        capture = self._capture
        if capture is None and device.type == "cuda":
            capture = CudaCapture(device)
        if capture is None or not largest:
            return None
        if not self._ranks.is_alone:
            _log.info("decodes run without CUDA graphs: several ranks compute them")
            return None
        vocab_size = self._model.facts.vocab_size
        return DecodeGraphs.captured(self._model.forward, memory.caches, self._state, vocab_size, largest, capture)

    @torch.inference_mode()
    def submit(self, step: StepInput) -> PendingStep:
        """See `ModelRunner`."""
        memory = self._allocated("step")
        with _as_errors(self._model.device), LOADING.shared(), current(self._model.device):
            self._take_back()
            return self._submitted(step, memory)

    def run(self, step: StepInput) -> StepOutput:
        """See `ModelRunner`."""
        return self.submit(step).result()

    def run_ahead(self, work: LookaheadStep) -> StepOutput:
        """See `LookaheadRunner`."""
        if work.begun:
            self.begin_ahead()
        pending = self._submit_rest(work.step, work.begun) if work.begun else self.submit(work.step)
        self._to_begin = work.ahead
        if self._model.device.type == "cuda":
            self.begin_ahead()
        return pending.result()

    def begin_ahead(self) -> None:
        """See `LookaheadRunner`."""
        ahead, self._to_begin = self._to_begin, None
        if ahead is not None:
            self._ahead = self._submit_ahead(ahead)

    @torch.inference_mode()
    def _submit_ahead(self, ahead: LookaheadDecodes) -> PendingLookahead:
        memory, state = self._memory, self._state
        assert memory is not None
        if len(ahead.growing) > memory.num_spare_blocks:
            raise ExecutorError(
                f"step: {len(ahead.growing)} rows grow in advance, but there are only {memory.num_spare_blocks} spare blocks."
            )
        with current(self._model.device):
            last_tokens = state.last_tokens.clone()
        grown = {slot: int(state.num_computed[slot]) // state.block_size for slot in ahead.growing}
        for spare, (slot, place) in enumerate(grown.items(), memory.num_blocks):
            state.tables[slot, place] = spare
        return PendingLookahead(self.submit(StepInput(decodes=ahead.decodes)), ahead.decodes, last_tokens, grown)

    @torch.inference_mode()
    def _submit_rest(self, step: StepInput, begun: Sequence[int]) -> PendingStep:
        """Submit the rest of a step whose `begun` decodes are in flight; other rows in flight are dropped."""
        ahead, self._ahead, memory = self._ahead, None, self._memory
        counted = set(begun)
        if ahead is None or memory is None or not counted <= set(ahead.slots):
            raise ExecutorError("step: the step it depends on was not submitted.")
        dropped = [slot for slot in ahead.slots if slot not in counted]
        with _as_errors(self._model.device), LOADING.shared(), current(self._model.device):
            if dropped:
                self._state.undo(dropped, ahead.last_tokens)
                self._sampler.undo(dropped)
            self._take_changes(step, memory)
            spare = [(memory.num_blocks + k, slot) for k, slot in enumerate(ahead.grown) if slot in counted]
            memory.move([(block, int(self._state.tables[slot, ahead.grown[slot]])) for block, slot in spare])
        rest = StepInput(step.chunks, [slot for slot in step.decodes if slot not in counted])
        order = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        following = self.submit(rest) if rest.chunks or rest.decodes else None
        return JoinedStep(ahead.pending, begun, following, order)

    def _take_back(self) -> None:
        ahead, self._ahead, self._to_begin = self._ahead, None, None
        if ahead is not None:
            self._state.undo(ahead.slots, ahead.last_tokens)
            self._sampler.undo(ahead.slots)

    @property
    def kv_block_bytes(self) -> int:
        """See `KvRunner`."""
        return self._allocated("KV copy").block_bytes

    @torch.inference_mode()
    def export_kv(self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        """See `KvRunner`."""
        memory = self._allocated("KV copy")
        with _as_errors(self._model.device), current(self._model.device):
            memory.export_blocks(block_ids, buffer)

    @torch.inference_mode()
    def import_kv(
        self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8], copies: Sequence[BlockCopy] = ()
    ) -> None:
        """See `KvRunner`."""
        memory = self._allocated("KV copy")
        self.begin_ahead()  # decodes first: that of an ended request may write a block that is imported below
        with _as_errors(self._model.device), current(self._model.device):
            self._copy(copies, memory)
            memory.import_blocks(block_ids, buffer)

    @torch.inference_mode()
    def load_adapter(self, name: str, slot: int) -> None:
        """See `AdapterRunner`."""
        if self._adapters is None:
            raise ExecutorError(f"adapter {name!r}: this runner has no slots for adapters.")
        self.begin_ahead()  # a decode of a request that has ended may need the adapter that is in the slot
        self._adapters.load(name, slot)

    def mark(self) -> object:
        """See `KvRunner`."""
        with current(self._model.device):
            return marked() if self._model.device.type == "cuda" else None

    @torch.inference_mode()
    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        """See `KvRunner`."""
        memory = self._allocated("KV copy")
        with _as_errors(self._model.device), current(self._model.device):
            if after is None:
                self._copy(copies, memory)
            else:
                memory.copy_beside(copies, after)

    def _allocated(self, what: str) -> KvMemory:
        if self._memory is None:
            raise ExecutorError(f"{what}: there is no KV memory yet. Call `allocate` first.")
        return self._memory

    def close(self) -> None:
        """See `ModelRunner`."""
        self._memory = self._graphs = self._ahead = None
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        # A single rank has created no process group, and must not end one that other code of this process has created.
        if self._options.num_ranks > 1:
            leave_ranks()

    def _submitted(self, step: StepInput, memory: KvMemory) -> PendingStep:
        on_cuda = self._model.device.type == "cuda"
        step = self._ranks.part(step)
        started: float | torch.cuda.Event = marked() if on_cuda else time.perf_counter()
        self._take_changes(step, memory)
        before = self._state.num_computed.copy()
        try:
            computed = self._computed(step, memory)
        except _ROW_ERRORS as error:
            # With several ranks, rows cannot be computed again: the other ranks did not fail, and would not take part.
            if not self._ranks.is_alone:
                raise
            self._state.num_computed[:] = before
            computed = self._apart(step, memory, error)
        computed.tokens = to_host(computed.tokens)
        done = TorchStep(computed, started)
        if self._faults:
            rows = (*step.decodes, *(chunk.slot for chunk in step.chunks))
            done.faults = {slot: self._faults[slot] for slot in rows if slot in self._faults}
        if isinstance(started, float):
            done.duration_s = time.perf_counter() - started - self._ranks.stage.take_waited_s()
        else:
            done.done = marked()
        return done

    def _computed(self, step: StepInput, memory: KvMemory) -> Computed:
        # With KV parallelism, decodes are sent as chunks too. So without chunks, this group has nothing to compute.
        if self._ranks.groups is not None and not step.chunks:
            return Computed(np.empty(0, np.int64), torch.empty(0, dtype=torch.int64))
        if self._faults:
            for slot in (*step.decodes, *(chunk.slot for chunk in step.chunks)):
                if slot in self._faults:
                    raise ValueError(self._faults[slot])
        for chunk in step.chunks:
            if chunk.num_outputs is not None:
                self._sampler.set_num_outputs(chunk.slot, chunk.num_outputs)
        batch = self._state.take(step)
        given, vocab_size = batch.token_ids, self._model.facts.vocab_size
        if given.size and not 0 <= given.min() <= given.max() < vocab_size:
            wrong = given[(given < 0) | (given >= vocab_size)][0]
            raise IndexError(f"token {wrong} is not among the model's {vocab_size}")
        return self._compute(batch, batch.sampled_slots, memory)

    def _apart(self, step: StepInput, memory: KvMemory, error: Exception) -> Computed:
        """Compute a failed step row by row; rows that fail on their own are added to the faults.

        Raises an error if the device no longer responds. Raises `error` if a row reads KV that a failed row should have
        written. Also raises `error` if all rows fail and at least two of them had no fault before this step.
        """
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        tokens: dict[int, list[int]] = {}
        logprobs: list[Logprobs] = []
        scores: Scores = {}
        rows = [(slot, StepInput(decodes=[slot])) for slot in step.decodes]
        rows += [(chunk.slot, StepInput([chunk])) for chunk in step.chunks]
        failed: dict[int, Exception] = {slot: error for slot, _ in rows if slot in self._faults}
        num_known, unwritten = len(failed), set[int]()
        for slot, row in rows:
            written, read = self._blocks(row)
            if slot in failed:
                unwritten |= written
                continue
            if not unwritten.isdisjoint(read):
                raise error
            before = self._state.num_computed[slot]
            try:
                computed = self._computed(row, memory)
            except _ROW_ERRORS as problem:
                self._state.num_computed[slot] = before
                failed[slot] = problem
                unwritten |= written
                continue
            tokens[slot] = computed.tokens.tolist()
            logprobs += computed.logprobs
            scores |= computed.prompt_logprobs
        if len(failed) == len(rows) > num_known + 1:
            raise error
        for slot, found_wrong in failed.items():
            if slot not in self._faults:
                self._fault(slot, found_wrong)
        counts = dict.fromkeys(step.decodes, 1) | {chunk.slot: chunk.num_sampled for chunk in step.chunks}
        slots = [slot for slot, count in counts.items() for _ in range(count)]
        found = [token for slot, count in counts.items() for token in tokens.get(slot) or [NO_TOKEN] * count]
        sampled = torch.tensor(found, dtype=torch.int64)
        return Computed(np.array(slots, np.int64), sampled, logprobs, scores)

    def _blocks(self, row: StepInput) -> tuple[set[int], set[int]]:
        """Return the KV blocks that a step of one row writes, and those that it reads."""
        if row.chunks:
            slot, start = row.chunks[0].slot, row.chunks[0].num_computed
            end = start + len(row.chunks[0].token_ids)
        else:
            slot, start = row.decodes[0], int(self._state.num_computed[row.decodes[0]])
            end = start + 1
        size = self._options.block_size
        table = self._state.tables[slot]
        return set(table[start // size : -(-end // size)].tolist()), set(table[: -(-end // size)].tolist())

    def _fault(self, slot: int, error: Exception) -> None:
        self._faults[slot] = f"it cannot be computed ({' '.join(f'{type(error).__name__}: {error}'.split())})"
        _log.warning("slot %d is left out of steps: %s", slot, self._faults[slot])

    def _take_changes(self, step: StepInput, memory: KvMemory) -> None:
        for slot in step.freed:
            self._sampler.remove(slot)
            self._faults.pop(slot, None)
        for new in step.new:
            self._check_new(new)
            try:
                if self._adapters is not None:
                    self._adapters.note(new.slot, new.adapter)
                self._sampler.add(new)
            except _ROW_ERRORS as error:
                self._fault(new.slot, error)
        if step.tables:
            self._state.update_tables(step.tables, memory.num_blocks)
        if step.copies:
            self._copy(step.copies, memory)

    def _copy(self, copies: Sequence[BlockCopy], memory: KvMemory) -> None:
        groups = self._ranks.groups
        if groups is None:
            memory.copy(copies)
            return
        # Groups share host blocks, so a copy of one group may write a block that another group's earlier copy reads.
        # So all groups complete their copies in one direction before any group begins those in the other direction.
        for _, run in groupby(copies, key=lambda one: one.direction):
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
            groups.wait_for_all()
            memory.copy([one for one in run if one.group == groups.own])

    def _check_new(self, new: NewRow) -> None:
        if not 0 <= new.slot < self._options.max_requests:
            raise ExecutorError(f"step: no such slot ({new.slot}). Slots are 0 to {self._options.max_requests - 1}.")

    def _compute(self, batch: HostBatch, slots: Ints, memory: KvMemory) -> Computed:
        state, likeliest = self._state, None
        scores: Scores = {}
        if self._adapters is not None:
            self._adapters.begin(batch.slots, batch.query_lens)
        if self._graphs is not None and self._graphs.takes(batch):
            logits, likeliest = self._graphs.run(batch)
            places = None
        else:
            inputs = state.tensors(batch)
            places = inputs.slots
            if batch.followers:
                logits = self._scored(batch, inputs, memory, scores)
            else:
                logits = self._logits(inputs, inputs.rows, memory)
        if not slots.size:
            return Computed(slots, torch.empty(0, dtype=torch.int64), [], scores)
        tokens, logprobs = self._sampler.sample(logits, slots, likeliest, batch.draft_offsets)
        if tokens is not likeliest:
            places = to_device(slots, self._model.device) if places is None else places
            state.last_tokens.index_copy_(0, places, tokens.clamp_min(0))
        return Computed(slots, tokens, [] if logprobs is None else [logprobs], scores)

    def _logits(self, inputs: BatchInputs, rows: torch.Tensor, memory: KvMemory) -> torch.Tensor:
        return self._model.forward(inputs.token_ids, inputs.positions, rows, inputs.metadata, memory.caches)

    def _scored(self, batch: HostBatch, inputs: BatchInputs, memory: KvMemory, scores: Scores) -> torch.Tensor:
        """Return the logits of the sampled rows, and compute log-probabilities of the prompt tokens to score.

        Memory is reserved for the logits of sampled rows only, so the logits of all tokens of a long chunk may not fit.
        Logits that do not fit are computed in further passes, which write the same K and V into the same slots.
        """
        ends = np.cumsum(batch.query_lens)
        starts = ends - batch.query_lens
        sampled = batch.sampled_rows
        wanted = [(int(starts[k]) + i, k, one) for k, ones in batch.followers.items() for i, one in enumerate(ones)]
        # The logits of this many rows, with their copies, fit into the memory reserved for sampling (`_LOGIT_COPIES`).
        most = 2 * min(self._options.max_requests, self._options.max_step_tokens)
        if self._ranks.stage.count > 1 or self._ranks.groups is not None:
            most = len(wanted)  # the other ranks make one pass, so this rank must make one, too
        found: torch.Tensor | None = None
        for begin in range(0, len(wanted), most):
            piece = wanted[begin : begin + most]
            # `union1d` sorts the rows, which `searchsorted` needs. A pass over all rows returns its logits in this order.
            rows = np.union1d(sampled, [row for row, _, _ in piece]).astype(np.int64)
            logits = self._logits(inputs, to_device(rows, self._model.device), memory)
            if found is None:
                found = logits[to_device(np.searchsorted(rows, sampled), self._model.device)]
            for sequence, group in groupby(piece, key=lambda one: one[1]):
                given = list(group)
                places = to_device(np.searchsorted(rows, [row for row, _, _ in given]), self._model.device)
                slot = int(batch.slots[sequence])
                entries = self._sampler.score(logits[places], [token for _, _, token in given], slot)
                scores.setdefault(slot, []).append(entries)
        assert found is not None
        return found


@contextmanager
def _as_errors(device: torch.device) -> Iterator[None]:
    """Convert errors of a step to `ExecutorError`."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ExecutorError(f"step: out of memory on {device} ({error})") from error
    except _ROW_ERRORS as error:
        raise ExecutorError(f"step: {type(error).__name__} on {device} ({error})") from error


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
