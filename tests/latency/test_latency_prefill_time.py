from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.contract.latency import BatchFeatures, PrefillTime
from vajra_py.errors import ExecutorError
from vajra_py.latency import AffineModel, PrefillTimeTable, RooflineModel, load_device, load_model

ROOFLINE = RooflineModel(load_model("Llama-3.1-8B"), load_device("a100"))


def fixed(size: int) -> object:
    return lambda done, remaining: min(remaining, size)


def within_target(done: int, remaining: int) -> int:
    """Like a dynamic chunk rule: the largest chunk that keeps to a target time, a multiple of 32 unless it is the last."""
    largest = max(32, 4096 - done // 8)
    return remaining if remaining <= largest else largest // 32 * 32


def chunk_by_chunk(num_tokens: int, rule: object) -> float:
    done, time = 0, 0.0
    while done < num_tokens:
        size = rule(done, num_tokens - done)  # type: ignore[operator]
        time += ROOFLINE.batch_time_s(BatchFeatures().with_chunk(size, done))
        done += size
    return time


@pytest.mark.parametrize("rule", [fixed(512), fixed(2048), fixed(700), fixed(100), within_target])
def test_entries_are_the_sum_over_the_chunks_that_the_rule_chooses(rule: object) -> None:
    table: PrefillTime = PrefillTimeTable(ROOFLINE, rule)  # type: ignore[arg-type]
    for num_tokens in (256, 512, 2048, 2304, 5120, 20_480):
        assert table.total_s(num_tokens) == pytest.approx(chunk_by_chunk(num_tokens, rule), rel=1e-12)


def test_totals_round_up_and_done_rounds_down_to_256() -> None:
    table = PrefillTimeTable(ROOFLINE, lambda done, remaining: min(remaining, 512))
    assert table.total_s(1) == table.total_s(256)
    assert table.total_s(257) == table.total_s(512)
    assert table.total_s(0) == 0
    assert table.remaining_s(1000, 0) == table.total_s(1024)
    assert table.remaining_s(1000, 511) == table.total_s(1024) - table.total_s(256)
    assert table.remaining_s(1000, 1000) == 0


@settings(max_examples=60)
@given(total=st.integers(0, 40_000), done=st.integers(0, 50_000), more=st.integers(0, 5000), size=st.integers(1, 5000))
def test_remaining_time_is_never_negative_and_falls_with_progress(total: int, done: int, more: int, size: int) -> None:
    table = PrefillTimeTable(
        AffineModel(0.01, 1e-5, per_prefill_pair_s=1e-10), lambda d, remaining: min(remaining, size)
    )
    left, later = table.remaining_s(total, done), table.remaining_s(total, done + more)
    assert 0 <= later <= left <= table.total_s(total) + 1e-12


def test_stages_divide_the_time() -> None:
    one, four = (PrefillTimeTable(ROOFLINE, lambda done, remaining: min(remaining, 512), stages) for stages in (1, 4))
    assert four.total_s(100_000) == pytest.approx(one.total_s(100_000) / 4)


def test_each_entry_is_computed_once_and_only_as_far_as_asked() -> None:
    calls: list[BatchFeatures] = []

    class Counting:
        num_stages = 1

        def batch_time_s(self, shape: BatchFeatures) -> float:
            calls.append(shape)
            return 1e-3 * shape.num_tokens

        stage_time_s = batch_time_s

    table = PrefillTimeTable(Counting(), lambda done, remaining: min(remaining, 2048))
    assert not calls
    assert table.total_s(256 * 100) == pytest.approx(25.6)
    asked = len(calls)
    assert asked <= 100 + 100 // 8 + 1  # one a row, and one a finished chunk
    table.remaining_s(256 * 100, 256 * 50)
    assert len(calls) == asked
    # Two million tokens are as many rows as are needed for them, no more.
    table.total_s(2 << 20)
    assert len(calls) <= (2 << 20) // 256 * 1.2


def test_a_rule_that_gives_nothing_is_an_error() -> None:
    table = PrefillTimeTable(ROOFLINE, lambda done, remaining: 0 if done >= 512 else 512)
    assert table.total_s(512) > 0
    with pytest.raises(ExecutorError, match="gives a lone prompt 0 tokens after 512"):
        table.total_s(1000)
