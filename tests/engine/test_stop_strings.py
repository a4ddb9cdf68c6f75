"""Stop strings over tokens that are any pieces of a text's bytes, held to what a search of the whole text gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.naive_stops import NaiveSearch
from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.outputs import OutputBuffer, detokenize
from vajra_py.engine.params import check_sampling
from vajra_py.engine.stop_strings import MAX_STOP_CHARACTERS, StopSearch, stop_automaton
from vajra_py.engine.tokenizer import text_stream
from vajra_py.errors import ConfigError


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
    assert len(output.token_ids) > min_tokens or not min_tokens
    if not min_tokens:
        count = len(output.token_ids) - 1
        while not by_pieces and not ends_whole(pieces[:count]):  # windows wait for whole characters
            count -= 1
        before = whole_characters(pieces[:count])
        assert not any(stop in before for stop in stops), "it could have ended a token earlier"
        assert len(final) == min(place for stop in stops if (place := complete.find(stop)) >= 0)


@given(
    texts=st.lists(st.text("abc", max_size=5), max_size=16),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5),
    min_texts=st.integers(0, 8),
)
def test_a_search_finds_and_holds_back_what_comparing_everything_does(
    texts: list[str], stops: list[str], min_texts: int
) -> None:
    search, naive = StopSearch(tuple(stops)), NaiveSearch(stops)
    for number, text in enumerate(texts, 1):
        result = search.push(text, number >= min_texts)
        assert result == naive.push(text, number >= min_texts)
        if result[1] is not None:
            return


class _Counted(dict[tuple[int, str], int]):
    """Edges of an automaton that count how often one is looked up."""

    num_lookups = 0

    def get(self, key: tuple[int, str], default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)


def _num_lookups(stops: tuple[str, ...], texts: Sequence[str]) -> int:
    automaton = stop_automaton(stops)
    edges = automaton.edges = _Counted(automaton.edges)
    search = StopSearch(stops)
    for text in texts:
        assert search.push(text, True)[1] is None
    return edges.num_lookups


@pytest.mark.parametrize("unit", ["a", "ab", "abcab"])
@pytest.mark.parametrize("length", [64, 1000])
def test_a_character_costs_the_same_however_much_is_held_back_and_however_many_the_stops(
    unit: str, length: int
) -> None:
    text = (unit * length)[:length]
    texts = [text[begin : begin + 3] for begin in range(0, length, 3)] * 4
    held_back = (text + "x", *(text[:1] + str(number) + text for number in range(15)))
    for stops in (held_back[:1], held_back):
        assert _num_lookups(stops, texts) <= 2 * sum(map(len, texts)) + 1


def test_requests_with_the_same_stops_share_what_is_built_from_them() -> None:
    first, second = (OutputBuffer(SamplingParams(stop=("once", "only")), ()) for _ in range(2))
    assert first._search is not None
    assert second._search is not None
    assert first._search._automaton is second._search._automaton


def test_stop_strings_have_a_largest_length() -> None:
    longest = "s" * MAX_STOP_CHARACTERS
    check_sampling(SamplingParams(max_tokens=1, stop=(longest,)))
    check_sampling(SamplingParams(max_tokens=1, stop=(longest,) * 4))
    with pytest.raises(ConfigError, match=r"sampling\.stop: is too long .*up to 1024 characters each, 4096 together"):
        check_sampling(SamplingParams(max_tokens=1, stop=(longest + "s",)))
    with pytest.raises(ConfigError, match=r"all together 4097"):
        check_sampling(SamplingParams(max_tokens=1, stop=(*(longest,) * 4, "s")))
