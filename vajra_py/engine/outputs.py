"""Collect the output of a request and detect its end.

One object per request collects tokens, log-probabilities and, if there is a tokenizer, text. It detects the ends that
the controller cannot predict: the model's end-of-sequence token, a stop token, a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from vajra_py.contract.observer import EndReason
from vajra_py.engine.compute import SamplingParams, TokenLogprobs
from vajra_py.engine.stop_strings import StopSearch
from vajra_py.engine.tokenizer import TextStream, push_all
from vajra_py.runtime.kv import BlockHashes, PrivateBlockHashes, SegmentBlockHashes, TokenBlockHashes
from vajra_py.runtime.kv.block_hashes import adapter_salt
from vajra_py.runtime.records.input_log import Arrival
from vajra_py.runtime.requests.request import Request, RequestFacts
from vajra_py.workload import SegmentId


@dataclass(slots=True)
class OutputBuffer:
    """Output of one request.

    Tokens are decoded when `text` is read, or by `detokenize` for many outputs at once.

    Attributes:
        sampling: sampling and stop parameters of the request.
        stop_token_ids: tokens that end the request.
        stream: incremental decoder; None without a tokenizer, and once the complete text was read.
        token_ids: all output tokens, including the one that ended the request.
        logprobs: log-probabilities of each token, for requests with `logprobs`.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on, for requests with
            `prompt_logprobs`.
        stopped_by: stop string or token that ended the request; None if neither has ended it.
        is_faulty: True if the request failed because its own row could not be computed or sampled.
    """

    sampling: SamplingParams
    stop_token_ids: Collection[int]
    stream: TextStream | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    stopped_by: str | int | None = None
    is_faulty: bool = False
    _text: str = ""
    _search: StopSearch | None = None
    """Search that holds back text that may be the beginning of a stop string; None: the request has no stop strings."""
    _num_read: int = 0
    """Number of tokens that have been decoded to text."""
    _is_done: bool = False

    def __post_init__(self) -> None:
        if self.sampling.stop:
            self._search = StopSearch(self.sampling.stop)

    @property
    def text(self) -> str:
        """Text that the client may see; it is complete once the request has ended.

        It excludes the stop string that ended the request, unless `include_stop_str_in_output` is set.
        """
        if self.stream is not None:
            unread = self.unread()
            if unread:
                self.read(self.stream.push(unread))
            if self._is_done:
                if not isinstance(self.stopped_by, str):
                    self._text += ("" if self._search is None else self._search.held) + self.stream.rest()
                self._search = self.stream = None
        return self._text

    @property
    def looks_for_stop_strings(self) -> bool:
        """True if a stop string may end the request, so that each token must be decoded at once."""
        return self.stream is not None and bool(self.sampling.stop)

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a token; return True if it is a stop token that ends the request."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token_id in self.stop_token_ids and len(self.token_ids) >= self.sampling.min_tokens:
            self.stopped_by = token_id
            return True
        return False

    def unread(self) -> list[int]:
        """Return the tokens that are not decoded to text yet, without a final stop token that the text leaves out."""
        is_left_out = isinstance(self.stopped_by, int) and not self.sampling.include_stop_str_in_output
        end = len(self.token_ids) - is_left_out
        return self.token_ids[self._num_read : end]

    def read(self, text: str) -> None:
        """Append the text of the `unread` tokens; a stop string in it ends the request (`stopped_by`)."""
        self._num_read = len(self.token_ids)
        if self._search is None:
            self._text += text
            return
        least = self.sampling.min_tokens  # as in vLLM, only tokens after the first `least` complete a stop string
        shown, found = self._search.push(text, may_stop=not least or len(self.token_ids) > least)
        self._text += shown
        if found is not None:
            self.stopped_by = found
            if self.sampling.include_stop_str_in_output:
                self._text += found

    def finish(self) -> None:
        """Mark the output as complete; `text` then includes the text that was held back."""
        self._is_done = True


def detokenize(outputs: Iterable[OutputBuffer]) -> None:
    """Decode the new tokens of several outputs together."""
    pending = [(one, one.stream, unread) for one in outputs if one.stream is not None and (unread := one.unread())]
    texts = push_all([(stream, unread) for _, stream, unread in pending])
    for (one, _, _), text in zip(pending, texts, strict=True):
        one.read(text)


OnProgress: TypeAlias = Callable[["Submission", Request, EndReason | None], None]
"""Function called with the reason when a request has ended, and with None after a step that gave the request a token.
"""


@dataclass(eq=False, slots=True)
class Submission:
    """One request as submitted to the engine.

    Attributes:
        facts: facts that the client stated.
        prompt_token_ids: tokens of the prompt.
        seed: seed of the request's random stream.
        output: buffer of the output.
        content: segments that identify the prompt in the prefix cache; None: the tokens identify it.
        shares: True if the prompt's blocks may be shared with other requests.
        salt: requests share prefixes only if they have the same salt; None: the settings determine the salt.
        num_output_tokens: number of output tokens after which the request ends; None: not known beforehand.
        sent_at: tick when the client sent the request; None: the tick when the loop submits it.
        on_progress: called at the request's end and, if `follows_steps`, after each step that gave it a token.
        follows_steps: True to call `on_progress` after steps too, with the text decoded; False: at the end only.
        on_engine_end: called instead of `on_progress` if the engine ends before the request, with the engine's error,
            or with None if the engine was closed.
    """

    facts: RequestFacts
    prompt_token_ids: Sequence[int]
    seed: int
    output: OutputBuffer
    content: tuple[tuple[SegmentId, int], ...] | None = None
    shares: bool = True
    num_output_tokens: int | None = None
    salt: str | None = None
    sent_at: int | None = None
    on_progress: OnProgress | None = None
    follows_steps: bool = True
    on_engine_end: Callable[[BaseException | None], None] | None = None

    @classmethod
    def of(
        cls,
        facts: RequestFacts,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        seed: int,
    ) -> Self:
        """Return the submission of a request that ends with the stop tokens of its parameters.

        Unless `ignore_eos` is set, `eos_token_ids`, which are those of the model, end the request as well.
        """
        eos = () if sampling.ignore_eos else eos_token_ids
        stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        return cls(facts, prompt_token_ids, seed, OutputBuffer(sampling, stop_token_ids))

    def block_hashes(self, block_size: int, tenant_salt: bool) -> BlockHashes:
        """Return the hashes of the prompt's blocks for the prefix cache.

        With `tenant_salt`, the hashes of different tenants differ, unless the submission has its own `salt`.
        """
        salt = self.salt if self.salt is not None else self.facts.tenant if tenant_salt else ""
        salt = adapter_salt(salt, self.facts.adapter)
        if self.content is not None:
            return SegmentBlockHashes(self.content, self.facts.request_id, block_size, salt)
        if self.shares:
            return TokenBlockHashes(self.prompt_token_ids, block_size, salt)
        return PrivateBlockHashes(self.facts.request_id)

    def arrival(self, now: int, arrived_at: float) -> Arrival:
        """Return the input-log entry for the request's arrival at tick `now`."""
        by_tokens = self.shares and self.content is None
        tokens = tuple(self.prompt_token_ids) if by_tokens else None
        return Arrival(now, arrived_at, self.facts, self.content, tokens, self.num_output_tokens, self.salt)
