"""Tokens as bytes, and the characters that they are part of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.engine.pieces import CharacterCounter, byte_values, piece_reader
from vajra_py.engine.tokenizer import HubTokenizer, PieceStream, TextStream, WindowStream, text_stream


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


def tokenizer_of(tokens: list[str], decoder: Any, special: tuple[str, ...] = ()) -> Any:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({token: k for k, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(one, special=True) for one in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def reader_of(tokens: list[str], decoder: Any, special: tuple[str, ...] = ()) -> Any:
    return piece_reader(tokenizer_of(tokens, decoder, special))


SENTENCE_PIECE = [
    "\u2581a",
    "b",
    "\u2581",
    "\u2581\u2581",
    "\u65e5",
    *(f"<0x{value:02X}>" for value in range(256)),
    "</s>",
]


@pytest.fixture(scope="module")
def hub_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HubTokenizer]:
    from tokenizers import decoders

    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    kinds = {
        "byte level": (sorted(byte_values()), decoders.ByteLevel()),
        "Gemma": (SENTENCE_PIECE, decoders.Sequence(parts)),
        "Llama 2": (SENTENCE_PIECE, decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])),
        "another": (SENTENCE_PIECE, decoders.Sequence([*parts, decoders.Strip(" ", 1, 1)])),
    }
    made = {}
    for name, (tokens, decoder) in kinds.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer_of([*tokens, "</s>"], decoder, ("</s>",)).save_pretrained(folder)
        made[name] = HubTokenizer(folder)
    return made


@pytest.mark.parametrize(("name", "num_stripped"), [("byte level", 0), ("Gemma", 0), ("Llama 2", 1), ("another", None)])
def test_decoders_tell_whether_pieces_make_the_text(
    name: str, num_stripped: int | None, hub_tokenizers: dict[str, HubTokenizer]
) -> None:
    tokenizer = hub_tokenizers[name]
    assert tokenizer.stripped_blanks == num_stripped
    assert isinstance(text_stream(tokenizer), WindowStream if num_stripped is None else PieceStream)


_RUNS = st.lists(st.one_of(st.integers(0, 4).map(lambda one: [one]), st.text(max_size=2).map(lambda text: [5 + byte for byte in text.encode()])), max_size=12)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(_RUNS, st.integers(1, 4), st.sampled_from(["Gemma", "Llama 2"]), st.sampled_from(["pieces", "windows"]))
def test_streams_give_the_text_that_the_tokenizer_decodes(
    hub_tokenizers: dict[str, HubTokenizer], runs: list[list[int]], size: int, name: str, kind: str
) -> None:
    tokenizer = hub_tokenizers[name]
    token_ids = [token for run in runs for token in run]
    stream: TextStream = PieceStream(tokenizer) if kind == "pieces" else WindowStream(tokenizer)
    parts = [stream.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    assert "".join(parts) + stream.rest() == tokenizer.decode(token_ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=12), st.integers(1, 4))
def test_byte_level_streams_give_the_text_that_the_tokenizer_decodes(
    hub_tokenizers: dict[str, HubTokenizer], token_ids: list[int], size: int
) -> None:
    tokenizer = hub_tokenizers["byte level"]
    stream = text_stream(tokenizer)
    parts = [stream.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    assert "".join(parts) + stream.rest() == tokenizer.decode(token_ids)


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
