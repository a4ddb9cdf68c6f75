"""Log-probabilities in OpenAI's formats: columns for completions, entries for chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vajra_py.engine.compute import TokenLogprobs
from vajra_py.engine.pieces import CharacterCounter
from vajra_py.engine.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""Value for minus infinity, which JSON lacks; as in OpenAI's API."""


@dataclass(slots=True)
class TextOffsets:
    """Offsets of an output's tokens in its text.

    Attributes:
        start: number of characters before the output.
    """

    start: int = 0
    _counter: CharacterCounter = field(default_factory=CharacterCounter)
    _is_begun: bool = False

    def add(self, tokenizer: Tokenizer | None, token_id: int) -> int:
        """Add the next token and return its offset in the text, in characters."""
        piece = None if tokenizer is None else tokenizer.piece(token_id)
        if tokenizer is not None and piece is not None and not self._is_begun:
            self._is_begun = True
            first = tokenizer.decode([token_id])  # unlike `piece`, `decode` may drop the blank before the first word
            if "\ufffd" not in first:
                piece = first.encode()
        return self.start + self._counter.add(piece or b"")


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """Formatter of log-probabilities for one model's tokens."""

    tokenizer: Tokenizer | None
    names_ids: bool = False
    """True if tokens are written by their ids."""

    def columns(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: TextOffsets,
        num_top: int,
    ) -> dict[str, Any]:
        """Return log-probabilities in the format of completions, each with the `num_top` likeliest tokens at its
        position.

        The values of a prompt's first token are null.
        """
        tops = [self._top(token_id, one, num_top) for token_id, one in zip(token_ids, logprobs, strict=True)]
        return {
            "text_offset": [offsets.add(self.tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs],
            "tokens": [self._text(token_id) for token_id in token_ids],
            "top_logprobs": tops if num_top else None,
        }

    def ranked(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Return a prompt's log-probabilities in vLLM's format: at each position a mapping by token id, with the
        prompt's own token first.
        """
        return [
            None if one is None else self._ranked(token_id, one)
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]

    def _ranked(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, dict[str, Any]]:
        rows = [(token_id, logprobs.logprob, logprobs.rank)]
        rows += [(other, logprob, rank) for rank, (other, logprob) in enumerate(logprobs.top, 1) if other != token_id]
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token)}
            for token, logprob, rank in rows
        }

    def entries(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return log-probabilities in the format of chats."""
        content = [
            {**self._entry(token_id, one.logprob), "top_logprobs": [self._entry(*top) for top in one.top]}
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _top(self, token_id: int, logprobs: TokenLogprobs | None, num_top: int) -> dict[str, float] | None:
        if logprobs is None:
            return None
        top = {self._text(other): _finite(logprob) for other, logprob in reversed(logprobs.top[:num_top])}
        top[self._text(token_id)] = _finite(logprobs.logprob)
        return top

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = None if self.tokenizer is None else self.tokenizer.piece(token_id)
        return {
            "token": self._text(token_id),
            "logprob": _finite(logprob),
            "bytes": None if piece is None else list(piece),
        }

    def _text(self, token_id: int) -> str:
        """Return a token as text: its decoded bytes if they are complete characters, else its bytes in hexadecimal.

        Return the token's id if it has no bytes, or if tokens are written by their ids (`names_ids`).
        """
        piece = None if self.tokenizer is None or self.names_ids else self.tokenizer.piece(token_id)
        if piece is None:
            return f"token_id:{token_id}"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in piece)


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
