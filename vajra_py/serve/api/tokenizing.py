"""Tokenize prompts off the event loop, in fair turns, and refuse overlong prompts before they are fully tokenized."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from vajra_py.engine.tokenizer import ChatEnd, Tokenizer
from vajra_py.serve.http.errors import ApiError, bad_request

SHORT_TEXT = 2_000
"""Largest text, in characters, that is tokenized on the event loop, since this is faster than a round trip to another
thread.
"""
_PIECE = 16_384
"""Number of characters tokenized per turn."""
_SLACK = 16
"""Maximum number of tokens that a piece has beyond its share of the whole text's tokens: special tokens, and words
divided by the cut."""


class Tokenizing:
    """One thread that tokenizes the pieces of all waiting prompts in turn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "vajra-tokenize")

    def close(self) -> None:
        """Stop the thread and cancel all waiting work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def tokens(
        self, tokenizer: Tokenizer, text: str, max_tokens: int, *, param: str, is_rendered: bool
    ) -> list[int]:
        """Return the tokens of a text, with special tokens added unless the text `is_rendered`.

        If a text has more than `max_tokens` (and more than `SHORT_TEXT`) characters, its tokens are first counted piece
        by piece, in turn with pieces of other texts. Raises `ApiError` as soon as the count shows that the text has
        `max_tokens` tokens or more. The count is a lower bound, and shorter texts are not counted, so the caller must
        check the number of tokens.
        """
        if len(text) <= SHORT_TEXT:
            return tokenizer.encode(text, is_rendered=is_rendered)
        loop = asyncio.get_running_loop()
        if len(text) > max_tokens:
            num_tokens = 0
            for start in range(0, len(text), _PIECE):
                piece = text[start : start + _PIECE]
                num_tokens += max(0, await loop.run_in_executor(self._thread, _count, tokenizer, piece) - _SLACK)
                if num_tokens >= max_tokens:
                    raise _too_long(start + len(piece), max_tokens, param)
        return await loop.run_in_executor(self._thread, lambda: tokenizer.encode(text, is_rendered=is_rendered))

    async def render(self, tokenizer: Tokenizer, messages: list[dict[str, str]], end: ChatEnd) -> str:
        """Return the rendered text of a conversation. Raises `ConfigError`."""
        if sum(len(message["content"]) for message in messages) <= SHORT_TEXT:
            return tokenizer.render_chat(messages, end)
        return await asyncio.get_running_loop().run_in_executor(self._thread, tokenizer.render_chat, messages, end)

    async def text(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        if len(token_ids) <= SHORT_TEXT:
            return tokenizer.decode(token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._thread, tokenizer.decode, token_ids)


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, is_rendered=True))


def _too_long(num_characters: int, max_tokens: int, param: str) -> ApiError:
    message = (
        f"{param}: is too long (its first {num_characters} characters are {max_tokens} tokens or more). "
        f"Allowed: up to {max_tokens - 1} tokens"
    )
    return bad_request(message, param, "context_length_exceeded")
