"""Find which earlier tokens a request's sampling depends on, and whether its constraints may forbid every token."""

from __future__ import annotations

from vajra_py.engine.compute.interface import SamplingParams


def forbids_tokens(sampling: SamplingParams) -> bool:
    """Return True if constraints may leave no token to sample."""
    return sampling.allowed_token_ids is not None or bool(sampling.bad_words_token_ids)


def needs_history(sampling: SamplingParams) -> bool:
    """Return True if penalties need counts of prompt and output tokens."""
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


def needs_prompt(sampling: SamplingParams) -> bool:
    """Return True if `NewRow` must carry the prompt."""
    return sampling.prompt_logprobs is not None or needs_history(sampling)


def needs_outputs(sampling: SamplingParams) -> bool:
    """Return True if earlier output tokens affect sampling, so that `NewRow` must carry them."""
    return needs_history(sampling) or any(len(word) > 1 for word in sampling.bad_words_token_ids)
