"""Steps are predicted from operator times that were measured inside an engine, and what they do not cover is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.latency.conftest import attention_rows, attention_us, dense_us, head_us, write
from tests.latency.measured import as_mixture
from vajra_py.contract import BatchFeatures
from vajra_py.errors import ConfigError, ExecutorError
from vajra_py.latency import (
    BundleOptions,
    Calibration,
    Link,
    ProfileBundleConfig,
    ProfileBundleModel,
    load_model,
    read_bundle,
)
from vajra_py.latency.hardware.host_overhead import HostOverhead
from vajra_py.latency.operators.attention_grid import filled
from vajra_py.latency.operators.bundle_files import Samples, SkewSample
from vajra_py.latency.operators.calibration_file import read_calibration
from vajra_py.latency.operators.collectives import Collectives
from vajra_py.latency.operators.dense_times import DenseTimes
from vajra_py.latency.operators.expert_times import ExpertTimes, Routing
from vajra_py.latency.operators.measured_skew import skew_factors
from vajra_py.latency.operators.profile_bundle import capture_sizes

NUM_LAYERS = 32
MICRO = 1e-6
"""Llama-3.1-8B's."""


def of(path: Path, **settings: object) -> ProfileBundleModel:
    return ProfileBundleConfig.model_validate(
        {"path": str(path), "host": "none", "context_variation": 0.0, **settings}
    ).build()


def step_us(tokens: int, sequences: int, attention: float) -> float:
    """By hand: eight operators a layer (the norm runs twice), two outside, attention, and the head."""
    return NUM_LAYERS * (8 * dense_us(tokens) + attention) + 2 * dense_us(tokens) + 2 * head_us(sequences)


def test_a_step_is_the_sum_of_its_operators(bundle: Path) -> None:
    model = of(bundle)
    chunk = BatchFeatures().with_chunk(1024, 512)
    assert model.batch_time_s(chunk) == pytest.approx(MICRO * step_us(1024, 1, attention_us(1024, 512, 0, 0)))
    decodes = BatchFeatures(64, 64 * 900)
    assert model.batch_time_s(decodes) == pytest.approx(MICRO * step_us(64, 64, attention_us(0, 0, 64, 900)))
    mixed = decodes.with_chunk(960, 100)
    assert model.batch_time_s(mixed) == pytest.approx(MICRO * step_us(1024, 65, attention_us(960, 100, 64, 900)))
    assert model.batch_time_s(BatchFeatures()) == 0.0


def test_without_tokens_only_the_swapped_bytes_take_time(bundle: Path) -> None:
    model = of(bundle, device="a100")
    assert model.batch_time_s(BatchFeatures(swap_bytes=26_300_000)) == pytest.approx(1e-3)
    with_swap = model.batch_time_s(BatchFeatures(4, 400, swap_bytes=26_300_000))
    assert with_swap - model.batch_time_s(BatchFeatures(4, 400)) == pytest.approx(1e-3)


def test_batches_are_padded_to_the_sizes_of_cuda_graphs(bundle: Path) -> None:
    assert capture_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert capture_sizes(512)[-3:] == (480, 496, 512)
    padded, eager = of(bundle), of(bundle, cuda_graphs=False)
    shape = BatchFeatures(61, 61 * 100)
    attention, head = attention_us(0, 0, 61, 100), head_us(61)
    for model, tokens in ((padded, 64), (eager, 61)):
        expected = NUM_LAYERS * (8 * dense_us(tokens) + attention) + 2 * dense_us(tokens) + 2 * head
        assert model.batch_time_s(shape) == pytest.approx(MICRO * expected)
    large = BatchFeatures().with_chunk(517, 0)
    assert padded.batch_time_s(large) == eager.batch_time_s(large)


def test_chunks_side_by_side_have_the_attention_of_their_pairs(bundle: Path) -> None:
    model = of(bundle)
    one = model.breakdown_s(BatchFeatures().with_chunk(1024, 1024))
    two = model.breakdown_s(BatchFeatures().with_chunk(512, 1024).with_chunk(512, 1536))
    assert two["prefill_attention"] == pytest.approx(one["prefill_attention"])
    assert two["dense"] == one["dense"]
    side_by_side = model.breakdown_s(BatchFeatures().with_chunk(512, 0).with_chunk(512, 0))
    assert (
        side_by_side["prefill_attention"] < model.breakdown_s(BatchFeatures().with_chunk(1024, 0))["prefill_attention"]
    )


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.integers(0, 300),
    context=st.integers(1, 9000),
    chunks=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 9000)), max_size=3),
)
def test_parts_add_up_and_times_are_positive(decodes: int, context: int, chunks: list[tuple[int, int]]) -> None:
    shape = BatchFeatures(decodes, decodes * context)
    for tokens, behind in chunks:
        shape = shape.with_chunk(tokens, behind)
    model = _shared_model()
    time = model.batch_time_s(shape)
    assert sum(model.breakdown_s(shape).values()) == pytest.approx(time)
    assert (time > 0) == (shape.num_tokens > 0)


_MODELS: list[ProfileBundleModel] = []


def _shared_model() -> ProfileBundleModel:
    return _MODELS[-1]


@pytest.fixture(autouse=True)
def _model_for_properties(bundle: Path) -> None:
    _MODELS[:] = [of(bundle, host="vllm-0.19-sync")]


@pytest.mark.parametrize("num_steps", [5, 300])
@pytest.mark.parametrize("host", ["none", "vllm-0.19-sync", "vllm-0.19-async"])
def test_runs_of_decodes_equal_single_steps_bit_for_bit(bundle: Path, host: str, num_steps: int) -> None:
    model = of(bundle, host=host)
    times = model.decode_run_times_s(37, 37 * 990 + 11, num_steps)
    single = [model.batch_time_s(BatchFeatures(37, 37 * 990 + 11 + 37 * step)) for step in range(num_steps)]
    assert list(times) == single


def test_beyond_the_tables_the_last_line_goes_on_up_to_the_reach(bundle: Path) -> None:
    model = of(bundle)
    far = BatchFeatures(128, 128 * 16384)
    attention = attention_us(0, 0, 128, 16384)
    assert model.batch_time_s(far) == pytest.approx(MICRO * step_us(128, 128, attention))
    too_far = BatchFeatures(128, 128 * 8192 * 5)
    with pytest.raises(
        ExecutorError, match=r"does not reach a step of 128 decodes .* Measured up to .*'kv_decode': 8192"
    ):
        model.batch_time_s(too_far)
    with_roofline = of(bundle, fallback="roofline")
    assert with_roofline.batch_time_s(too_far) > model.batch_time_s(far)
    assert not with_roofline.covers(too_far)


def test_a_run_of_decodes_ends_at_the_reach_and_its_steps_beyond_do_not_count(bundle: Path) -> None:
    reach = 4 * 8192
    for fallback in (None, "roofline"):
        model = of(bundle, fallback=fallback)
        within = [model.batch_time_s(BatchFeatures(128, 128 * context)) for context in (reach - 1, reach)]
        assert list(model.decode_run_times_s(128, 128 * (reach - 1), 10)) == within
        assert model.num_fallback == 0
    model, beyond = of(bundle, fallback="roofline"), BatchFeatures(128, 128 * (reach + 1))
    (first,) = model.decode_run_times_s(*beyond[:2], 10)
    assert model.num_fallback == 0  # the step that is taken counts, once
    assert first == model.batch_time_s(beyond)
    assert model.num_fallback == 1
    with pytest.raises(ExecutorError, match="does not reach"):
        of(bundle).decode_run_times_s(*beyond[:2], 10)


def test_a_long_chunk_is_as_many_measured_ones(bundle: Path) -> None:
    model = of(bundle)
    halves = sum(attention_us(2048, context, 0, 0) for context in (0, 2048))
    assert model.breakdown_s(BatchFeatures().with_chunk(4096, 0))["prefill_attention"] == pytest.approx(
        MICRO * NUM_LAYERS * halves
    )


def test_two_gpus_exchange_twice_a_layer_and_need_a_link(bundle: Path) -> None:
    linked = of(bundle, tensor_parallel=2, link_bandwidth_gb_s=10.0, link_latency_us=20.0)
    alone = of(bundle)
    shape = BatchFeatures().with_chunk(1024, 0)
    states, scores = 1024 * 4096 * 2, 128256 * 2
    # Two sums a layer and one for the embedding; each GPU sends its half of the prompt's scores.
    expected = 65 * (20e-6 + states / 10e9) + 20e-6 + scores / 2 / 10e9
    assert linked.batch_time_s(shape) - alone.batch_time_s(shape) == pytest.approx(expected)
    found = read_bundle(bundle, 2)
    with pytest.raises(ConfigError, match="link: is needed for the collectives of 2 GPUs"):
        ProfileBundleModel(found, load_model("Llama-3.1-8B"), BundleOptions())
    assert of(bundle, tensor_parallel=2).options.link == Link(16e9, 20e-6)  # that of the bundle's own device


def test_ranks_gather_the_scores_of_every_sequence(bundle: Path) -> None:
    linked = of(bundle, tensor_parallel=2, link_bandwidth_gb_s=10.0, link_latency_us=20.0)
    few, many = BatchFeatures(64, 64 * 100), BatchFeatures(128, 128 * 100)
    states = 64 * 4096 * 2
    scores = 64 * 128256 * 2 / 2
    more = linked.breakdown_s(many)["all_reduce"] - linked.breakdown_s(few)["all_reduce"]
    assert more == pytest.approx((65 * states + scores) / 10e9)
    # Steps with prompts compute logits for as many rows as requests, and the combined lookup equals the sum of the
    # parts.
    mixed = few.with_chunk(512, 0)
    assert linked.batch_time_s(mixed) == pytest.approx(sum(linked.breakdown_s(mixed).values()))
    assert "all_reduce" not in of(bundle).breakdown_s(mixed)


def test_measured_all_reduces_time_the_gathering_of_scores(bundle: Path) -> None:
    model = load_model("Llama-3.1-8B")
    measured = Samples(np.array([0.0, 2e9]), np.array([10.0, 2e6 + 10.0]))  # 10 us, and 1 ns a byte
    collectives = Collectives(model, 4, 1, None, measured)
    assert collectives.scores_s(64) == pytest.approx(10e-6 + 64 * 128256 * 1e-9)  # half of 16-bit scores
    assert collectives.layers_s(100, 100) == pytest.approx(65 * (10e-6 + 100 * 4096 * 2e-9))
    assert Collectives(model, 1, 1, None, measured).scores_s(64) == 0.0


def test_products_cost_what_the_next_larger_sample_does_and_the_rest_is_linear() -> None:
    # Between 512 and 528 tokens a product begins another tile; samples further apart than a tile say nothing of where.
    sizes, times = np.array([256.0, 512.0, 528.0, 544.0]), np.array([100.0, 200.0, 300.0, 304.0])
    operators = {"qkv_proj": Samples(sizes, times), "act_fn": Samples(sizes, sizes)}
    dense = DenseTimes(operators, num_layers=2)
    assert dense.at(512) == pytest.approx(2 * (200 + 512))
    assert dense.at(513) == pytest.approx(2 * (300 + 513))
    assert dense.at(528) == pytest.approx(2 * (300 + 528))
    assert dense.at(529) == pytest.approx(2 * (304 + 529))
    assert dense.at(384) == pytest.approx(2 * (150 + 384))
    # Beyond the samples: along the line from the first one above half the largest.
    assert dense.at(816) == pytest.approx(2 * (304 + 272 * 104 / 32 + 816))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1.0, 1e4), min_size=4, max_size=40), st.integers(1, 800))
def test_dense_times_lie_between_those_of_the_samples_around(times: list[float], tokens: int) -> None:
    sizes = 16.0 * np.arange(1, len(times) + 1)
    ascending = np.sort(np.array(times))
    found = DenseTimes({"qkv_proj": Samples(sizes, ascending), "act_fn": Samples(sizes, ascending)}, 1).at(tokens)
    low, high = np.interp(tokens, sizes, ascending), np.interp(tokens + 16, sizes, ascending)
    assert found >= 2 * low * (1 - 1e-9)
    if tokens + 16 <= sizes[-1]:
        assert found <= 2 * high * (1 + 1e-9)


def test_host_overhead_is_between_steps_or_overlaps_them(bundle: Path) -> None:
    shape = BatchFeatures(64, 64 * 100)
    gpu_s = of(bundle).batch_time_s(shape)
    given = {"host_step_us": 1000.0, "host_per_request_us": 10.0, "host_exposed_us": 200.0}
    assert of(bundle, host="vllm-0.19-sync", **given).batch_time_s(shape) == pytest.approx(gpu_s + 1.64e-3)
    assert of(bundle, host="vllm-0.19-async", **given).batch_time_s(shape) == pytest.approx(gpu_s + 0.2e-3)
    slow_host = of(bundle, host="vllm-0.19-async", **{**given, "host_step_us": 50_000.0})
    assert slow_host.batch_time_s(shape) == pytest.approx(50.64e-3)
    assert of(bundle, arrival_us=300.0, first_token_us=200.0).host.request_s == pytest.approx(0.5e-3)


def test_unequal_contexts_take_as_much_longer_as_was_measured(bundle: Path) -> None:
    header = "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha"
    # Half of 64 contexts are 1500, half 500: they vary by 0.5, and attention takes a fifth longer than for 64 of 1000.
    rows = [
        "pure,64,32,0.5,3,0,0,500,1500,1000,100,150,120,0.4",
        "mixed,64,32,0.5,3,512,0,500,1500,1000,100,150,110,0.2",
    ]
    (bundle / "tp1" / "skew.csv").write_text("\n".join([header, *rows, ""]))
    # On a GPU whose attention is not FlashAttention 2.
    equal, unequal = (of(bundle, device="h100", context_variation=one) for one in (0.0, 0.5))
    decodes, mixed = BatchFeatures(64, 64 * 1000), BatchFeatures(64, 64 * 1000).with_chunk(512, 0)
    per_layer = attention_us(0, 0, 64, 1000)
    assert unequal.batch_time_s(decodes) - equal.batch_time_s(decodes) == pytest.approx(
        MICRO * NUM_LAYERS * 0.2 * per_layer
    )
    per_layer = attention_us(512, 0, 64, 1000)
    assert unequal.batch_time_s(mixed) - equal.batch_time_s(mixed) == pytest.approx(
        MICRO * NUM_LAYERS * 0.1 * per_layer
    )
    alone = BatchFeatures().with_chunk(512, 0)
    assert unequal.batch_time_s(alone) == equal.batch_time_s(alone)


def test_what_unequal_contexts_cost_beside_a_chunk_depends_on_the_chunk_and_on_the_contexts(bundle: Path) -> None:
    header = "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha"
    rows = [
        f"mixed,64,32,0.5,3,{chunk},0,{mean // 2},{mean * 3 // 2},{mean},100,150,{longer},0.2"
        for chunk, mean, longer in ((64, 1024, 140), (64, 4096, 160), (1024, 1024, 104), (1024, 4096, 108))
    ]
    (bundle / "tp1" / "skew.csv").write_text("\n".join([header, *rows, ""]))
    equal, unequal = (of(bundle, context_variation=one) for one in (0.0, 0.5))
    for chunk, context, factor in ((1024, 1024, 0.04), (1024, 8192, 0.08), (2048, 8192, 0.08), (16, 1024, 0.4)):
        shape = BatchFeatures(64, 64 * context).with_chunk(chunk, 0)
        longer_s = unequal.batch_time_s(shape) - equal.batch_time_s(shape)
        assert longer_s == pytest.approx(MICRO * NUM_LAYERS * factor * attention_us(chunk, 0, 64, context))
    # Half way between two measured chunks in their logarithms, on a point of the grid of times.
    shape = BatchFeatures(64, 64 * 1024).with_chunk(256, 0)
    longer_s = unequal.batch_time_s(shape) - equal.batch_time_s(shape)
    assert longer_s == pytest.approx(MICRO * NUM_LAYERS * 0.22 * attention_us(256, 0, 64, 1024))
    # A decode beside a chunk has no other decode to differ from.
    alone = BatchFeatures(1, 1024).with_chunk(64, 0)
    assert unequal.batch_time_s(alone) == equal.batch_time_s(alone)


def test_few_contexts_vary_less_than_those_that_they_are_drawn_from_and_none_are_faster_than_equal_ones(
    bundle: Path,
) -> None:
    # Contexts that vary by 0.5 leave 0.35 in a pair of them, and 0.5 in 64.
    def sample(count: float, variation: float, ratio: float) -> SkewSample:
        return SkewSample(count, 512, variation, ratio, 1, 4.0, 0.0, 1024)

    samples = np.array([sample(2, 0.3, 1.3), sample(2, 0.6, 1.9), sample(64, 0.6, 1.2), sample(128, 0.5, 0.7)])
    axes = tuple(np.array(one, dtype=np.float64) for one in ((1, 2, 64, 128), (512,), (0,), (1024,)))
    factors = skew_factors(samples, 0.5, axes, mixed=True)
    assert factors is not None
    assert factors.ravel() == pytest.approx([1.0, 1.3, 1.2, 1.0])
    assert skew_factors(samples, 0.0, axes, mixed=True) is None
    assert skew_factors(samples, 0.5, axes[::3], mixed=False) is None


@pytest.mark.parametrize("device", ["rtx-pro-6000", "a100", "h100"])
def test_a_card_whose_operators_take_twice_as_long_takes_twice_as_long_for_every_step(
    bundle: Path, tmp_path: Path, device: str
) -> None:
    # Nothing that other cards were seen to add is in a step that outlasts the host: every term scales with the card's own profile.
    header = "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha"
    skew = [f"pure,{n},{n // 8},0.1,4,0,0,512,2048,704,100,150,{100 + n / 8},0.2" for n in (32, 64, 128)]
    skew.append("mixed,64,8,0.1,4,512,0,512,2048,704,100,150,110,0.2")
    (bundle / "tp1" / "skew.csv").write_text("\n".join([header, *skew, ""]))
    slow = tmp_path / "slow" / bundle.name
    shutil.copytree(bundle, slow)
    for name in ("dense", "per_sequence", "attention"):
        file = slow / "tp1" / f"{name}.csv"
        first, *rows = file.read_text().splitlines()
        doubled = [",".join([*row.split(",")[:-1], str(2 * float(row.split(",")[-1]))]) for row in rows]
        file.write_text("\n".join([first, *doubled, ""]))
    given = {"context_variation": 0.5, "device": device, "host": "vllm-0.19-async"}
    one, twice = of(bundle, **given), of(slow, **given)
    for shape in (
        BatchFeatures(64, 64 * 1000),
        BatchFeatures(3, 3 * 100),
        BatchFeatures(64, 64 * 1000).with_chunk(512, 0),
        BatchFeatures(40, 40 * 3000).with_chunk(300, 0).with_chunk(900, 128),
        BatchFeatures().with_chunk(2048, 4096),
    ):
        assert twice.batch_time_s(shape) == pytest.approx(2 * one.batch_time_s(shape))


def test_no_host_time_is_exposed_unless_somebody_says_so(bundle: Path) -> None:
    shape = BatchFeatures(64, 64 * 1000)
    plain, asynchronous = of(bundle), of(bundle, host="vllm-0.19-async")
    assert asynchronous.batch_time_s(shape) == plain.batch_time_s(shape)
    assert asynchronous.breakdown_s(shape)["host"] == 0.0
    given = of(bundle, host="vllm-0.19-async", host_exposed_us=300.0)
    assert given.batch_time_s(shape) == pytest.approx(plain.batch_time_s(shape) + 0.3e-3)


def test_a_calibration_scales_parts_and_fits_one_bundle(bundle: Path, tmp_path: Path) -> None:
    host = {"step_base_s": 0.001, "step_per_request_s": 0.0}
    fitted = Calibration(
        "meta-llama/Llama-3.1-8B", "RTXPRO6000", 1, host, {"dense": 1.5}, "a test", {"tpot_mean_ms": 0.01}
    )
    fitted.write(tmp_path / "calibration.json")
    shape = BatchFeatures().with_chunk(1024, 0)
    plain = of(bundle)
    scaled = of(bundle, host="vllm-0.19-sync", calibration=str(tmp_path / "calibration.json"))
    dense_s = plain.breakdown_s(shape)["dense"]
    assert scaled.batch_time_s(shape) == pytest.approx(plain.batch_time_s(shape) + 0.5 * dense_s + 0.001)
    with pytest.raises(
        ConfigError, match=r"was fitted for .* tensor_parallel 1, and the bundle is of .* tensor_parallel 2"
    ):
        of(bundle, tensor_parallel=2, calibration=str(tmp_path / "calibration.json"))


@pytest.mark.parametrize("change", [{"tensor_parallel": float("inf")}, {"scales": {"dense": 10**400}}])
def test_a_calibration_with_numbers_too_large_is_broken(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "calibration.json"
    Calibration("Llama-3.1-8B", "H100", 1, {}, {}, "a test").write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"calibration\.json: is broken"):
        read_calibration(path)


def test_a_hole_in_a_long_axis_changes_no_measured_time() -> None:
    rows, columns = np.array([1.0, 2.0, 4.0]), np.arange(1.0, 81.0)
    times = 100 * np.sqrt(rows[:, None] * columns)
    grid = times.copy()
    grid[[0, 1, 2], [70, 74, 76]] = np.nan
    known = np.isfinite(grid)
    found = filled(grid, (rows, columns))
    np.testing.assert_array_equal(found[known], times[known])
    np.testing.assert_allclose(found, times, rtol=1e-3)


def test_experts_are_read_by_tokens_and_experts_that_they_reach() -> None:
    model = load_model("Qwen3-30B-A3B")  # 128 experts, 8 a token
    tokens, activated = np.meshgrid([1.0, 64.0, 4096.0], [8.0, 64.0, 128.0], indexing="ij")
    rows = np.column_stack([tokens.ravel(), activated.ravel(), (tokens + 10 * activated).ravel()])
    one = ExpertTimes(rows, model, Routing("balanced"))
    assert one.activated(1) == 8
    assert one.activated(1000) == 128
    assert one.layer_us(64) == pytest.approx(64 + 1280)
    two = ExpertTimes(rows, model, Routing("balanced", ranks=2))
    assert two.layer_us(64) == pytest.approx(32 + 640)  # half of the tokens and of the experts
    uniform = ExpertTimes(rows, model, Routing("uniform"))
    assert uniform.activated(1) == pytest.approx(8)
    assert 100 < uniform.activated(32) < 128
    crowded = ExpertTimes(rows, model, Routing("balanced", ranks=2, imbalance=1.5))
    assert crowded.layer_us(64) == pytest.approx(48 + 640)
    with pytest.raises(ConfigError, match="does not divide the 128 experts"):
        ExpertTimes(rows, model, Routing(ranks=3))


def test_ranks_that_share_experts_share_a_step(bundle: Path) -> None:
    as_mixture(bundle)
    one = of(bundle)
    assert one.model.name == "Qwen3-30B-A3B"  # a tuned variant has its model's shape
    two = of(bundle, data_parallel=2, expert_parallel=True)
    shape = BatchFeatures(128, 128 * 500)
    alone, shared = one.breakdown_s(BatchFeatures(64, 64 * 500)), two.breakdown_s(shape)
    assert shared["dense"] == alone["dense"]
    assert shared["decode_attention"] == pytest.approx(alone["decode_attention"])
    assert shared["all_reduce"] > 0
    assert shared["experts"] < one.breakdown_s(shape)["experts"]
    # One prompt is on one rank; two are on both.
    prompts = BatchFeatures().with_chunk(512, 0)
    assert two.breakdown_s(prompts)["dense"] == two.breakdown_s(prompts.with_chunk(512, 0))["dense"]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("tp1/dense.csv", "qkv_proj,1,", "qvk_proj,1,", r"dense.csv:2 layer: is not known \('qvk_proj'\). Did you mean 'qkv_proj'"),
        ("tp1/dense.csv", "qkv_proj,1,10.05", "qkv_proj,1,-3", r"dense.csv:2 time_us: is not positive \(-3\)"),
        ("tp1/dense.csv", "qkv_proj,1,10.05", "qkv_proj,1,1e7", r"dense.csv:2 time_us: cannot be the time of one operator \(10 s\)"),
        ("tp1/dense.csv", "qkv_proj,1,10.05", "qkv_proj,1,soon", r"dense.csv:2 time_us: is not a number \('soon'\)"),
        ("tp1/dense.csv", "qkv_proj,1,10.05", "qkv_proj,1.5,10", r"dense.csv:2 tokens: is not a count \(1.5\)"),
        ("tp1/attention.csv", "kv_decode,time_us", "kv_decode,time_ms", r"attention.csv:1: has no column 'time_us'. Did you mean 'time_ms'"),
        ("meta.yaml", "model: meta-llama/Llama-3.1-8B", "model: [1]", r"meta.yaml: does not say which model was measured"),
        ("meta.yaml", "model:", "model: {", r"meta.yaml: cannot be read"),
        ("meta.yaml", "Llama-3.1-8B", "Llama-9", r"model: there is no such model or file \('Llama-9'\)"),
    ],
)  # fmt: skip
def test_mistakes_are_found_with_file_and_line(
    bundle: Path, edit: Callable[[Path, str, str], None], file: str, old: str, new: str, said: str
) -> None:
    edit(bundle / file, old, new)
    with pytest.raises(ConfigError, match=said):
        of(bundle)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (lambda row: row[1] == 0, r"attention.csv kv_prefill: has only one size for chunks alone \(n_decode 0\) \(0\)"),
        (lambda row: row[0] in (0, 1024), r"attention.csv prefill_chunk: has only one size for chunks alone .*\(1024\)"),
        (lambda row: row[2] == 0 or row[3] == 16, r"attention.csv kv_decode: has only one size for decodes alone .*\(16\)"),
        (lambda row: row[0] == 0 or row[3] in (0, 16), r"attention.csv kv_decode: has only one size for chunks beside"),
    ],
)  # fmt: skip
def test_attention_needs_two_sizes_to_interpolate_between(
    bundle: Path, kept: Callable[[tuple[float, ...]], bool], said: str
) -> None:
    rows = [row for row in attention_rows() if kept(row)]
    write(bundle / "tp1" / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", rows)
    with pytest.raises(ConfigError, match=said):
        of(bundle)


def test_a_damaged_gzip_of_times_is_named(bundle: Path) -> None:
    file = bundle / "tp1" / "dense.csv"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert of(bundle).bundle.dense  # a byte-order mark is skipped
    packed = bytearray(gzip.compress(file.read_bytes()))
    packed[40:60] = bytes(each ^ 0x5A for each in packed[40:60])
    file.unlink()
    file.with_suffix(".csv.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match=r"dense\.csv\.gz: cannot be read"):
        of(bundle)


def test_missing_files_and_degrees_say_what_there_is(bundle: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no times for tensor_parallel 4. Measured degrees: 1, 2"):
        read_bundle(bundle, 4)
    with pytest.raises(ConfigError, match=r"meta.yaml: is missing. Bundles below it: .*bf16"):
        read_bundle(bundle.parent, 1)
    (bundle / "tp1" / "per_sequence.csv").unlink()
    with pytest.raises(ConfigError, match=r"per_sequence.csv: is missing. The folder has: attention.csv, dense.csv"):
        read_bundle(bundle, 1)
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_bundle(bundle / "nowhere", 1)


def test_memory_comes_from_the_device_that_the_bundle_names(
    bundle: Path, edit: Callable[[Path, str, str], None]
) -> None:
    assert 25_000 < of(bundle).kv_blocks(16) < 40_000
    edit(bundle / "meta.yaml", "hardware: RTXPRO6000", "hardware: A card of mine")
    with pytest.raises(ConfigError, match="the memory size of the GPU is unknown"):
        of(bundle).kv_blocks(16)
    with pytest.raises(ConfigError, match=r"fallback: needs a described device, and A card of mine is not one"):
        of(bundle, fallback="roofline")


def test_merged_attention_is_not_in_the_tables(bundle: Path) -> None:
    with pytest.raises(ExecutorError, match="no times for attention merged over KV-parallel groups"):
        of(bundle).batch_time_s(BatchFeatures().with_chunk(16, 0)._replace(num_merged_tokens=4))


def test_host_overhead_has_no_cost_by_default() -> None:
    assert HostOverhead().request_s == 0.0
