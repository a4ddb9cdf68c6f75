"""The bytes of each token of a vocabulary.

A token may be only part of a character, so tokens are compared and joined as bytes rather than text.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"
"""Character for a blank in SentencePiece vocabularies."""
_CACHED_PIECES = 65536
_SENTENCE_PIECE = [
    {"type": "Replace", "pattern": {"String": _WORD_START}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
"""Parts of the decoder of SentencePiece vocabularies; some decoders have a fourth part, which strips blanks."""


def piece_reader(tokenizer: Any, *, keeps_special: bool = False) -> Callable[[int], bytes | None]:
    """Return a function that returns the bytes of a token id, or None for special tokens and for ids without a token.

    `tokenizer` is a tokenizer of transformers. With `keeps_special`, the bytes of a special token are its name in the
    vocabulary.
    """
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (
        set() if backend is None else {one["type"] for one in _decoders(json.loads(backend.to_str()).get("decoder"))}
    )
    size = len(tokenizer)

    @lru_cache(_CACHED_PIECES)
    def read(token_id: int) -> bytes | None:
        if (token_id in special and not keeps_special) or not 0 <= token_id < size:
            return None
        name: str | None = tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return None
        if token_id in special:
            return name.encode()
        if "ByteLevel" in parts:
            return _byte_level(name)
        found = _BYTE.fullmatch(name) if "ByteFallback" in parts else None
        if found is not None:
            return bytes.fromhex(found[1])
        if parts & {"Metaspace", "Replace"}:
            return name.replace(_WORD_START, " ").encode()
        return str(tokenizer.decode([token_id])).encode()

    return read


def stripped_blanks(tokenizer: Any) -> int | None:
    """Return the number of leading blanks that decoding strips; None if decoded text may differ in other ways from the
    joined bytes of its tokens.

    The result is a number only for byte-level and SentencePiece vocabularies, which are recognised by their decoder.
    For tokens with invalid UTF-8, the decoder may give more replacement characters than decoding the joined bytes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str()).get("decoder")
    parts = list(_decoders(decoder))
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return 0
    if parts[:3] != _SENTENCE_PIECE:
        return None
    if not parts[3:]:
        return 0
    strip = parts[3]
    is_plain = len(parts) == 4 and strip["type"] == "Strip" and strip["content"] == " " and strip["stop"] == 0
    return int(strip["start"]) if is_plain else None


def _decoders(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a decoder in order, without the sequences that group them."""
    if isinstance(decoder, dict):
        if decoder["type"] != "Sequence":
            yield decoder
        for one in decoder.get("decoders", ()):
            yield from _decoders(one)


def _byte_level(name: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary; the name of an added token is encoded as UTF-8."""
    values = byte_values()
    if all(character in values for character in name):
        return bytes(values[character] for character in name)
    return name.encode()


@lru_cache(1)
def byte_values() -> dict[str, int]:
    """Return the byte of each printable character in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    pairs = [*((value, value) for value in printable), *((256 + k, value) for k, value in enumerate(others))]
    return {chr(code): value for code, value in pairs}


class CharacterCounter:
    """Count the characters of a text whose bytes arrive in pieces; invalid bytes count as replacement characters."""

    __slots__ = ("_decoder", "_num_whole")

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_whole = 0

    def add(self, piece: bytes) -> int:
        """Add a piece; return the index of the character that the first byte of the piece belongs to."""
        place = self._num_whole
        if piece:
            had_part = bool(self._decoder.getstate()[0])
            text = self._decoder.decode(piece[:1])
            continues = text == "" or (len(text) == 1 and text != "\ufffd" and not self._decoder.getstate()[0])
            place += had_part and not continues
            self._num_whole += len(text) + len(self._decoder.decode(piece[1:]))
        return place
