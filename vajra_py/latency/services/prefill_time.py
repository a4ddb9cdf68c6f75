"""Prefill time of a prompt alone on a replica, in the chunks that the replica scheduler would choose.

Source: Vajra's scheduling architecture and Medha (arXiv:2409.17264): a table has the prefill time of each multiple of
256 tokens, and the remaining time of a prompt is the difference of two entries. An entry is computed on first use.
"""

from __future__ import annotations

from vajra_py.contract.latency import BatchFeatures, LatencyModel
from vajra_py.contract.policies import SoloChunkSize
from vajra_py.errors import ExecutorError

GRAIN_TOKENS = 256
_ENDLESS = 1 << 40


class PrefillTimeTable:
    """Predicted prefill times of lone prompts; implements `PrefillTime`.

    A prompt's time is the sum of the times that `latency` predicts for its chunks. All prompts have the chunks that
    `solo_chunk_size` returns for an endless prompt, except for the last chunk: it is cut off at the end of the prompt,
    or extended to the end if the scheduler allows a larger last chunk. With `num_stages` above 1, chunks follow one
    another through the pipeline without waiting, so the time is divided by the number of stages.
    """

    def __init__(self, latency: LatencyModel, solo_chunk_size: SoloChunkSize, num_stages: int = 1) -> None:
        self._latency = latency
        self._solo_chunk_size = solo_chunk_size
        self._stages = num_stages
        self._table = [0.0]  # time of a prompt of GRAIN_TOKENS * index tokens, by index
        # The current chunk contains the last token of the longest prompt in the table.
        self._done = 0  # number of tokens before the current chunk
        self._done_s = 0.0  # seconds from the prompt's start to the start of the current chunk
        self._previous = (0, 0.0)  # the same two values for the chunk before the current one
        self._chunk = 0  # size of the current chunk, or 0 while unknown

    def total_s(self, num_prompt_tokens: int) -> float:
        """Return the seconds for the whole prompt, with its length rounded up to a multiple of 256 tokens."""
        return self._entry(-(-num_prompt_tokens // GRAIN_TOKENS))

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        """Return the seconds for the rest of the prompt; never negative, and 0 when all tokens are done.

        The prompt's length is rounded up, and the done tokens are rounded down, to multiples of 256.
        """
        if num_done_tokens >= num_prompt_tokens:
            return 0.0
        whole = self._entry(-(-num_prompt_tokens // GRAIN_TOKENS))
        return max(0.0, whole - self._entry(num_done_tokens // GRAIN_TOKENS))

    def _entry(self, index: int) -> float:
        if index >= len(self._table):
            self._extend(index)
        return self._table[index]

    def _extend(self, index: int) -> None:
        table = self._table
        while len(table) <= index:
            num_tokens = len(table) * GRAIN_TOKENS
            self._advance(num_tokens)
            time = self._done_s + self._chunk_s(self._done, num_tokens - self._done)
            start, start_s = self._previous
            if num_tokens - self._done < GRAIN_TOKENS and start < self._done:
                # A prompt that is slightly longer than the previous chunks may need no further chunk, if the scheduler
                # allows a larger last chunk.
                left = num_tokens - start
                if self._solo_chunk_size(start, left) >= left:
                    time = start_s + self._chunk_s(start, left)
            table.append(time / self._stages)

    def _advance(self, num_tokens: int) -> None:
        """Advance the current chunk until it contains token number `num_tokens` of the prompt."""
        while True:
            if not self._chunk:
                self._chunk = self._solo_chunk_size(self._done, _ENDLESS)
                if self._chunk < 1:
                    raise ExecutorError(
                        f"prefill time: the replica scheduler gives a lone prompt {self._chunk} tokens after {self._done}. "
                        "A prompt that has the replica to itself must get at least 1."
                    )
            if self._done + self._chunk >= num_tokens:
                return
            self._previous = (self._done, self._done_s)
            self._done_s += self._chunk_s(self._done, self._chunk)
            self._done += self._chunk
            self._chunk = 0

    def _chunk_s(self, num_context_tokens: int, num_tokens: int) -> float:
        return self._latency.batch_time_s(BatchFeatures().with_chunk(num_tokens, num_context_tokens))
