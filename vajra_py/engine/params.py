"""Validate a request's sampling parameters and prompt.

Every problem is one line; nothing here loads a tensor library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from vajra_py.engine.compute.interface import SamplingParams
from vajra_py.errors import ConfigError, Problem

MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True)
class _Range:
    name: str
    low: float
    high: float
    says: str
    open_low: bool = False


_RANGES = (
    _Range("temperature", 0.0, float("inf"), "Allowed: 0 (greedy) or more"),
    _Range("top_p", 0.0, 1.0, "Allowed: above 0, up to 1", open_low=True),
    _Range("min_p", 0.0, 1.0, "Allowed: 0 to 1"),
    _Range("presence_penalty", -2.0, 2.0, "Allowed: -2 to 2"),
    _Range("frequency_penalty", -2.0, 2.0, "Allowed: -2 to 2"),
    _Range("repetition_penalty", 0.0, float("inf"), "Allowed: above 0", open_low=True),
)


def check_sampling(params: SamplingParams, where: str = "sampling", vocab_size: int | None = None) -> None:
    """Raises `ConfigError` with everything about the parameters that cannot be."""
    problems = [problem for one in _RANGES for problem in _out_of_range(params, one, where)]
    problems += _wrong_counts(params, where)
    if params.min_tokens > params.max_tokens:
        message = f"is above max_tokens ({params.min_tokens} and {params.max_tokens})"
        problems.append(Problem(f"{where}.min_tokens", message, "Allowed: 0 to max_tokens"))
    if any(not text for text in params.stop):
        problems.append(Problem(f"{where}.stop", "has an empty string", "Allowed: strings of one character or more"))
    wrong = [token for token in params.stop_token_ids if token < 0 or (vocab_size is not None and token >= vocab_size)]
    if wrong:
        most = "" if vocab_size is None else f" to {vocab_size - 1}"
        problems.append(
            Problem(f"{where}.stop_token_ids", f"are no tokens of the model ({wrong[:5]})", f"Allowed: 0{most}")
        )
    if problems:
        raise ConfigError(problems)


def _out_of_range(params: SamplingParams, limits: _Range, where: str) -> list[Problem]:
    value = getattr(params, limits.name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if is_number and limits.low <= value <= limits.high and not (limits.open_low and value == limits.low):
        return []
    return [Problem(f"{where}.{limits.name}", f"is out of range ({value!r})", limits.says)]


def _wrong_counts(params: SamplingParams, where: str) -> list[Problem]:
    wanted = (
        ("max_tokens", params.max_tokens, 1, None),
        ("min_tokens", params.min_tokens, 0, None),
        ("top_k", params.top_k, 1, None),
        ("logprobs", params.logprobs, 0, MAX_LOGPROBS),
        ("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS),
        ("seed", params.seed, 0, 2**63 - 1),
    )
    problems = []
    for name, value, low, high in wanted:
        if value is None and name in ("top_k", "logprobs", "prompt_logprobs", "seed"):
            continue
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < low or (high is not None and value > high):  # type: ignore[operator]
            allowed = f"Allowed: {low} or more" if high is None else f"Allowed: {low} to {high}"
            problems.append(Problem(f"{where}.{name}", f"is out of range ({value!r})", allowed))
    return problems


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt may be.

    Attributes:
        vocab_size: tokens of the model.
        max_model_len: longest sequence.
        max_request_tokens: most tokens, prompt and output together, of one request here (model and KV memory).
    """

    vocab_size: int
    max_model_len: int
    max_request_tokens: int


def check_prompt(token_ids: Sequence[int], limits: PromptLimits, where: str = "prompt") -> None:
    """Raises `ConfigError` when the prompt is empty, too long for any output, or not of the model's vocabulary."""
    if not len(token_ids):
        raise ConfigError(Problem(where, "is empty", "Allowed: one token or more"))
    longest = limits.max_request_tokens
    if len(token_ids) >= longest:
        why = "the model's length" if longest == limits.max_model_len else "the KV memory of a replica"
        message = f"is too long ({len(token_ids)} tokens; {why} is {longest} with the output)"
        raise ConfigError(Problem(where, message, f"Allowed: up to {longest - 1} tokens"))
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        message = f"has a token that is not in the model's vocabulary ({wrong})"
        raise ConfigError(Problem(where, message, f"Allowed: 0 to {limits.vocab_size - 1}"))
