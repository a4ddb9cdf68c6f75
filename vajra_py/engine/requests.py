"""Requests of an engine: convert clients' input to submissions, and ended requests to outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Self, TypeAlias

from vajra_py.contract.facts import StatedFacts
from vajra_py.contract.observer import EndReason
from vajra_py.engine.build import Engine
from vajra_py.engine.compute import SamplingParams, TokenLogprobs
from vajra_py.engine.outputs import Submission
from vajra_py.engine.params import check_backend, check_prompt, check_sampling, checked_facts, is_list, with_tuples
from vajra_py.engine.prompts import request_seed
from vajra_py.engine.tokenizer import HubTokenizer, Tokenizer, has_tokenizer, text_stream, with_bad_words
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.requests.request import Request, RequestFacts
from vajra_py.workload.files import is_encodable

Prompt: TypeAlias = str | Sequence[int]
"""Prompt as text or as token ids."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds on the engine's clock; None for events that did not happen.

    Attributes:
        arrived_at: time of arrival.
        admitted_at: time when the request was first admitted to a step.
        first_token_at: time of the first token.
        ended_at: time of the end.
        num_cached_tokens: number of prompt tokens found in the prefix cache.
        num_preemptions: number of preemptions.
    """

    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    ended_at: float | None
    num_cached_tokens: int
    num_preemptions: int

    @property
    def ttft_s(self) -> float | None:
        """Time to first token (TTFT), in seconds; None if there was no token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return the metrics of a request so far."""
        return cls(
            request.arrived_at,
            request.admitted_at,
            request.first_token_at,
            request.ended_at,
            request.num_cached_tokens,
            request.num_preemptions,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Output of one request.

    Attributes:
        request_id: the engine's id of the request.
        prompt_token_ids: tokens of the prompt.
        token_ids: generated tokens, including the one that ended the request.
        text: generated text, without special tokens, and without the stop string that ended the request unless
            `include_stop_str_in_output` is set; empty without a tokenizer.
        finish_reason: "stop", "length", "aborted", "rejected", "failed" or "expired".
        detail: reason why the request was aborted or rejected, failed or expired; may be empty.
        stopped_by: stop string or token that ended the request; None if it ended otherwise.
        logprobs: log-probabilities of each token, for requests with `logprobs`; else None.
        prompt_logprobs: log-probabilities of each prompt token (None for the first one), for requests with
            `prompt_logprobs`; else None.
        metrics: times of the request's events.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    text: str
    finish_reason: str
    detail: str
    stopped_by: str | int | None
    logprobs: Sequence[TokenLogprobs] | None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    metrics: RequestMetrics


def output_of(submission: Submission, request: Request, reason: EndReason) -> RequestOutput:
    """Return the output of a request that has ended."""
    output = submission.output
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=submission.prompt_token_ids,
        token_ids=output.token_ids,
        text=output.text,
        finish_reason=reason.value,
        detail=request.detail,
        stopped_by=output.stopped_by,
        logprobs=None if output.sampling.logprobs is None else output.logprobs,
        prompt_logprobs=None if output.sampling.prompt_logprobs is None else [None, *output.prompt_logprobs],
        metrics=RequestMetrics.of(request),
    )


def load_tokenizer(model: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a model's directory; return None if it has none."""
    return HubTokenizer(model) if has_tokenizer(model) else None


def new_submission(
    engine: Engine,
    facts: RequestFacts,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    replicaset: str,
    where: str,
) -> Submission:
    """Check the sampling parameters, and return the submission of a prompt that is checked already.

    A request with `prompt_logprobs` shares no blocks, since cached tokens have no logits. Raises `ConfigError`.
    """
    model = engine.models[replicaset]
    check_sampling(sampling, where, model.vocab_size)
    check_backend(sampling, engine.config.backend.kind, where)
    seed = request_seed(engine.config.seed, facts.request_id) if sampling.seed is None else sampling.seed
    submission = Submission.of(facts, token_ids, sampling, model.eos_token_ids, seed)
    submission.shares = sampling.prompt_logprobs is None
    return submission


class RequestMaker:
    """Creates submissions from the prompts of a Python caller; errors are raised before anything is computed."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._numbers = count()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        where: str = "prompt",
        stated: StatedFacts | None = None,
        turn: int = 0,
    ) -> Submission:
        """Create one submission. Raises `ConfigError`.

        `stated`: facts of the request other than its lengths. `turn`: number that is added to a stated seed.
        """
        engine, tokenizer = self._engine, self._tokenizer
        params = with_tuples(params)
        if turn and params.seed is not None and is_integer_kind(type(params.seed)):
            params = replace(params, seed=params.seed + turn)
        check_sampling(params, "sampling", engine.vocab_size)
        given = {} if stated is None else checked_facts(stated)
        if params.bad_words:
            params = with_bad_words(params, tokenizer)
        if params.stop and tokenizer is None:
            raise ConfigError(Problem("sampling.stop", "needs a tokenizer, and the model has none"))
        tokens = self._tokens(prompt, where)
        facts = RequestFacts(f"request-{next(self._numbers)}", len(tokens), params.max_tokens, **given)
        replicaset = engine.controller.select(facts)
        room = check_prompt(tokens, engine.prompt_limits_of(replicaset), where)
        facts = replace(facts, max_tokens=min(params.max_tokens, room))
        submission = new_submission(engine, facts, tokens, params, replicaset, "sampling")
        submission.output.stream = None if tokenizer is None else text_stream(tokenizer)
        return submission

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the prompt tokens of a conversation. Raises `ConfigError`."""
        given: object = messages
        if not is_list(given) or not all(isinstance(one, Mapping) for one in given):
            allowed = "Allowed: a list of mappings with `role` and `content`"
            raise ConfigError(Problem("messages", f"are no list of mappings ({type(given).__name__})", allowed))
        if self._tokenizer is None:
            raise ConfigError(Problem("messages", "need a tokenizer, and the model has none", "Give token ids"))
        text = self._tokenizer.render_chat(messages)
        _check_text(text, "messages")
        return self._tokenizer.encode(text, is_rendered=True)

    def _tokens(self, prompt: Prompt, where: str) -> Sequence[int]:
        if not isinstance(prompt, str):
            token_ids = list(prompt) if may_be_listed(prompt) else None
            if token_ids is None or not all(map(is_integer_kind, set(map(type, token_ids)))):
                message = f"is neither text nor token ids ({type(prompt).__name__})"
                raise ConfigError(Problem(where, message, "Allowed: str, or a list of int"))
            return list(map(int, token_ids))
        if self._tokenizer is None:
            raise ConfigError(Problem(where, "is text, and the model has no tokenizer", "Give token ids"))
        if not prompt:
            raise ConfigError(Problem(where, "is empty", "Allowed: one character or more"))
        _check_text(prompt, where)
        return self._tokenizer.encode(prompt)


def _check_text(text: str, where: str) -> None:
    if not is_encodable(text):
        message = "has half of a surrogate pair, which is no character"
        raise ConfigError(Problem(where, message, "Allowed: text of whole characters"))


def may_be_listed(prompts: object) -> bool:
    """Return True if this may be a list of token ids or of prompts; False for a text, bytes, a mapping and a set."""
    has_entries = isinstance(prompts, Iterable) and getattr(prompts, "ndim", 1) > 0  # a 0-dimensional array has none
    return has_entries and not isinstance(prompts, str | bytes | bytearray | Mapping | Set)


def is_integer_kind(kind: type) -> bool:
    """Return True if values of this type are integers."""
    return issubclass(kind, Integral) and not issubclass(kind, bool)
