"""Decodes of unequal contexts are timed as FlashAttention 2 spreads them: evenly while it splits contexts, by the longest one when not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.latency.conftest import attention_us
from vajra_py.contract import BatchFeatures
from vajra_py.latency import ProfileBundleConfig, ProfileBundleModel, load_device
from vajra_py.latency.operators.bundle_files import NO_SKEW, SkewSample
from vajra_py.latency.operators.flash_decoding import (
    DecodeKernel,
    UnequalContexts,
    fitted_peak_share,
    lognormal_quantiles,
    spread_orders,
)

PEAK = 0.02
"""Part of the bandwidth that one block draws in these tests."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_contexts_are_split_while_the_batch_fills_less_than_four_fifths_of_the_slots() -> None:
    kernel = DecodeKernel(kv_heads=8, num_sms=188, peak_share=PEAK)  # 0.8 x 2 x 188 = 300.8 blocks
    assert kernel.splits(37)
    assert not kernel.splits(38)
    assert DecodeKernel(kv_heads=4, num_sms=188, peak_share=PEAK).splits(75)
    assert not DecodeKernel(kv_heads=4, num_sms=188, peak_share=PEAK).splits(76)


def test_blocks_start_in_order_and_share_the_bandwidth() -> None:
    # Two multiprocessors, one head, contexts 2, 1, 1 of 4: the first two run at half the bandwidth each until the short one ends at half
    # of the whole time; the third runs beside the rest of the first, and both end together.
    assert DecodeKernel(1, 2, peak_share=1.0).time([2, 1, 1]) == pytest.approx(1.0)
    # The long one last: it is alone, at the full bandwidth or at what one block can draw.
    assert DecodeKernel(1, 2, peak_share=1.0).time([1, 1, 2]) == pytest.approx(1.0)
    assert DecodeKernel(1, 2, peak_share=0.5).time([1, 1, 2]) == pytest.approx(0.5 + 2 / 4 / 0.5)
    # The second head's blocks come after all of the first's: a long context that is last in the batch starts last of all.
    first, last = (DecodeKernel(2, 2, peak_share=0.5).time(order) for order in ([6, 1, 1], [1, 1, 6]))
    assert first == pytest.approx(2.0)
    assert last == pytest.approx(2.25)


@settings(max_examples=80, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    heads=st.integers(1, 8),
    sms=st.integers(1, 40),
    peak=st.floats(0.03, 1.0),
)
def test_no_batch_is_faster_than_its_bytes_or_its_longest_context(
    contexts: list[int], heads: int, sms: int, peak: float
) -> None:
    time = DecodeKernel(heads, sms, peak).time(contexts)
    longest = max(contexts) / sum(contexts)
    assert time >= heads - 1e-9
    assert time >= longest / peak - 1e-9
    # Blocks in order on equal slots: nothing waits while a slot is free.
    slowest_share = min(peak, 1.0 / sms)
    assert time <= heads / sms / slowest_share + longest / slowest_share + 1e-9


def test_contexts_of_the_stated_spread_stand_for_the_batch() -> None:
    values = lognormal_quantiles(4000, 0.5)
    mean = sum(values) / len(values)
    variation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean
    assert values == sorted(values)
    assert variation == pytest.approx((2.718281828**0.25 - 1) ** 0.5, rel=0.02)
    orders = spread_orders(values[:30])
    assert all(sorted(order) == values[:30] for order in orders)
    assert len({order.index(values[29]) for order in orders}) == len(orders)


def test_unequal_contexts_cost_nothing_while_split_and_less_the_more_blocks_hide_the_longest() -> None:
    unequal = UnequalContexts(DecodeKernel(8, 188, PEAK), 0.5, COUNTS)
    assert [unequal.factor(count) for count in (1, 16, 32)] == [1.0, 1.0, 1.0]
    above = [unequal.factor(count) for count in (40, 64, 96, 128, 256)]
    assert above == sorted(above, reverse=True)
    assert 1.1 < above[0] < 1.35
    assert above[-1] > 1.0
    assert unequal.factor(5000) == above[-1]
    assert UnequalContexts(DecodeKernel(8, 188, PEAK), 0.2, COUNTS).factor(64) < above[1]
    assert UnequalContexts(DecodeKernel(8, 188, PEAK), 0.0, COUNTS).factor(64) == 1.0
    # A grid that ends while contexts are still split has no time without splits to stretch.
    assert UnequalContexts(DecodeKernel(8, 188, PEAK), 0.5, (1, 2, 4, 8)).factor(64) == 1.0


def sample(kernel: DecodeKernel, count: int, long: int, chunk: int = 0) -> SkewSample:
    """What a bundle would say of a batch with a few long contexts, on a GPU as the model has it."""
    one = SkewSample(count, chunk, 0.6, 1.0, long, 4.0)
    return SkewSample(count, chunk, 0.6, kernel.ratio(one), long, 4.0)


def test_what_one_block_draws_follows_from_the_bundle_s_own_batches() -> None:
    real = DecodeKernel(8, 188, peak_share=0.031)
    samples = [
        sample(real, count, long) for count in (2, 32, 64, 128, 256) for long in (count // 16, count // 2) if long
    ]
    mixed = [sample(DecodeKernel(8, 188, 0.01), 64, 4, chunk=512)]
    first = DecodeKernel(8, 188, PEAK)
    assert fitted_peak_share(np.array([*samples, *mixed]), first) == pytest.approx(0.031, rel=0.02)
    assert fitted_peak_share(NO_SKEW, first) == PEAK
    # Batches with split contexts give no information about it.
    assert fitted_peak_share(np.array(samples[:2]), first) == PEAK


def test_what_one_block_draws_on_a_small_gpu_is_found_as_well() -> None:
    # A GPU of 58 multiprocessors and 0.3 TB/s, of whose bandwidth a block draws far more than of a large one's.
    real = DecodeKernel(8, 58, peak_share=0.11)
    samples = [sample(real, count, 1) for count in (16, 32, 64)]
    assert fitted_peak_share(np.array(samples), DecodeKernel(8, 58, PEAK)) == pytest.approx(0.11, rel=0.05)


def test_without_batches_of_its_own_a_gpu_has_what_its_memory_and_multiprocessors_say() -> None:
    kernels = {name: DecodeKernel.of(load_device(name), 8, 128) for name in ("a100", "l4", "rtx-pro-6000")}
    # A block has 32 KiB on their way and waits a microsecond for them, on whichever memory.
    for name, kernel in kernels.items():
        device = load_device(name)
        assert kernel.peak_share * device.attainable_bandwidth == pytest.approx(32 * 1024 / 1e-6)
        assert kernel.num_sms == device.num_sms
    # 80 KiB of queries, keys and values: twice into the 164 KiB of an A100's multiprocessor, once into the 100 KiB of the others'.
    assert [one.num_slots for one in kernels.values()] == [2 * 108, 58, 188]
    assert DecodeKernel.of(load_device("rtx-pro-6000"), 8, 64).num_slots == 188
    # The rule for splitting counts two blocks a multiprocessor wherever it runs.
    assert kernels["a100"].splits(21)
    assert not kernels["a100"].splits(22)


def of(path: Path, **given: object) -> ProfileBundleModel:
    settings = {"path": str(path), "host": "none", "context_variation": 0.5, **given}
    return ProfileBundleConfig.model_validate(settings).build()


def test_a_bundle_s_decodes_are_stretched_on_gpus_with_flash_attention_2_alone(bundle: Path) -> None:
    plain, spread = of(bundle, context_variation=0.0), of(bundle)
    kernel = DecodeKernel.of(load_device("rtx-pro-6000"), 8, 128)
    factor = UnequalContexts(kernel, 0.5, (1, 8, 64, 128)).factor
    for count, padded in ((30, 32), (41, 48), (64, 64), (200, 200)):
        shape = BatchFeatures(count, count * 1000)
        longer_s = spread.batch_time_s(shape) - plain.batch_time_s(shape)
        assert longer_s == pytest.approx(32e-6 * attention_us(0, 0, count, 1000) * (factor(padded) - 1.0), abs=1e-12)
    shape = BatchFeatures(64, 64 * 1000)
    for device in ("h100", "b200"):
        assert of(bundle, device=device).batch_time_s(shape) == plain.batch_time_s(shape)


def test_which_gpus_compute_attention_by_flash_attention_2() -> None:
    uses = {
        name: load_device(name).uses_flash_attention_2 for name in ("a100", "l4", "l40s", "rtx-4090", "rtx-pro-6000")
    }
    assert all(uses.values())
    assert not any(load_device(name).uses_flash_attention_2 for name in ("h100", "h200", "b200", "cpu"))
    assert not load_device({"base": "l4", "name": "unknown", "num_sms": 0}).uses_flash_attention_2


def event_by_event(kernel: DecodeKernel, contexts: list[float]) -> float:
    """The list schedule by its definition: at every moment each running block draws an equal share, or its peak."""
    waiting = [context / sum(contexts) for context in contexts] * kernel.kv_heads
    running: list[float] = []
    clock = 0.0
    while waiting or running:
        while waiting and len(running) < kernel.num_sms:
            running.append(waiting.pop(0))
        speed = min(kernel.peak_share, 1.0 / len(running))
        least = min(running)
        clock += least / speed
        running = [left - least for left in running if left - least > 1e-15]
    return clock


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1.0, 1e4), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 40),
    st.floats(0.01, 0.5),
)
def test_the_schedule_is_that_of_its_events(contexts: list[float], heads: int, sms: int, peak: float) -> None:
    kernel = DecodeKernel(heads, sms, peak)
    assert kernel.time(contexts) == pytest.approx(event_by_event(kernel, contexts), rel=1e-6)
