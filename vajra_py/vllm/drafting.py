"""Speculative decoding of a vLLM (`--speculative-config`): supported drafters, sizes of drafts, and acceptance counts.

vLLM's workers propose and verify draft tokens. The mechanism plans as many of the proposed tokens as fit into a step.
If steps are formed before the proposals are known (asynchronous scheduling), the mechanism plans the largest number of
draft tokens that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vajra_py.config.drafts import DraftConfig

_METHODS = ("ngram", "suffix", "eagle", "eagle3", "mtp")
"""Supported methods of drafting."""


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes of a vLLM's drafts.

    Attributes:
        num_tokens: maximum number of drafts per decode and step; 0 without drafts.
        unseen: True if steps are formed before their drafts are known (asynchronous scheduling); the largest number of
            drafts is then planned for each decode.
        lookahead_tokens: number of tokens after a request's drafts for which blocks are allocated in advance.
        publishes_late: True if accepted tokens enter the prefix cache only with their request's next step.
        drops_last_hit: True if the last block of a prefix hit is recomputed.
    """

    num_tokens: int = 0
    unseen: bool = False
    lookahead_tokens: int = 0
    publishes_late: bool = False
    drops_last_hit: bool = False

    @property
    def config(self) -> DraftConfig:
        """Draft settings of the replica, which follow vLLM's rules."""
        return DraftConfig(
            num_tokens=self.num_tokens,
            lookahead_tokens=self.lookahead_tokens,
            rejected_blocks="keep",
            past_max_tokens=True,
            publish="schedule" if self.publishes_late else "complete",
            pad_admitted=True,
        )


def draft_sizes_of(vllm_config: Any, version: tuple[int, int]) -> DraftSizes:
    """Return the sizes of drafts that follow from a vLLM's options and version."""
    if vllm_config.speculative_config is None:
        return DraftSizes()
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    return DraftSizes(
        num_tokens=vllm_config.num_speculative_tokens,
        unseen=is_async,
        lookahead_tokens=vllm_config.num_lookahead_tokens,
        publishes_late=version < (0, 33) and not is_async,
        drops_last_hit=bool(vllm_config.speculative_config.use_eagle_block_drop()),
    )


def unsupported_drafts(config: Any) -> Iterator[tuple[str, str]]:
    """Yield each unsupported option of speculative decoding, with the reason."""
    speculative = config.speculative_config
    if speculative is None:
        return
    where = "--speculative-config"
    if speculative.method not in _METHODS:
        methods = ", ".join(_METHODS)
        yield (
            where,
            f"other methods than {methods} were not compared with vLLM's own scheduler (got {speculative.method!r})",
        )
    elif speculative.max_num_new_slots_for_drafting or config.num_prefill_lookahead_tokens > 1:
        yield (
            where,
            "drafters that read further ahead than one token, or take slots of the step, were not compared with vLLM's own scheduler",
        )
    if getattr(config, "num_hash_lookahead_tokens", 0):
        yield (
            where,
            "hashes of blocks that cover tokens behind them are not made here; set disable_lookahead_block_hashes",
        )
    if speculative.num_speculative_tokens_per_batch_size:
        yield (
            where,
            "num_speculative_tokens_per_batch_size is left to policies, which say how many drafts a request has",
        )
    threshold = config.scheduler_config.long_prefill_token_threshold
    if 0 < threshold <= speculative.num_speculative_tokens:
        yield "--long-prefill-token-threshold", f"is below the tokens of a decode with its drafts (got {threshold})"


def num_tokens_of(request_id: str, step: Any) -> int:
    """Return the number of a request's tokens in a step, without drafts."""
    count: int = step.num_scheduled_tokens.get(request_id, 0)
    return count - len(step.scheduled_spec_decode_tokens.get(request_id, ()))


def without_drafts(step: Any) -> Mapping[str, int]:
    """Return the number of each request's tokens in a step, without drafts, since these count only if accepted."""
    counts: Mapping[str, int] = step.num_scheduled_tokens
    drafts = step.scheduled_spec_decode_tokens
    return {name: count - len(drafts.get(name, ())) for name, count in counts.items()} if drafts else counts


class DraftStats:
    """Counts of verified and accepted drafts, for vLLM's metrics.

    Attributes:
        num_tokens: largest number of drafts per decode and step; 0 without drafts.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._stats: Any = None

    def observe(self, step: Any, output: Any, known: Mapping[str, Any]) -> None:
        """Count the drafts that a step verified, for requests in `known`."""
        from vllm.v1.spec_decode.metrics import SpecDecodingStats

        if self._stats is None:
            self._stats = SpecDecodingStats.new(self.num_tokens)
        places, sampled, invalid = output.req_id_to_index, output.sampled_token_ids, step.num_invalid_spec_tokens or {}
        for name, drafts in step.scheduled_spec_decode_tokens.items():
            if name in known and (tokens := sampled[places[name]]):
                num_drafts = len(drafts) - invalid.get(name, 0)
                self._stats.observe_draft(num_draft_tokens=num_drafts, num_accepted_tokens=len(tokens) - 1)

    def take(self) -> Any:
        """Return vLLM's `SpecDecodingStats` since the last call; None if no drafts were verified."""
        stats, self._stats = self._stats, None
        return stats if stats is not None and stats.num_drafts else None
