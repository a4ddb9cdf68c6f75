"""Output of a request so far, and whether it stops here.

One object per request collects tokens, log-probabilities and, where there is a tokenizer, text. It finds the end that a
controller cannot know in advance: the model's end-of-sequence token, a stop token, a stop string.
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
    """The output of one request.

    Text is made when it is read, or by `detokenize` for many outputs at once.

    Attributes:
        token_ids: every token, the one that ended it included.
        logprobs: of each token, for requests that want them.
        prompt_logprobs: of the prompt's tokens from the second on, for requests that want them.
        stopped_by: the stop string or token that ended it.
        is_faulty: whether it failed by itself.
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
    """Holds back text that may begin a stop string; None: there are none."""
    _num_read: int = 0
    """Number of tokens that have become text."""
    _is_done: bool = False

    def __post_init__(self) -> None:
        if self.sampling.stop:
            self._search = StopSearch(self.sampling.stop)

    @property
    def text(self) -> str:
        """Return the text that a client may see: without the stop string that ended it, unless it is wanted; complete once the request has ended."""
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
        """Return whether its text may end it, so that each token has to be read at once."""
        return self.stream is not None and bool(self.sampling.stop)

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Take a token in; whether it ends the request by itself."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token_id in self.stop_token_ids and len(self.token_ids) >= self.sampling.min_tokens:
            self.stopped_by = token_id
            return True
        return False

    def unread(self) -> list[int]:
        """Tokens that are to become text."""
        is_left_out = isinstance(self.stopped_by, int) and not self.sampling.include_stop_str_in_output
        end = len(self.token_ids) - is_left_out
        return self.token_ids[self._num_read : end]

    def read(self, text: str) -> None:
        """Take in the text of what was `unread`, in which a stop string may end the request (`stopped_by`)."""
        self._num_read = len(self.token_ids)
        if self._search is None:
            self._text += text
            return
        shown, found = self._search.push(text, may_stop=len(self.token_ids) >= self.sampling.min_tokens)
        self._text += shown
        if found is not None:
            self.stopped_by = found
            if self.sampling.include_stop_str_in_output:
                self._text += found

    def finish(self) -> None:
        """End the output: what was held back is text after all."""
        self._is_done = True


def detokenize(outputs: Iterable[OutputBuffer]) -> None:
    """Bring the text of outputs up to date, all together."""
    pending = [(one, one.stream, unread) for one in outputs if one.stream is not None and (unread := one.unread())]
    texts = push_all([(stream, unread) for _, stream, unread in pending])
    for (one, _, _), text in zip(pending, texts, strict=True):
        one.read(text)


OnProgress: TypeAlias = Callable[["Submission", Request, EndReason | None], None]
"""Called after each step that gave the request a token, and when it has ended (with the reason)."""


@dataclass(eq=False, slots=True)
class Submission:
    """One request on its way through the engine.

    Attributes:
        facts: what the client stated.
        prompt_token_ids: the prompt.
        seed: of its random stream.
        output: what comes out.
        content: segments that identify the prompt in the prefix cache; None: its tokens do.
        shares: whether its prompt's blocks may be shared at all.
        salt: only requests with the same one share prefixes; None: as in the settings.
        num_output_tokens: after how many tokens it ends, where that is known beforehand.
        sent_at: when its client sent it, in ticks; None: when it is taken in.
        on_progress: called after each step that gave it a token, and at its end.
        follows_steps: whether that holds for each step, whose text is then read; False: for the end alone.
        on_engine_end: called in place of its end when the engine ends first, with the error that ended it; None: it was closed.
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
        """Make the submission of a request that ends by the tokens that its parameters, or its model, name."""
        eos = () if sampling.ignore_eos else eos_token_ids
        stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        return cls(facts, prompt_token_ids, seed, OutputBuffer(sampling, stop_token_ids))

    def block_hashes(self, block_size: int, tenant_salt: bool) -> BlockHashes:
        """Return the hashes that identify its blocks in a prefix cache; with `tenant_salt`, only among requests of its tenant."""
        salt = self.salt if self.salt is not None else self.facts.tenant if tenant_salt else ""
        salt = adapter_salt(salt, self.facts.adapter)
        if self.content is not None:
            return SegmentBlockHashes(self.content, self.facts.request_id, block_size, salt)
        if self.shares:
            return TokenBlockHashes(self.prompt_token_ids, block_size, salt)
        return PrivateBlockHashes(self.facts.request_id)

    def arrival(self, now: int, arrived_at: float) -> Arrival:
        """The entry of the input log for its arrival at tick `now`."""
        by_tokens = self.shares and self.content is None
        tokens = tuple(self.prompt_token_ids) if by_tokens else None
        return Arrival(now, arrived_at, self.facts, self.content, tokens, self.num_output_tokens, self.salt)
