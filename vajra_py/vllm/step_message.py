"""Assemble a `SchedulerOutput`, in which vLLM's workers read what a step computes and what has changed since the last."""

from __future__ import annotations

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


class StepMessage:
    """One step's `SchedulerOutput` while it is put together. The lists of requests that the workers know go together.

    Attributes:
        new: requests that they do not know.
        ids: requests that they know.
        blocks: of each of `ids`, entries to add to its block table, or all of a resumed one's; None: no change.
        computed: of each of `ids`, tokens in KV memory.
        outputs: of each of `ids`, output tokens.
        resumed: those of `ids` whose block tables are replaced.
        all_tokens: tokens of those of `ids` that were not part of the step before.
        num_scheduled: by request, tokens to compute.
        num_tokens: their sum.
    """

    __slots__ = ("all_tokens", "blocks", "computed", "ids", "new", "num_scheduled", "num_tokens", "outputs", "resumed")

    def __init__(self) -> None:
        self.new: list[NewRequestData] = []
        self.ids: list[str] = []
        self.blocks: list[tuple[list[int], ...] | None] = []
        self.computed: list[int] = []
        self.outputs: list[int] = []
        self.resumed: set[str] = set()
        self.all_tokens: dict[str, list[int]] = {}
        self.num_scheduled: dict[str, int] = {}
        self.num_tokens = 0

    def schedule(self, name: str, num_tokens: int) -> None:
        """Let so many tokens of a request be computed."""
        self.num_scheduled[name] = num_tokens
        self.num_tokens += num_tokens

    def add_known(self, name: str, blocks: list[int] | None, num_computed: int, num_outputs: int) -> None:
        """Add what has changed of a request that the workers know."""
        self.ids.append(name)
        self.blocks.append(None if blocks is None else (blocks,))
        self.computed.append(num_computed)
        self.outputs.append(num_outputs)

    def output(
        self, finished: set[str], preempted: set[str] | None = None, zeroed: list[int] | None = None
    ) -> SchedulerOutput:
        """Return the message, with the requests that ended or were preempted since the last, and blocks to be cleared."""
        return SchedulerOutput(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=self.ids,
                resumed_req_ids=self.resumed,
                new_token_ids=[],
                all_token_ids=self.all_tokens,
                new_block_ids=self.blocks,
                num_computed_tokens=self.computed,
                num_output_tokens=self.outputs,
            ),
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=self.num_tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
            new_block_ids_to_zero=zeroed,
        )
