"""Requests of an engine: what clients ask for becomes submissions, and what has ended becomes outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Self, TypeAlias

from vajra_py.contract.facts import FACTS, StatedFacts
from vajra_py.contract.observer import EndReason
from vajra_py.engine.build import Engine
from vajra_py.engine.compute import SamplingParams, TokenLogprobs
from vajra_py.engine.outputs import Submission
from vajra_py.engine.params import check_backend, check_prompt, check_sampling
from vajra_py.engine.prompts import request_seed
from vajra_py.engine.tokenizer import HubTokenizer, Tokenizer, has_tokenizer, text_stream, with_bad_words
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.requests.request import Request, RequestFacts

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of what happened to a request, in seconds on the engine's clock; None: they did not."""

    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    ended_at: float | None
    num_cached_tokens: int
    num_preemptions: int

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
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
        request_id: the engine's name for it.
        prompt_token_ids: its prompt.
        token_ids: generated tokens, the one that ended it included.
        text: the same as text, without special tokens and without the stop string that ended it; empty without a tokenizer.
        finish_reason: "stop", "length", "aborted", "rejected", "failed" or "expired".
        detail: why, for the last four.
        stopped_by: the stop string or token that ended it.
        logprobs: of each token, when asked for.
        prompt_logprobs: of each token of the prompt, when asked for; None for the first, which nothing goes before.
        metrics: when it happened.
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
    """Load the tokenizer of a model's directory; None when it has none."""
    return HubTokenizer(model) if has_tokenizer(model) else None


def new_submission(
    engine: Engine,
    facts: RequestFacts,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    replicaset: str,
    where: str,
) -> Submission:
    """Make the submission of a prompt that was checked, once its parameters are right for the replicaset that takes it.

    A request whose prompt is scored shares no blocks, since cached ones have no scores. Raises `ConfigError`.
    """
    model = engine.models[replicaset]
    check_sampling(sampling, where, model.vocab_size)
    check_backend(sampling, engine.config.backend.kind, where)
    seed = request_seed(engine.config.seed, facts.request_id) if sampling.seed is None else sampling.seed
    submission = Submission.of(facts, token_ids, sampling, model.eos_token_ids, seed)
    submission.shares = sampling.prompt_logprobs is None
    return submission


class RequestMaker:
    """Makes submissions of a program's prompts, and finds what is wrong with them before anything is computed."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._numbers = count()

    def make(
        self, prompt: Prompt, params: SamplingParams, where: str = "prompt", stated: StatedFacts | None = None
    ) -> Submission:
        """Make one submission; `stated` are its facts beside its lengths. Raises `ConfigError`."""
        engine, tokenizer = self._engine, self._tokenizer
        check_sampling(params, "sampling", engine.vocab_size)
        if params.bad_words:
            params = with_bad_words(params, tokenizer)
        if params.stop and tokenizer is None:
            raise ConfigError(Problem("sampling.stop", "needs a tokenizer, and the model has none"))
        tokens = self._tokens(prompt, where)
        given = {} if stated is None else {fact.name: getattr(stated, fact.name) for fact in FACTS}
        facts = RequestFacts(f"request-{next(self._numbers)}", len(tokens), params.max_tokens, **given)
        replicaset = engine.controller.select(facts)
        room = check_prompt(tokens, engine.prompt_limits_of(replicaset), where)
        facts = replace(facts, max_tokens=min(params.max_tokens, room))
        submission = new_submission(engine, facts, tokens, params, replicaset, "sampling")
        submission.output.stream = None if tokenizer is None else text_stream(tokenizer)
        return submission

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the prompt of a conversation. Raises `ConfigError`."""
        if self._tokenizer is None:
            raise ConfigError(Problem("messages", "need a tokenizer, and the model has none", "Give token ids"))
        return self._tokenizer.encode(self._tokenizer.render_chat(messages), is_rendered=True)

    def _tokens(self, prompt: Prompt, where: str) -> Sequence[int]:
        if not isinstance(prompt, str):
            given: object = prompt
            if not isinstance(given, Iterable) or not all(map(is_kind_of_token, set(map(type, given)))):
                raise ConfigError(Problem(where, "is neither text nor token ids", "Allowed: str, or a list of int"))
            return list(map(int, prompt))
        if self._tokenizer is None:
            raise ConfigError(Problem(where, "is text, and the model has no tokenizer", "Give token ids"))
        if not prompt:
            raise ConfigError(Problem(where, "is empty", "Allowed: one character or more"))
        return self._tokenizer.encode(prompt)


def is_kind_of_token(kind: type) -> bool:
    """Return whether values of a type may be token ids."""
    return issubclass(kind, Integral) and not issubclass(kind, bool)
