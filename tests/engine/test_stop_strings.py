"""Stop strings over tokens that are any pieces of a text's bytes, held to what a search of the whole text gives."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.outputs import OutputBuffer, detokenize
from vajra_py.engine.tokenizer import text_stream


class Pieces:
    """A tokenizer of one text, whose tokens are its pieces by number; `stripped_blanks` None: by windows, decoded again."""

    def __init__(self, pieces: Sequence[bytes], stripped_blanks: int | None) -> None:
        self._pieces = pieces
        self.stripped_blanks = stripped_blanks

    def piece(self, token_id: int) -> bytes | None:
        return self._pieces[token_id]

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [b"".join(self._pieces[token] for token in row).decode("utf-8", "replace") for row in rows]


def cut(text: str, places: Sequence[int]) -> list[bytes]:
    """The text's bytes in pieces, which may end within a character."""
    data = text.encode()
    ends = [*sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def whole_characters(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "ignore")


def ends_whole(pieces: Sequence[bytes]) -> bool:
    return b"".join(pieces) == whole_characters(pieces).encode()


@given(
    text=st.text("ab. é€😀", min_size=1, max_size=24),
    places=st.lists(st.integers(0, 200), max_size=12),
    spans=st.lists(st.tuples(st.integers(0, 23), st.integers(1, 6)), min_size=1, max_size=3),
    by_pieces=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 2]),
)
def test_text_ends_before_the_first_stop_and_nothing_shown_is_taken_back(
    text: str, places: list[int], spans: list[tuple[int, int]], by_pieces: bool, min_tokens: int
) -> None:
    pieces = cut(text, places)
    stops = tuple({text[begin % len(text) :][:length] for begin, length in spans})
    tokenizer = Pieces(pieces, 0 if by_pieces else None)
    output = OutputBuffer(SamplingParams(stop=stops, min_tokens=min_tokens), (), text_stream(tokenizer))  # type: ignore[arg-type]
    shown = []
    for token in range(len(pieces)):
        assert not output.append(token)
        detokenize([output])
        shown.append(output.text)
        if output.stopped_by is not None:
            break
    output.finish()
    final = output.text
    assert all(final.startswith(part) for part in shown)
    complete = whole_characters(pieces[: len(output.token_ids)])
    if output.stopped_by is None:
        assert final == complete == text
        assert min_tokens or not any(stop in text for stop in stops)
        return
    assert final + str(output.stopped_by) == complete[: len(final) + len(str(output.stopped_by))]
    assert len(output.token_ids) >= min_tokens
    if not min_tokens:
        count = len(output.token_ids) - 1
        while not by_pieces and not ends_whole(pieces[:count]):  # windows wait for whole characters
            count -= 1
        before = whole_characters(pieces[:count])
        assert not any(stop in before for stop in stops), "it could have ended a token earlier"
        assert len(final) == min(place for stop in stops if (place := complete.find(stop)) >= 0)
