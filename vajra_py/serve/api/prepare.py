"""Turn HTTP requests into engine submissions, or refuse them with an error for the client."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from uuid import uuid4

from vajra_py.config import SystemConfig
from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.outputs import Submission
from vajra_py.engine.params import PromptLimits, check_prompt, check_sampling
from vajra_py.engine.prompts import request_seed
from vajra_py.engine.requests import new_submission
from vajra_py.engine.tokenizer import Tokenizer, text_stream, with_bad_words
from vajra_py.errors import ConfigError
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.serve.api.schema import ChatBody, CompletionBody, GenerationBody, SchedulingHeaders
from vajra_py.serve.api.schema_facts import stated_in
from vajra_py.serve.api.tokenizing import Tokenizing
from vajra_py.serve.http.errors import ApiError, bad_request, of_config_error
from vajra_py.serve.session.catalogue import Catalogue
from vajra_py.serve.session.output_streams import OutputStream, ResponseState
from vajra_py.serve.session.session import EngineSession

_log = logging.getLogger(__name__)
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Odd multiplier, so that the seeds of one request's outputs differ; 2^64 divided by the golden ratio."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A client's HTTP request for outputs, with prompts that are not tokenized yet."""

    body: GenerationBody
    headers: SchedulingHeaders
    max_choices: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Outputs of one HTTP request, ready to be submitted to the engine, and the tokenizer for their text.

    Attributes:
        response: outputs to submit.
        tokenizer: tokenizer of the model; None if it has none.
        echoes: texts of the prompts if answers begin with them; otherwise empty.
    """

    response: ResponseState
    tokenizer: Tokenizer | None
    echoes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Route:
    """Replicasets that an HTTP request may go to, before the lengths of its prompts are known.

    Attributes:
        facts: facts of the request for policies, without id and lengths.
        candidates: replicasets whose conditions the request meets, except conditions on prompt length; all run the same
            model if one of them has conditions on prompt length.
        tokenizer: tokenizer of the first candidate's model; None if it has none.
    """

    facts: RequestFacts
    candidates: Sequence[str]
    tokenizer: Tokenizer | None


class Preparer:
    """Prepares the requests of one session."""

    def __init__(self, session: EngineSession, catalogue: Catalogue, tokenizing: Tokenizing) -> None:
        self._session = session
        self._tokenizing = tokenizing
        self._catalogue = catalogue
        self._run_seed = _run_seed(session.config)
        self._numbers = count()

    def new_id(self, prefix: str) -> str:
        """Return an id, unique among all servers, for an HTTP request."""
        return f"{prefix}-{uuid4().hex}"

    async def completion(self, wanted: Wanted, name: str) -> PreparedRequest:
        """Prepare every output of a `/v1/completions` request. Raises `ApiError`."""
        body = wanted.body
        assert isinstance(body, CompletionBody)
        given = body.prompts()
        _check_choices(len(given) * body.n, wanted.max_choices)
        route, longest = self._route(wanted), self._longest(wanted)
        tokenizer = route.tokenizer
        prompts = []
        for one in given:
            if isinstance(one, str):
                known, is_rendered = _needed(tokenizer, "prompt"), not body.adds_special_tokens
                one = await self._tokenizing.tokens(known, one, longest, param="prompt", is_rendered=is_rendered)
            prompts.append(one)
        echoes = [one if isinstance(one, str) else _text_of(tokenizer, one) for one in given] if body.echo else ()
        return self._prepared(wanted, prompts, route, name, echoes)

    async def chat(self, wanted: Wanted, name: str) -> PreparedRequest:
        """Prepare every output of a `/v1/chat/completions` request. Raises `ApiError`."""
        body = wanted.body
        assert isinstance(body, ChatBody)
        _check_choices(body.n, wanted.max_choices)
        messages = [message.plain() for message in body.messages]
        route, longest = self._route(wanted), self._longest(wanted)
        tokenizer = _needed(route.tokenizer, "messages")
        try:
            text = await self._tokenizing.render(tokenizer, messages, body.ends)
        except ConfigError as error:
            raise of_config_error(error) from None
        is_rendered = not body.adds_special_tokens
        prompt = await self._tokenizing.tokens(tokenizer, text, longest, param="messages", is_rendered=is_rendered)
        return self._prepared(wanted, [prompt], route, name)

    def _route(self, wanted: Wanted) -> _Route:
        try:
            facts = self._catalogue.with_adapter(request_facts(wanted, "", 1), wanted.body.model)
        except ValueError as error:
            raise bad_request(f"adapter: {error}", "adapter", "adapter_not_found") from None
        candidates = self._catalogue.candidates(facts)
        if not candidates:
            raise _no_replicaset()
        tokenizer = self._session.client.tokenizers[candidates[0]]
        if tokenizer is not None and not wanted.body.skip_special_tokens:
            tokenizer = tokenizer.with_special
        return _Route(facts, candidates, tokenizer)

    def _longest(self, wanted: Wanted) -> int:
        """Return the limit on a request's prompt plus output, in tokens: the highest limit of the replicasets that
        serve the request's model.
        """
        behind = self._catalogue.behind(wanted.body.model)
        return max(self._session.prompt_limits(name).max_request_tokens for name in behind)

    def _prepared(
        self,
        wanted: Wanted,
        prompts: Sequence[list[int]],
        route: _Route,
        name: str,
        echoes: Sequence[str] = (),
    ) -> PreparedRequest:
        body, tokenizer = wanted.body, route.tokenizer
        response = ResponseState(is_streaming=body.stream)
        drawn = request_seed(self._run_seed, str(next(self._numbers)))
        queued: Counter[str] = Counter()
        queued_tokens: Counter[str] = Counter()
        words = self._bad_words(body, tokenizer)
        for prompt in prompts:
            replicaset, facts = self._checked(wanted, prompt, route)
            queued[replicaset] += body.n
            queued_tokens[replicaset] += body.n * len(prompt)
            self._check_queues(replicaset, queued[replicaset], queued_tokens[replicaset])
            for _ in range(body.n):
                index = len(response.outputs)
                one = replace(facts, request_id=f"{name}-{index}")
                assert one.max_tokens is not None
                sampling = body.sampling(one.max_tokens, _seed_of(body.seed, drawn, index))
                sampling = replace(sampling, bad_words=(), bad_words_token_ids=words) if words else sampling
                submission = self._submission(body, prompt, replicaset, one, sampling)
                if tokenizer is not None:
                    submission.output.stream = text_stream(tokenizer)
                elif submission.output.sampling.stop:
                    message = "the model has no tokenizer, so that no string can end an output"
                    raise bad_request(message, "stop", "no_tokenizer")
                response.outputs.append(
                    OutputStream(index, submission, response, hides_output=body.wanted_tokens() == 0)
                )
        return PreparedRequest(response, tokenizer, echoes)

    def _bad_words(self, body: GenerationBody, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of the body's `bad_words`. Raises `ApiError`."""
        sampling = SamplingParams(bad_words=tuple(dict.fromkeys(body.bad_words or ())))
        if not sampling.bad_words:
            return ()
        try:
            check_sampling(sampling, "request")
            return with_bad_words(sampling, _needed(tokenizer, "bad_words")).bad_words_token_ids
        except ConfigError as error:
            raise of_config_error(error) from None

    def _check_queues(self, replicaset: str, num_outputs: int, num_tokens: int) -> None:
        """Refuse, with status 400, a request whose outputs do not fit even into an empty queue.

        `Replicaset.refusal` applies the same bounds to one output at a time and to the present queue, and refuses with
        status 429, since a retry may succeed. That check cannot detect that the outputs of one HTTP request together
        never fit into a queue, so that every retry would fail too.
        """
        limits = self._session.admission(replicaset)
        most, most_tokens = limits.max_queued_requests, limits.max_queued_tokens
        if most is not None and num_outputs > most:
            message = f"requests more outputs than may wait ({num_outputs} or more). Allowed: up to {most}"
            raise bad_request(message, "n", "too_many_outputs")
        if most_tokens is not None and num_tokens > most_tokens:
            message = f"has more prompt tokens than may wait ({num_tokens} or more). Allowed: up to {most_tokens}"
            raise bad_request(message, "prompt", "too_many_tokens")

    def _checked(self, wanted: Wanted, prompt: list[int], route: _Route) -> tuple[str, RequestFacts]:
        """Return the replicaset for a prompt's outputs, and the facts common to these outputs. Raises `ApiError`."""
        replicaset = self._catalogue.by_length(route.candidates, len(prompt))
        if replicaset is None:
            raise _no_replicaset()
        max_tokens = _max_tokens(wanted.body, prompt, self._session.prompt_limits(replicaset))
        return replicaset, replace(route.facts, num_prompt_tokens=len(prompt), max_tokens=max_tokens)

    def _submission(
        self, body: GenerationBody, prompt: list[int], replicaset: str, facts: RequestFacts, sampling: SamplingParams
    ) -> Submission:
        engine = self._session.engine
        assert engine is not None  # requests are accepted only after the engine is loaded
        try:
            submission = new_submission(engine, facts, prompt, sampling, replicaset, "request")
        except ConfigError as error:
            raise of_config_error(error) from None
        if body.cache_salt is not None:
            submission.salt = _salt(facts.tenant, body.cache_salt)
        return submission


def _run_seed(config: SystemConfig) -> int:
    """Return the seed for requests that state none: the experiment's seed if it states one, else a random number."""
    if "seed" in config.model_fields_set:
        return config.seed
    drawn = secrets.randbits(32)
    _log.info("requests without a seed draw from seed %d; --seed %d repeats their outputs", drawn, drawn)
    return drawn


def _seed_of(wanted: int | None, drawn: int, index: int) -> int:
    """Return the seed of the `index`-th output of a request."""
    return ((drawn if wanted is None else wanted) + index * _SEED_STRIDE) % 2**63


def _salt(tenant: str, cache_salt: str) -> str:
    """Return the salt of block hashes for a tenant's requests with this `cache_salt`.

    The salt is longer than any tenant's name, so it never equals a default salt, which is a tenant's name or empty.
    It does not reveal `cache_salt`.
    """
    return hashlib.blake2b(json.dumps([tenant, cache_salt]).encode()).hexdigest() * 4


def _text_of(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> str:
    return "" if tokenizer is None else tokenizer.decode(token_ids)


def _needed(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    if tokenizer is None:
        message = "the model has no tokenizer; send prompts as token ids to /v1/completions"
        raise bad_request(message, param, "no_tokenizer")
    return tokenizer


def _no_replicaset() -> ApiError:
    message = "no replicaset takes a request of this model, tenant, class and length"
    return bad_request(message, None, "no_replicaset")


def _check_choices(num_choices: int, most: int) -> None:
    if num_choices > most:
        message = f"requests {num_choices} outputs (prompts times n); at most {most} are allowed"
        raise bad_request(message, "n")


def _max_tokens(body: GenerationBody, prompt: Sequence[int], limits: PromptLimits) -> int:
    """Return the maximum number of output tokens: the client's or, if it states none, as many as fit.

    Raises `ApiError` if prompt or output are too long.
    """
    try:
        room = check_prompt(prompt, limits)
    except ConfigError as error:
        too_long = len(prompt) >= limits.max_request_tokens
        code = "context_length_exceeded" if too_long else "invalid_value"
        raise bad_request(str(error), "prompt" if isinstance(body, CompletionBody) else "messages", code) from None
    wanted = body.wanted_tokens()
    if wanted == 0 and isinstance(body, CompletionBody) and body.echo:
        wanted = 1  # the engine generates at least one token, which is not sent
    if wanted == 0:
        raise bad_request("max_tokens: is 0. Allowed: 1 or more; 0 with echo, for the prompt alone", "max_tokens")
    if wanted is None:
        return room
    if wanted > room:
        message = (
            f"prompt and output are too long ({len(prompt)} + {wanted} tokens; at most "
            f"{limits.max_request_tokens} together)"
        )
        raise bad_request(message, "max_tokens", "context_length_exceeded")
    return wanted


def request_facts(wanted: Wanted, request_id: str, num_prompt_tokens: int) -> RequestFacts:
    """Return the facts of the request for policies; a simulated request has the same fields."""
    body, headers = wanted.body, wanted.headers
    metadata: Mapping[str, str] = {**(body.metadata or {}), "model": body.model}
    return RequestFacts(
        request_id=request_id,
        num_prompt_tokens=num_prompt_tokens,
        metadata=metadata,
        **stated_in(headers, body),
    )


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for a model that this server does not have."""
    message = f"the model {name!r} does not exist here. Served: {', '.join(known)}"
    return ApiError(404, message, code="model_not_found", param="model")
