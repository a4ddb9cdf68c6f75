"""A scheduler's record of each vLLM request: its output, its stop conditions, and the state sent to the workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from vajra_py.errors import ConfigError, Problem
from vajra_py.vllm.extra_args import stated_in
from vajra_py.vllm.lora import AdapterNames, salt_of
from vajra_py.vllm.mechanism import BlockHashes, EndReason, Request, RequestFacts, Submission


class Record:
    """One vLLM request, from its arrival until its last token is known."""

    __slots__ = (
        "client_index",
        "is_known",
        "is_over",
        "is_plain",
        "limit",
        "num_sent",
        "output",
        "plain_until",
        "ran_in",
        "request",
        "request_id",
        "stops",
        "submission",
        "wants_logprobs",
    )

    def __init__(self, request: VllmRequest, submission: Submission, max_model_len: int) -> None:
        params = request.sampling_params
        assert params is not None
        self.request = request
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.submission = submission
        self.output = submission.output
        self.limit = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
        self.stops: dict[int, int | None] = {token: token for token in params.stop_token_ids or ()}
        """Token ids that end the request, each with the stop reason reported to the client."""
        if params.eos_token_id is not None:
            self.stops[params.eos_token_id] = None
        self.is_plain = not request.use_structured_output and params.repetition_detection is None
        """True if stopping depends only on the last token and the length."""
        self.plain_until = self.limit if self.is_plain else 0
        """Output length below which a token ends the request only if it is in `stops`."""
        self.wants_logprobs = params.num_logprobs is not None
        self.is_over = False
        """True once the request has ended for its client."""
        self.is_known = False
        """True if the request's prompt and parameters were sent to the workers."""
        self.num_sent = 0
        """Number of leading entries of the request's block table that were sent to the workers."""
        self.ran_in = -1
        """Index of the last step with this request; -1 if there was none. For bulk decodes, it is set only when
        `Messages` stops handling them in bulk.
        """

    @property
    def own(self) -> Request | None:
        """The mechanism's request; None before it is created."""
        return self.submission.request

    @property
    def num_kept(self) -> int:
        """Number of output tokens at the request's last submission to the mechanism, which treats them as part of the
        prompt.
        """
        return self.submission.num_kept

    def hand_in_again(self) -> Submission:
        """Replace the submission by one that continues after the present output, and return it.

        All tokens are recomputed.
        """
        kept, before = len(self.output), self.submission
        facts = replace(
            before.facts,
            num_prompt_tokens=self.request.num_prompt_tokens + kept,
            max_tokens=self.limit - kept,
            expires_after_s=None if self.is_known else before.facts.expires_after_s,
        )
        tokens = None if before.prompt_token_ids is None else self.all_tokens()
        self.submission = replace(before, facts=facts, prompt_token_ids=tokens, num_kept=kept, request=None)
        self.num_sent = 0
        return self.submission

    def finishes_plainly(self, token: int) -> bool:
        """Return whether this last token of the output ends the request; if so, store the reason in `request`."""
        request = self.request
        if token in self.stops:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = self.stops[token]
            return True
        if len(self.output) >= self.limit:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    def finishes(self, token: int, max_model_len: int) -> bool:
        """Return whether the last token ends the request, by vLLM's own rules for all kinds of requests."""
        if self.is_plain:
            return self.finishes_plainly(token)
        self.request.append_output_token_ids(token)
        return bool(check_stop(self.request, max_model_len))

    def take(self, tokens: list[int], max_model_len: int) -> tuple[list[int], bool]:
        """Append tokens to the output up to one that ends the request; return the appended tokens, and True if the
        request ended.
        """
        for count, token in enumerate(tokens, 1):
            self.output.append(token)
            if self.finishes(token, max_model_len):
                return tokens[:count], True
        return tokens, False

    def all_tokens(self) -> list[int]:
        """Return the token ids of prompt and output."""
        prompt = self.request.prompt_token_ids
        assert prompt is not None
        return [*prompt, *self.output]


class Arrivals:
    """Arrival times of requests: those stated by front ends, adjusted to increase in the order of arrival at the
    engine.

    Stated times can be out of order (several front ends, slow tokenization of a prompt, a clock that is set back), but
    first come, first served follows the order at the engine, as in vLLM. With `as_stated`, the stated times are used
    unchanged, as vLLM does if it orders requests by priority.
    """

    def __init__(self, clock: Callable[[], int], *, as_stated: bool) -> None:
        self._clock = clock
        self._zero = time.time() - clock() / 1e9
        self._as_stated = as_stated
        self._last = 0.0

    def __call__(self, request: VllmRequest) -> float:
        """Return the arrival of a request in seconds on the scheduler's clock."""
        stated = float(request.arrival_time) - self._zero
        if self._as_stated:
            return stated
        following = math.nextafter(self._last, math.inf)
        self._last = max(following, min(stated, self._clock() / 1e9))
        return self._last


@dataclass(frozen=True, slots=True)
class RecordRules:
    """Rules for every request of one scheduler.

    Attributes:
        arrived_at: returns the arrival of a request in seconds on the scheduler's clock.
        hashes_for: returns the constructor of a request's block hashes for a salt; None for this project's hashes.
        by_tenant: True if tenants never share cached prefixes.
        adapters: names of LoRA adapters; None without adapters.
    """

    max_model_len: int
    caches: bool
    by_tenant: bool
    arrived_at: Callable[[VllmRequest], float]
    on_ended: Callable[[Request, EndReason], None]
    hashes_for: Callable[[VllmRequest, str], Callable[..., BlockHashes]] | None = None
    adapters: AdapterNames | None = None


def record_of(request: VllmRequest, rules: RecordRules) -> Record:
    """Create the record of a new request. Raises `ConfigError` if it cannot be scheduled."""
    for name, is_wrong in (
        ("pooling", request.pooling_params is not None),
        ("LoRA adapters", request.lora_request is not None and rules.adapters is None),
        ("multimodal inputs", bool(request.mm_features)),
        ("streamed inputs", request.resumable),
        ("prompt embeddings", request.prompt_embeds is not None or request.prompt_token_ids is None),
    ):
        if is_wrong:
            raise ConfigError(Problem(f"request {request.request_id}", f"{name} cannot be scheduled here"))
    facts = facts_of(request, min(request.max_tokens, rules.max_model_len - request.num_prompt_tokens))
    if rules.adapters is not None and request.lora_request is not None:
        facts = replace(facts, adapter=rules.adapters.name(request.lora_request))
    salt = f"{request.cache_salt or ''}\n{facts.tenant}" if rules.by_tenant else request.cache_salt or ""
    submission = Submission(
        facts=facts,
        arrived_at=rules.arrived_at(request),
        prompt_token_ids=request.prompt_token_ids if rules.caches else None,
        reads_cache=not request.skip_reading_prefix_cache,
        salt=salt_of(request.lora_request, salt),
        on_ended=rules.on_ended,
    )
    if rules.hashes_for is not None:
        submission.hash_blocks = rules.hashes_for(request, salt)
    return Record(request, submission, rules.max_model_len)


def facts_of(request: VllmRequest, limit: int) -> RequestFacts:
    """Return the facts that the client states about its request; `limit` is its maximum output length in tokens.

    Raises `ConfigError` for a malformed fact.
    """
    params = request.sampling_params
    given = stated_in({} if params is None else params.extra_args or {})
    if request.session_id is not None:
        given.setdefault("session_id", request.session_id)
    return RequestFacts(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=limit,
        priority=request.priority,
        **given,
    )
