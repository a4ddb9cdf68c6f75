"""Validate a request's sampling parameters, facts and prompt.

Numbers must be within the range of float32, the type they are computed in. The text of each problem is one line. This
module loads no tensor library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

from vajra_py.contract.facts import FACTS, INTEGER_LIMITS, Fact, FactKind, StatedFacts
from vajra_py.contract.latency import LAST_S
from vajra_py.engine.compute.interface import SamplingParams
from vajra_py.engine.stop_strings import MAX_ALL_STOP_CHARACTERS, MAX_STOP_CHARACTERS
from vajra_py.errors import ConfigError, Problem
from vajra_py.workload.files import is_encodable

MAX_LOGPROBS = 100
MAX_BIASES = 1024
"""Largest number of tokens in `logit_bias`."""
MAX_BIAS = 100.0
SMALLEST = 2.0**-126
"""Smallest normal float32; a device may treat smaller numbers as 0."""
LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""Largest finite float32."""
LARGEST_COUNT = 2**63 - 1
"""Largest int64."""


@dataclass(frozen=True, slots=True)
class _Range:
    name: str
    low: float
    high: float
    allowed: str
    or_zero: bool = False

    def holds(self, value: object) -> bool:
        """Return True if the value is a number within these limits, or if it is 0 and `or_zero` is set."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.low <= value <= self.high or (self.or_zero and value == 0)


_POSITIVE = f"{SMALLEST:.3g} to {LARGEST:.3g}"
_RANGES = (
    _Range("temperature", SMALLEST, LARGEST, f"Allowed: 0 (greedy), or {_POSITIVE}", or_zero=True),
    _Range("top_p", SMALLEST, 1.0, f"Allowed: above 0 ({SMALLEST:.3g} or more), up to 1"),
    _Range("min_p", 0.0, 1.0, "Allowed: 0 to 1"),
    _Range("presence_penalty", -2.0, 2.0, "Allowed: -2 to 2"),
    _Range("frequency_penalty", -2.0, 2.0, "Allowed: -2 to 2"),
    _Range("repetition_penalty", SMALLEST, LARGEST, f"Allowed: above 0 ({_POSITIVE})"),
)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return True for a list, a tuple and other sequences; False for a text and for bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_LISTS: Mapping[str, tuple[str, Callable[[Any], bool] | None]] = {
    "stop": ("strings", lambda entry: isinstance(entry, str)),
    "stop_token_ids": ("tokens", None),
    "allowed_token_ids": ("tokens", None),
    "logit_bias": ("pairs of a token and a number", lambda entry: is_list(entry) and len(entry) == 2),
    "bad_words": ("strings", None),
    "bad_words_token_ids": ("sequences of tokens", is_list),
}
"""For each parameter with several entries: what the entries are, and a check of one entry's type; None: `check_sampling`
checks the entries.
"""


def with_tuples(params: SamplingParams, where: str = "sampling") -> SamplingParams:
    """Return the parameters with a tuple in place of every list.

    Raises `ConfigError` if these are no `SamplingParams`, if a parameter that takes several entries is not a list, or
    if an entry has a wrong type.
    """
    given: object = params  # typed as `object`, since a caller may pass any type despite the annotation
    if not isinstance(given, SamplingParams):
        raise ConfigError(Problem(where, f"are no sampling parameters ({_shown(given)})", "Allowed: SamplingParams"))
    problems: list[Problem] = []
    tuples: dict[str, Any] = {}
    for name, (entries, is_entry) in _LISTS.items():
        value = getattr(params, name)
        if value is None and name == "allowed_token_ids":
            continue
        allowed = f"Allowed: a list or tuple of {entries}"
        if not is_list(value) and not isinstance(value, Set):
            problems.append(Problem(f"{where}.{name}", f"is not a list ({_shown(value)})", allowed))
            continue
        wrong = [_shown(entry) for entry in value if is_entry is not None and not is_entry(entry)]
        if wrong:
            message = f"has entries of another type ({', '.join(wrong[:5])})"
            problems.append(Problem(f"{where}.{name}", message, allowed))
        as_tuple = tuple(tuple(entry) if is_list(entry) else entry for entry in value)
        if as_tuple != value:
            tuples[name] = as_tuple
    if problems:
        raise ConfigError(problems)
    return replace(params, **tuples) if tuples else params


def check_sampling(params: SamplingParams, where: str = "sampling", vocab_size: int | None = None) -> None:
    """Raise a `ConfigError` that lists all problems of the parameters, if they have any."""
    problems = [problem for one in _RANGES for problem in _out_of_range(params, one, where)]
    problems += _wrong_counts(params, where)
    if _is_whole(params.min_tokens) and _is_whole(params.max_tokens) and params.min_tokens > params.max_tokens:
        message = f"is above max_tokens ({_shown(params.min_tokens)} and {_shown(params.max_tokens)})"
        problems.append(Problem(f"{where}.min_tokens", message, "Allowed: 0 to max_tokens"))
    if any(not text for text in params.stop):
        problems.append(Problem(f"{where}.stop", "has an empty string", "Allowed: strings of one character or more"))
    longest, num_characters = max(map(len, params.stop), default=0), sum(map(len, params.stop))
    if longest > MAX_STOP_CHARACTERS or num_characters > MAX_ALL_STOP_CHARACTERS:
        message = f"is too long (the longest string has {longest} characters, all together {num_characters})"
        allowed = f"Allowed: up to {MAX_STOP_CHARACTERS} characters each, {MAX_ALL_STOP_CHARACTERS} together"
        problems.append(Problem(f"{where}.stop", message, allowed))
    problems += _wrong_tokens(params, where, vocab_size)
    problems += _wrong_constraints(params, where)
    if problems:
        raise ConfigError(problems)


def check_backend(params: SamplingParams, kind: str, where: str = "sampling") -> None:
    """Raise `ConfigError` for parameters that the workers of this kind of backend cannot compute exactly."""
    if kind == "vllm" and any(len(word) > 1 for word in params.bad_words_token_ids):
        message = "has a word of several tokens, which vLLM's workers lose when a request is recomputed"
        raise ConfigError(
            Problem(f"{where}.bad_words", message, "Allowed: words of one token, or `backend: {engine: …}`")
        )


def checked_facts(stated: StatedFacts, where: str = "facts") -> dict[str, Any]:
    """Return the facts by name, with a tuple in place of every list.

    Raises a `ConfigError` that lists all facts with a wrong type or a number out of range, if there are any.
    """
    given: object = stated  # typed as `object`, since a caller may pass any type despite the annotation
    if not isinstance(given, StatedFacts):
        raise ConfigError(Problem(where, f"are no facts ({_shown(given)})", "Allowed: StatedFacts, or None"))
    facts = {fact.name: _plain(getattr(given, fact.name)) for fact in FACTS}
    problems = [problem for fact in FACTS for problem in _wrong_fact(fact, facts[fact.name], where)]
    if problems:
        raise ConfigError(problems)
    return {name: tuple(value) if is_list(value) else value for name, value in facts.items()}


def _plain(value: object) -> object:
    """Return a NumPy number as a Python number, and any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _wrong_fact(fact: Fact, value: object, where: str) -> list[Problem]:
    """Return a problem if the value is not one of the fact's kind, else nothing."""
    if value is None and fact.is_optional:
        return []
    is_right, wrong, allowed = _FACT_RULES[fact.name]
    if is_right(value):
        return []
    or_none = ", or None" if fact.is_optional else ""
    return [Problem(f"{where}.{fact.name}", f"{wrong} ({_shown(value)})", f"Allowed: {allowed}{or_none}")]


def _fact_rule(fact: Fact) -> tuple[Callable[[object], bool], str, str]:
    """Return (check of a value other than None, message for a value that fails it, description of the allowed values)."""
    match fact.kind:
        case FactKind.TEXT:
            return _is_text, "is no text", "a text of whole characters"
        case FactKind.TEXTS:
            return _are_texts, "is no list of texts", "a list or tuple of texts of whole characters"
        case FactKind.FLAG:
            return lambda value: isinstance(value, bool), "is neither True nor False", "True or False"
        case FactKind.INTEGER:
            low, high = INTEGER_LIMITS if fact.least is None else (fact.least, INTEGER_LIMITS[1])
            numbers = _Range(fact.name, low, high, f"a whole number from {low} to {high}")
            return lambda value: _is_whole(value) and numbers.holds(value), "is out of range", numbers.allowed
        case FactKind.DURATION:
            return _Range(fact.name, 0.0, LAST_S, "").holds, "is out of range", f"0 to {LAST_S:,} s"
        case FactKind.NUMBER:
            return _Range(fact.name, -LARGEST, LARGEST, "").holds, "is out of range", f"-{LARGEST:.3g} to {LARGEST:.3g}"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and is_encodable(value)


def _are_texts(value: object) -> bool:
    return is_list(value) and all(map(_is_text, value))


_FACT_RULES = {fact.name: _fact_rule(fact) for fact in FACTS}


def _out_of_range(values: SamplingParams, limits: _Range, where: str) -> list[Problem]:
    value = getattr(values, limits.name)
    if limits.holds(value):
        return []
    return [Problem(f"{where}.{limits.name}", f"is out of range ({_shown(value)})", limits.allowed)]


def _wrong_tokens(params: SamplingParams, where: str, vocab_size: int | None) -> list[Problem]:
    """Return a problem for each field with token ids outside the vocabulary."""
    num_tokens = LARGEST_COUNT if vocab_size is None else vocab_size
    most = "" if vocab_size is None else f" to {vocab_size - 1}"
    named: dict[str, Iterable[object]] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": (token for token, _ in params.logit_bias),
        "bad_words_token_ids": (token for word in params.bad_words_token_ids for token in word),
    }
    problems = []
    for name, tokens in named.items():
        wrong = (_shown(token) for token in tokens if not (_is_whole(token) and 0 <= token < num_tokens))  # type: ignore[operator]
        few = list(islice(wrong, 5))
        if few:
            message = f"are not tokens of the model ({', '.join(few)})"
            problems.append(Problem(f"{where}.{name}", message, f"Allowed: 0{most}"))
    return problems


def _wrong_constraints(params: SamplingParams, where: str) -> list[Problem]:
    """Return the problems of constraints, apart from token ids out of range."""
    problems = []
    allowed = params.allowed_token_ids
    if allowed is not None and not allowed:
        problems.append(Problem(f"{where}.allowed_token_ids", "is empty", "Allowed: one token or more, or none of it"))
    if len(params.logit_bias) > MAX_BIASES:
        message = f"has too many tokens ({len(params.logit_bias)})"
        problems.append(Problem(f"{where}.logit_bias", message, f"Allowed: up to {MAX_BIASES}"))
    biases = _Range("logit_bias", -MAX_BIAS, MAX_BIAS, "Allowed: -100 to 100")
    wrong = [_shown(bias) for _, bias in params.logit_bias if not biases.holds(bias)]
    if wrong:
        problems.append(Problem(f"{where}.logit_bias", f"is out of range ({', '.join(wrong[:5])})", biases.allowed))
    words: Iterable[object] = params.bad_words
    if any(not isinstance(word, str) or not word.strip() or not is_encodable(word) for word in words):
        problems.append(
            Problem(
                f"{where}.bad_words", "has what is no word", "Allowed: strings of whole characters, not only blanks"
            )
        )
    if any(not word for word in params.bad_words_token_ids):
        problems.append(Problem(f"{where}.bad_words_token_ids", "has an empty sequence", "Allowed: one token or more"))
    if (
        allowed
        and all(map(_is_whole, allowed))
        and {word[0] for word in params.bad_words_token_ids if len(word) == 1} >= set(allowed)
    ):
        message = "leaves no token: `bad_words` forbid every one of them"
        problems.append(Problem(f"{where}.allowed_token_ids", message, "Allowed: one token or more besides"))
    return problems


def _shown(value: object) -> str:
    """Return the value as shown in an error; a very long integer, which Python refuses to print, is described."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _wrong_counts(params: SamplingParams, where: str) -> list[Problem]:
    wanted = (
        ("max_tokens", params.max_tokens, 1, LARGEST_COUNT),
        ("min_tokens", params.min_tokens, 0, LARGEST_COUNT),
        ("top_k", params.top_k, 1, None),
        ("logprobs", params.logprobs, 0, MAX_LOGPROBS),
        ("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS),
        ("seed", params.seed, 0, LARGEST_COUNT),
    )
    problems = []
    for name, value, low, high in wanted:
        if value is None and name in ("top_k", "logprobs", "prompt_logprobs", "seed"):
            continue
        if not _is_whole(value) or value < low or (high is not None and value > high):  # type: ignore[operator]
            allowed = f"Allowed: {low} or more" if high is None else f"Allowed: {low} to {high}"
            problems.append(Problem(f"{where}.{name}", f"is out of range ({_shown(value)})", allowed))
    return problems


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of a prompt, in tokens.

    Attributes:
        vocab_size: number of tokens in the model's vocabulary.
        max_model_len: length of the longest sequence.
        max_request_tokens: largest sum of prompt and output tokens of one request, given the model and KV memory.
    """

    vocab_size: int
    max_model_len: int
    max_request_tokens: int


def check_prompt(token_ids: Sequence[int], limits: PromptLimits, where: str = "prompt") -> int:
    """Return the largest number of tokens that may follow the prompt.

    Raises `ConfigError` if the prompt is empty, too long for any output, or contains tokens outside the vocabulary.
    """
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
        message = f"has a token that is not in the model's vocabulary ({_shown(wrong)})"
        raise ConfigError(Problem(where, message, f"Allowed: 0 to {limits.vocab_size - 1}"))
    return longest - len(token_ids)
