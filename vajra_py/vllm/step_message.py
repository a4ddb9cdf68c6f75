"""Assemble each `SchedulerOutput`: vLLM's message to its workers about a step and the changes since the last one.

It is used for plans (`vajra_py.vllm.messages`) and for the engine's steps (`vajra_py.vllm.runner`). Blocks, except
those of `Tables`, are given by their numbers in this project's KV memory: block `n` is vLLM's block `n + 1`, since
vLLM's block 0 is unused.
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
    """Tokens that a step computes for one request.

    Attributes:
        name: the request's name at the workers.
        num_computed: number of tokens in KV memory before the step.
        blocks: unsent entries of the block table (or tables); all entries for a new or resumed request.
    """

    name: str
    num_tokens: int
    num_computed: int
    blocks: Sequence[int] | Tables


class StepMessage:
    """Message of the next step. It collects the changes since the previous message was taken.

    Attributes:
        finished: names of ended requests, which the workers drop.
        preempted: names of requests that lost their KV blocks.
        num_drafts: number of draft tokens that the workers propose for each request after the step.
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
        """Add tokens of a request that is new to the workers.

        `all_tokens` (prompt and output) are needed for vLLM's second model runner; `lora` is the request's adapter.
        """
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
        """Add tokens of a request that was sent to the workers before.

        The blocks are appended to the request's block table, or replace it if the request is resumed. `all_tokens`
        (prompt and output) are needed if the request was not part of the step before.
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
        """Add tokens of a request that was part of the step before; `blocks` are its new blocks."""
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
        """Add tokens of requests that were all part of the step before.

        `num_tokens` holds numbers of tokens by request name; `blocks` holds new blocks by position in `num_tokens`.
        """
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
        """Set the draft tokens to verify, the last scheduled tokens of each request; -1 marks an unknown token."""
        self._drafts.update(drafts)

    def clear(self, blocks: Sequence[int]) -> None:
        """Have the workers zero these blocks before the step."""
        self._cleared += _in_vllm(blocks)

    def clear_numbered(self, blocks: Sequence[int]) -> None:
        """Have the workers zero these blocks, given by vLLM's numbers, before the step."""
        self._cleared += blocks

    def take(self) -> SchedulerOutput:
        """Return the message, and start the next one."""
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
    if isinstance(blocks, Tables):
        return tuple(blocks)
    return ([blocks[0] + 1],) if len(blocks) == 1 else (_in_vllm(blocks),)


def _in_vllm(blocks: Sequence[int]) -> list[int]:
    return [block + 1 for block in blocks]
