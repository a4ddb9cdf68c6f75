"""Tokenize prompts, and detokenize outputs incrementally.

A tokenizer may need several tokens for one character, and may decode a token differently depending on its neighbours.
An incomplete character is therefore held back until it is complete, or the output ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from encodings.utf_8 import IncrementalDecoder
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from vajra_py.engine.compute.interface import SamplingParams
from vajra_py.engine.pieces import piece_reader, stripped_blanks
from vajra_py.errors import ConfigError, Problem

_INCOMPLETE = "\ufffd"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class ChatEnd(Enum):
    """Point at which the rendered text of a conversation ends."""

    ANSWER = "answer"
    """The text ends where the model's answer begins, after the header of the answer."""
    MESSAGE = "message"
    """The text ends within the last message, which the model continues."""
    NOWHERE = "nowhere"
    """The text ends after the last message; nothing is added for an answer."""


class Tokenizer(Protocol):
    """Tokenizer with the operations that the engine needs."""

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """Return the text's tokens.

        Special tokens that the model expects around a text are added, unless `is_rendered`: a chat template has then
        rendered the text and has added them already.
        """

    @property
    def stripped_blanks(self) -> int | None:
        """Number of leading blanks that decoding strips; None if decoding changes the text in other ways.

        If it is a number, decoded text is the tokens' joined bytes as UTF-8, without these blanks.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the tokens' text, without special tokens."""

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of several sequences of tokens."""

    def piece(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None for special tokens and unknown ids."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], end: ChatEnd = ChatEnd.ANSWER) -> str:
        """Return the text of a conversation. Raises `ConfigError`."""

    @property
    def with_special(self) -> Tokenizer:
        """Return this tokenizer, but with special tokens kept in decoded text."""

    def name(self, token_id: int) -> str:
        """Return the token as the vocabulary writes it; empty for an id without a token."""


class HubTokenizer:
    """Tokenizer of a Hugging Face model directory."""

    def __init__(self, directory: str | Path) -> None:
        folder = Path(directory).expanduser()
        if not any((folder / name).exists() for name in _FILES):
            allowed = f"One of {', '.join(_FILES)}; without a tokenizer, prompts are token ids"
            raise ConfigError(Problem(f"model {folder}", "has no tokenizer", allowed))
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a broken file may raise any error
            reason = " ".join(str(error).split())
            raise ConfigError(Problem(f"model {folder}", f"its tokenizer cannot be loaded ({reason})")) from error
        self._decode_all = _batch_decoder(self._tokenizer, skips_special=True)
        self._piece = piece_reader(self._tokenizer)
        self.stripped_blanks = stripped_blanks(self._tokenizer) if has_plain_decode(self._tokenizer) else None

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """See `Tokenizer`."""
        return list(self._tokenizer.encode(text, add_special_tokens=not is_rendered))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._decode_all([token_ids])[0]

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """See `Tokenizer`."""
        return self._decode_all(rows)

    def piece(self, token_id: int) -> bytes | None:
        """See `Tokenizer`."""
        return self._piece(token_id)

    @cached_property
    def with_special(self) -> HubTokenizer:
        """See `Tokenizer`."""
        other = copy(self)
        other.__dict__["with_special"] = other
        other._decode_all = _batch_decoder(self._tokenizer, skips_special=False)
        other._piece = piece_reader(self._tokenizer, keeps_special=True)
        return other

    def name(self, token_id: int) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.convert_ids_to_tokens(token_id) or ""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], end: ChatEnd = ChatEnd.ANSWER) -> str:
        """See `Tokenizer`. Role `developer` becomes `system` if the template does not support it."""
        template = getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise ConfigError(Problem("messages", "the model has no chat template", "Give a prompt instead"))
        if "developer" not in str(template):
            messages = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages]
        ends = {"add_generation_prompt": end is ChatEnd.ANSWER, "continue_final_message": end is ChatEnd.MESSAGE}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **ends)
        except Exception as error:  # a template may raise any error
            raise ConfigError(Problem("messages", f"do not fit the model's chat template ({error})")) from error
        return str(text)


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with `bad_words` converted to `bad_words_token_ids`.

    Raises `ConfigError` if there are `bad_words`, but no tokenizer.

    As in vLLM, each word is forbidden in the form that it is tokenized to at the beginning of a text. The form after a
    blank is forbidden too if it has the same number of tokens, but a different first token.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise ConfigError(Problem("sampling.bad_words", "need a tokenizer, and the model has none"))
    sequences: dict[tuple[int, ...], None] = dict.fromkeys(params.bad_words_token_ids)
    for word in params.bad_words:
        alone, behind = (tuple(tokenizer.encode(blank + word.lstrip(), is_rendered=True)) for blank in ("", " "))
        sequences[alone] = None
        if len(alone) == len(behind) and alone[:1] != behind[:1]:
            sequences[behind] = None
    return replace(params, bad_words=(), bad_words_token_ids=tuple(filter(None, sequences)))


def has_plain_decode(tokenizer: Any) -> bool:
    """Return True if a tokenizer of transformers uses the default decoding of its backend."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    return isinstance(tokenizer, PreTrainedTokenizerFast) and (kind.decode, kind._decode) == plain


def _batch_decoder(tokenizer: Any, *, skips_special: bool) -> Callable[[Sequence[Sequence[int]]], list[str]]:
    """Return a function that decodes several token sequences.

    For tokenizers with default decoding, the function bypasses transformers' own layers, which take three times as long
    as the decoding itself.
    """
    if has_plain_decode(tokenizer):
        return partial(tokenizer.backend_tokenizer.decode_batch, skip_special_tokens=skips_special)
    decode = partial(tokenizer.decode, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False)
    return lambda rows: [str(decode(row)) for row in rows]


def has_tokenizer(directory: str | Path) -> bool:
    """Return True if the model's directory contains a tokenizer."""
    folder = Path(directory).expanduser()
    return any((folder / name).exists() for name in _FILES)


class TextStream(Protocol):
    """Incrementally decoded text of one output."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty while a character is incomplete."""

    def rest(self) -> str:
        """Return the remaining text at the end of the output: incomplete characters."""


def text_stream(tokenizer: Tokenizer) -> TextStream:
    """Return a stream for one output of this tokenizer's model."""
    return WindowStream(tokenizer) if tokenizer.stripped_blanks is None else PieceStream(tokenizer)


class PieceStream:
    """Text stream for tokens whose bytes do not depend on their neighbours."""

    __slots__ = ("_decoder", "_num_stripped", "_piece")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decoder = IncrementalDecoder("replace")
        self._num_stripped = tokenizer.stripped_blanks or 0

    def push(self, token_ids: Sequence[int]) -> str:
        """See `TextStream`."""
        read = b"".join(filter(None, map(self._piece, token_ids)))
        # A codec's incremental decoder is slow; it is needed only if a character may be incomplete.
        text = read.decode() if read.isascii() and not self._decoder.buffer else self._decoder.decode(read)
        return self._stripped(text) if self._num_stripped else text

    def _stripped(self, text: str) -> str:
        """Return the text without the blanks that are stripped at the beginning of the output."""
        num_left = len(text) - len(text.lstrip(" "))
        num_cut = min(num_left, self._num_stripped)
        self._num_stripped = self._num_stripped - num_cut if num_left == len(text) else 0
        return text[num_cut:]

    def rest(self) -> str:
        """See `TextStream`."""
        return self._decoder.decode(b"", True)


class WindowStream:
    """Text stream for tokens that may be decoded differently depending on their neighbours.

    A tokenizer may also decode the first token of a sequence differently. So new tokens are decoded together with the
    tokens that were emitted last; these begin at `_prefix`. Earlier tokens are not decoded again.
    """

    __slots__ = ("_prefix", "_read", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """See `TextStream`."""
        return push_all([(self, token_ids)])[0]

    def rest(self) -> str:
        """See `TextStream`."""
        before, now = self._tokenizer.decode_all(self.windows())
        self._prefix = self._read = len(self._token_ids)
        return now[len(before) :]

    def windows(self, new_token_ids: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Append new tokens; return (tokens from `_prefix` to the last emitted one, all tokens from `_prefix` on)."""
        self._token_ids += new_token_ids
        return self._token_ids[self._prefix : self._read], self._token_ids[self._prefix :]

    def completed(self, before: str, now: str) -> str:
        """Return the new text, given the decoded texts of the two token lists that `windows` returns."""
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return now[len(before) :]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that decodes the stream."""
        return self._tokenizer


def push_all(pushes: Sequence[tuple[TextStream, Sequence[int]]]) -> list[str]:
    """Return the result of `push` for each (stream, tokens), with one decoding call per tokenizer."""
    windows: dict[Tokenizer, list[tuple[int, WindowStream, Sequence[int]]]] = {}
    texts = [""] * len(pushes)
    for place, (stream, token_ids) in enumerate(pushes):
        if isinstance(stream, WindowStream):
            windows.setdefault(stream.tokenizer, []).append((place, stream, token_ids))
        else:
            texts[place] = stream.push(token_ids)
    for tokenizer, members in windows.items():
        rows = [window for _, stream, token_ids in members for window in stream.windows(token_ids)]
        decoded = iter(tokenizer.decode_all(rows))
        for place, stream, _ in members:
            texts[place] = stream.completed(next(decoded), next(decoded))
    return texts
