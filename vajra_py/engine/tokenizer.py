"""Tokenize prompts and detokenize incrementally.

A tokenizer may need several tokens for one character, and may write a token differently after another: text is put out
only once the tokens so far end in a whole character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from vajra_py.engine.pieces import piece_reader
from vajra_py.errors import ConfigError, Problem

_INCOMPLETE = "\ufffd"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """The text's tokens, with the special tokens that the model expects around it, unless a template wrote them."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, without special tokens."""

    def piece(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None for special tokens and numbers without a token."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, up to where the model's answer begins. Raises `ConfigError`."""


class HubTokenizer:
    """The tokenizer of a Hugging Face model directory."""

    def __init__(self, directory: str | Path) -> None:
        folder = Path(directory).expanduser()
        if not any((folder / name).exists() for name in _FILES):
            allowed = f"One of {', '.join(_FILES)}; without a tokenizer, prompts are token ids"
            raise ConfigError(Problem(f"model {folder}", "has no tokenizer", allowed))
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever the library meets in a broken file
            reason = " ".join(str(error).split())
            raise ConfigError(Problem(f"model {folder}", f"its tokenizer cannot be loaded ({reason})")) from error
        self._decode = _decoder(self._tokenizer)
        self._piece = piece_reader(self._tokenizer)

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        """See `Tokenizer`."""
        return list(self._tokenizer.encode(text, add_special_tokens=not is_rendered))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._decode(token_ids)

    def piece(self, token_id: int) -> bytes | None:
        """See `Tokenizer`."""
        return self._piece(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """See `Tokenizer`."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise ConfigError(Problem("messages", "the model has no chat template", "Give a prompt instead"))
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise ConfigError(Problem("messages", f"do not fit the model's chat template ({error})")) from error
        return str(text)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """What turns a tokenizer's tokens into text, twice for every token of every output.

    A tokenizer that decodes as most do is asked below the library's own layers, which take three times as long as it does.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    as_most = isinstance(tokenizer, PreTrainedTokenizerFast) and (
        (kind.decode, kind._decode) == (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    )
    if as_most:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def has_tokenizer(directory: str | Path) -> bool:
    """Whether the model's directory comes with a tokenizer."""
    folder = Path(directory).expanduser()
    return any((folder / name).exists() for name in _FILES)


class TextStream:
    """The text of one output, token by token.

    Only the last few tokens are decoded again with each new one: from where text was last complete (`_prefix`), as a token
    may be written differently at the very beginning.
    """

    __slots__ = ("_prefix", "_read", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        before, now = self._decoded()
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left when no token follows: characters that stayed incomplete."""
        before, now = self._decoded()
        self._prefix = self._read = len(self._token_ids)
        return now[len(before) :]

    def _decoded(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._token_ids[self._prefix : self._read]), decode(self._token_ids[self._prefix :])
