"""Assemble each `SchedulerOutput`, in which vLLM's workers read what a step computes and what has changed since the last.

vLLM's workers get only such messages, of plans (`vajra_py.vllm.messages`) and of the engine's steps
(`vajra_py.vllm.runner`). Blocks are given by their numbers in this project's KV memory: block `n` is vLLM's block `n + 1`, whose
block 0 is unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


class Tables(tuple[list[int], ...]):
    """Entries of several block tables of one request, in vLLM's numbers."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return any(map(len, self))


class Scheduled(NamedTuple):
    """Tokens of one request that a step computes.

    Attributes:
        name: the request's name at the workers.
        num_computed: tokens in KV memory before.
        blocks: entries of the block table, or tables, that the workers do not have, or all where they have none that counts.
    """

    name: str
    num_tokens: int
    num_computed: int
    blocks: Sequence[int] | Tables


class StepMessage:
    """Puts the message of the next step together, from the step before on.

    Attributes:
        finished: requests that ended, and that workers may forget.
        preempted: requests that lost their KV blocks.
        num_drafts: tokens that the workers are to propose for each request after the step.
    """

    __slots__ = (
        "_cleared",
        "_drafts",
        "_known",
        "_new",
        "_num_scheduled",
        "_num_tokens",
        "finished",
        "num_drafts",
        "preempted",
    )

    def __init__(self, num_drafts: int = 0) -> None:
        self.num_drafts = num_drafts
        self._begin()

    def _begin(self) -> None:
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self._new: list[NewRequestData] = []
        self._known = CachedRequestData(
            req_ids=[],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[],
            num_computed_tokens=[],
            num_output_tokens=[],
        )
        self._num_scheduled: dict[str, int] = {}
        self._num_tokens = 0
        self._cleared: list[int] = []
        self._drafts: dict[str, list[int]] = {}

    def add_new(
        self,
        scheduled: Scheduled,
        prompt: list[int],
        sampling: SamplingParams,
        all_tokens: list[int] | None = None,
        lora: LoRARequest | None = None,
    ) -> None:
        """Compute tokens of a request that the workers do not know, with its adapter; `all_tokens` (prompt and output) are for vLLM's second runner."""
        self._schedule(scheduled)
        self._new.append(
            NewRequestData(
                req_id=scheduled.name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=sampling,
                pooling_params=None,
                block_ids=_tables(scheduled.blocks),
                num_computed_tokens=scheduled.num_computed,
                lora_request=lora,
                prefill_token_ids=all_tokens,
            )
        )

    def add_known(
        self,
        scheduled: Scheduled,
        num_outputs: int,
        *,
        is_resumed: bool = False,
        all_tokens: list[int] | None = None,
    ) -> None:
        """Compute tokens of a request that the workers know.

        Its blocks are added to its block table, or replace it where it is resumed. `all_tokens` are prompt and output of one that
        was not part of the step before.
        """
        name, num_tokens, num_computed, blocks = scheduled
        self.go_on(name, num_tokens, num_computed, num_outputs, blocks)
        if is_resumed:
            self._known.resumed_req_ids.add(name)
        if all_tokens is not None:
            self._known.all_token_ids[name] = all_tokens

    def go_on(
        self, name: str, num_tokens: int, num_computed: int, num_outputs: int, blocks: Sequence[int] | Tables
    ) -> None:
        """Compute tokens of a request that was part of the step before; `blocks` are new ones."""
        self._num_scheduled[name] = num_tokens
        self._num_tokens += num_tokens
        known = self._known
        known.req_ids.append(name)
        known.new_block_ids.append(_tables(blocks) if blocks else None)
        known.num_computed_tokens.append(num_computed)
        known.num_output_tokens.append(num_outputs)

    def add_decodes(
        self,
        num_tokens: Mapping[str, int],
        blocks: Mapping[int, Sequence[int] | Tables],
        num_computed: Sequence[int],
        num_outputs: Sequence[int],
    ) -> None:
        """Compute so many tokens of each of these requests, all part of the step before; `blocks` are new ones, by place among them."""
        added: list[tuple[list[int], ...] | None] = [None] * len(num_tokens)
        for place, table in blocks.items():
            added[place] = _tables(table)
        known = self._known
        known.req_ids += num_tokens
        known.new_block_ids += added
        known.num_computed_tokens += num_computed
        known.num_output_tokens += num_outputs
        self._num_scheduled.update(num_tokens)
        self._num_tokens += sum(num_tokens.values())

    def verify(self, drafts: Mapping[str, list[int]]) -> None:
        """Verify these drafts, which are the last computed tokens of each request; -1 for a place without a draft."""
        self._drafts.update(drafts)

    def clear(self, blocks: Sequence[int]) -> None:
        """Clear blocks before the step reads any."""
        self._cleared += _in_vllm(blocks)

    def clear_numbered(self, blocks: Sequence[int]) -> None:
        """Clear blocks of these numbers, which are vLLM's."""
        self._cleared += blocks

    def take(self) -> SchedulerOutput:
        """Return the message, and begin the next one."""
        message = SchedulerOutput(
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=self._known,
            num_scheduled_tokens=self._num_scheduled,
            total_num_scheduled_tokens=self._num_tokens,
            scheduled_spec_decode_tokens=self._drafts,
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=self.preempted,
            new_block_ids_to_zero=self._cleared or None,
            num_spec_tokens_to_schedule=self.num_drafts,
        )
        self._begin()
        return message

    def _schedule(self, scheduled: Scheduled) -> None:
        self._num_scheduled[scheduled.name] = scheduled.num_tokens
        self._num_tokens += scheduled.num_tokens


def _tables(blocks: Sequence[int] | Tables) -> tuple[list[int], ...]:
    return tuple(blocks) if isinstance(blocks, Tables) else (_in_vllm(blocks),)


def _in_vllm(blocks: Sequence[int]) -> list[int]:
    return [block + 1 for block in blocks]
