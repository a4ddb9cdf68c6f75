"""Drafts by n-gram lookup (prompt lookup decoding): tokens that followed an earlier occurrence of the newest tokens.

The rule is vLLM's: take the longest n-gram at the end of the tokens that also occurred earlier, and draft the tokens
after its first occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vajra_py.engine.compute.interface import SamplingParams
from vajra_py.engine.compute.sampling.needs import forbids_tokens, needs_history


@dataclass(frozen=True, slots=True)
class NgramRules:
    """Lengths of the n-grams to look up, and the largest number of drafts per lookup."""

    min_tokens: int
    max_tokens: int
    most_drafts: int


def may_have_drafts(sampling: SamplingParams) -> bool:
    """Return True if several tokens of a request can be verified in one step.

    The sampler verifies several tokens only for requests without penalties, constraints on tokens, `min_tokens` and
    `logprobs`.
    """
    is_free = not needs_history(sampling) and not forbids_tokens(sampling)
    return is_free and not sampling.logit_bias and sampling.logprobs is None and not sampling.min_tokens


class NgramIndex:
    """Tokens of one request, with the first occurrence of each n-gram."""

    __slots__ = ("_first", "_rules", "_tokens")

    def __init__(self, rules: NgramRules, tokens: Sequence[int]) -> None:
        self._rules = rules
        self._tokens: list[int] = []
        self._first: list[dict[tuple[int, ...], int]] = [{} for _ in range(rules.max_tokens + 1)]
        """By length and n-gram, the index of the token that follows the first occurrence of the n-gram."""
        self.extend(tokens)

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        known, lengths = self._tokens, range(self._rules.min_tokens, self._rules.max_tokens + 1)
        for token in tokens:
            place = len(known)
            for length in lengths:
                if length > place:
                    break
                self._first[length].setdefault(tuple(known[place - length : place]), place)
            known.append(token)

    def drafts(self) -> list[int]:
        """Find the longest n-gram at the end that occurred earlier; return the tokens after its first occurrence.

        Return an empty list if no n-gram at the end occurred earlier.
        """
        known, rules = self._tokens, self._rules
        for length in range(min(rules.max_tokens, len(known)), rules.min_tokens - 1, -1):
            place = self._first[length].get(tuple(known[len(known) - length :]))
            if place is not None:
                return known[place : place + rules.most_drafts]
        return []
