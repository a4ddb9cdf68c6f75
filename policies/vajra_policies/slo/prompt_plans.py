"""The plan of SLOs-Serve: the largest set of prompts whose TTFT SLOs can all be met.

Source: Chen et al., "SLOs-Serve: Optimized Serving of Multi-SLO LLMs" (arXiv:2504.08784), dynamic programming over requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt that a plan may contain."""

    num_tokens: int
    num_steps: int
    """Number of whole steps until the prompt's first token is due."""
    is_admitted: bool = False
    """True if an earlier plan contains the prompt, so that every later plan must contain it too."""


def most_in_time(prompts: Sequence[Prompt], step_tokens: int, num_running: int) -> list[bool]:
    """Return for each prompt True if it belongs to the largest set whose deadlines can all be met and that contains all
    prompts admitted earlier.

    `prompts` are ordered by deadline. Each running request and each finished prompt takes one token of a step to
    decode. The first k prompts of a set may thus have at most (steps until the k-th deadline) * (step_tokens -
    num_running - (k - 1)) tokens, for each k.

    Dynamic programming over i finds, with O(n^2) comparisons, the least total of tokens for each number of prompts
    chosen from the first i.
    """
    least: list[tuple[int, tuple[int, ...]] | None] = [(0, ())]
    num_before = 0
    for index, prompt in enumerate(prompts):
        following: list[tuple[int, tuple[int, ...]] | None] = [None] * (len(least) + 1)
        for num, state in enumerate(least):
            if state is None:
                continue
            if not prompt.is_admitted and (following[num] is None or state < following[num]):  # type: ignore[operator]
                following[num] = state
            total = state[0] + prompt.num_tokens
            is_in_time = total <= prompt.num_steps * max(step_tokens - num_running - num, 0)
            # An admitted prompt stays in the plan even if it is late. If it is late, only the set of all prompts
            # admitted earlier and no others (`num == num_before`) takes it.
            if is_in_time or (prompt.is_admitted and num == num_before):
                taken = (total, (*state[1], index))
                known = following[num + 1]
                following[num + 1] = taken if known is None or taken < known else known
        least = following
        num_before += prompt.is_admitted
    chosen = next(state[1] for state in reversed(least) if state is not None)
    return [index in chosen for index in range(len(prompts))]
