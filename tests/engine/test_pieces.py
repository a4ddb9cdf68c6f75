"""Tokens as bytes, and the characters that they are part of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.engine.pieces import CharacterCounter, byte_values, piece_reader


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=2).map(str.encode)), max_size=8))
def test_pieces_begin_where_their_first_byte_is_read(pieces: list[bytes]) -> None:
    counter = CharacterCounter()
    places = [counter.add(piece) for piece in pieces]
    whole = b"".join(pieces)
    begin = 0
    for place, piece in zip(places, pieces, strict=True):
        if piece:
            # the characters up to the first byte's own, which is whole once the text ends there or an ASCII byte follows
            ends = [whole[: begin + 1 + more].decode("utf-8", "replace") for more in range(4)]
            assert place == len(ends[0]) - 1
            assert ends[0][:-1] == whole.decode("utf-8", "replace")[:place]
        begin += len(piece)


def reader_of(tokens: list[str], decoder: Any, special: tuple[str, ...] = ()) -> Any:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({token: k for k, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(one, special=True) for one in special])
    return piece_reader(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_every_kind_of_vocabulary_has_bytes() -> None:
    from tokenizers import decoders

    level = reader_of(["\u0120a", "\u00e2", "<s>"], decoders.ByteLevel(), ("<s>",))
    assert [level(k) for k in range(4)] == [b" a", b"\xe2", None, None]
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    sentence = reader_of(["\u2581a", "<0xE2>", "b\u2581", "</s>"], decoders.Sequence(parts), ("</s>",))
    assert [sentence(k) for k in range(4)] == [b" a", b"\xe2", b"b ", None]
    words = reader_of(["a", "##b"], decoders.WordPiece())
    assert words(0) == b"a"


def test_the_bytes_of_byte_level_vocabularies_are_all_there() -> None:
    assert sorted(byte_values().values()) == list(range(256))
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_values()) == set(ByteLevel.alphabet())


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_a_number_without_a_token_has_none(token_id: int) -> None:
    from tokenizers import decoders

    assert reader_of(["a"], decoders.ByteLevel())(token_id) is None
