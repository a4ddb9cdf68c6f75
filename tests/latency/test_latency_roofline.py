from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from vajra_py.contract.latency import BatchFeatures, LatencyModel
from vajra_py.errors import ConfigError
from vajra_py.latency import (
    Deployment,
    Parallelism,
    PredictsDecodeRuns,
    RooflineModel,
    kv_blocks_that_fit,
    load_device,
    load_model,
)

GIB = 1 << 30


def roofline(
    model: str = "Llama-3.1-8B", device: str = "a100", tensor: int = 1, pipeline: int = 1, kv: int = 1
) -> RooflineModel:
    return RooflineModel(load_model(model), load_device(device), Parallelism(tensor, pipeline, kv))


MODELS = {
    "dense": roofline(),
    "tensor and pipeline": roofline("Llama-3.1-70B", "h100", 4, 3, 2),
    "experts": roofline("Qwen3-30B-A3B", "h200", 2),
    "windows": roofline("Gemma-2-9B", "a100"),
    "windows everywhere": roofline("Mistral-7B", "l4"),
    "latent": roofline("DeepSeek-V2-Lite", "h100", 2),
    "cpu": roofline("Qwen3-0.6B", "cpu"),
}

shapes = st.builds(
    lambda decodes, chunks, extra: _shape(decodes, chunks, *extra),
    st.tuples(st.integers(0, 512), st.integers(0, 8192)),
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 100_000)), max_size=4),
    st.tuples(st.integers(0, 2048), st.integers(0, 1 << 30)),
)


def _shape(decodes: tuple[int, int], chunks: list[tuple[int, int]], merged: int, swap: int) -> BatchFeatures:
    shape = BatchFeatures(num_merged_tokens=merged, swap_bytes=swap).with_decodes(decodes[0], decodes[0] * decodes[1])
    for tokens, context in chunks:
        shape = shape.with_chunk(tokens, context)
    return shape


def test_it_is_a_latency_model_and_survives_pickling() -> None:
    model: LatencyModel = MODELS["experts"]
    runs: PredictsDecodeRuns = MODELS["experts"]
    assert isinstance(runs, PredictsDecodeRuns)
    shape = BatchFeatures(8, 800)
    assert pickle.loads(pickle.dumps(model)).batch_time_s(shape) == model.batch_time_s(shape)


# Sanity against public figures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "measured_s"),
    [
        # vLLM 0.21, H100 80 GB, one request at a time, median time per output token (yobitelcomm.github.io/bench).
        ("h100", 6.48e-3),
        # vLLM 0.23, A100 40 GB, one request at a time, 75 tokens a second (johnmusgrave.com).
        ({"base": "a100", "memory_bandwidth": 1.555e12}, 1 / 75),
    ],
)
def test_a_lone_decode_of_llama_8b_is_near_published_measurements(
    device: str | dict[str, object], measured_s: float
) -> None:
    model = RooflineModel(load_model("Llama-3.1-8B"), load_device(device))
    assert model.batch_time_s(BatchFeatures(1, 1024)) == pytest.approx(measured_s, rel=0.1)


def test_a_small_decode_batch_is_bound_by_reading_the_weights() -> None:
    model = MODELS["dense"]
    weights_s = (8.03e9 - 0.525e9) * 2 / 2.039e12  # everything but the embedding table, at the data sheet's bandwidth
    lone = model.batch_time_s(BatchFeatures(1, 1))
    assert weights_s < lone < 1.5 * weights_s
    assert model.batch_time_s(BatchFeatures(8, 8)) < 1.02 * lone


def test_a_large_decode_batch_is_bound_by_reading_the_cache() -> None:
    model = MODELS["dense"]
    shape = BatchFeatures(64, 64 * 8192)
    cache_s = 64 * 8192 * 131_072 / 2.039e12
    assert model.breakdown_s(shape)["decode_attention"] == pytest.approx(cache_s / 0.83, rel=0.01)
    assert cache_s < model.batch_time_s(shape) < 2 * cache_s


def test_a_512_token_chunk_costs_its_arithmetic_and_long_ones_do_not_get_cheaper_per_token() -> None:
    model = MODELS["dense"]
    chunk = model.batch_time_s(BatchFeatures().with_chunk(512, 0))
    arithmetic_s = 2 * 6.98e9 * 512 / 312e12  # the weights of the layers at the data sheet's peak
    assert arithmetic_s < chunk < 1.8 * arithmetic_s
    per_token = [model.batch_time_s(BatchFeatures().with_chunk(n, 0)) / n for n in (64, 256, 1024)]
    assert per_token[0] > per_token[1] > per_token[2]


def test_context_makes_chunks_dearer() -> None:
    model = MODELS["dense"]
    near = model.batch_time_s(BatchFeatures().with_chunk(512, 0))
    far = model.batch_time_s(BatchFeatures().with_chunk(512, 128_000))
    assert far > 2 * near


def test_a_mixture_reads_few_experts_for_one_token_and_all_for_many() -> None:
    model = MODELS["experts"]
    one, many = (model.breakdown_s(BatchFeatures(n, n))["weights"] for n in (1, 256))
    spec = load_model("Qwen3-30B-A3B")
    all_weights_s = (spec.dense_weights + spec.routed_weights) * 2 / (2 * 4.8e12 * 0.86)
    assert one < 0.25 * all_weights_s
    assert many == pytest.approx(all_weights_s, rel=0.1)


def test_tensor_parallelism_helps_less_than_its_degree() -> None:
    one, four = roofline("Llama-3.1-8B", "h100"), roofline("Llama-3.1-8B", "h100", 4)
    for shape in (BatchFeatures(32, 32_000), BatchFeatures().with_chunk(2048, 0)):
        speedup = one.batch_time_s(shape) / four.batch_time_s(shape)
        assert 1.2 < speedup < 4


def test_pipeline_stages_divide_the_work_but_not_the_latency() -> None:
    one, four = roofline("Llama-3.1-70B", "h200", 2), roofline("Llama-3.1-70B", "h200", 2, 4)
    shape = BatchFeatures(32, 32_000).with_chunk(512, 0)
    assert one.stage_time_s(shape) == one.batch_time_s(shape)
    assert four.batch_time_s(shape) > one.batch_time_s(shape)
    assert one.batch_time_s(shape) / 4 < four.stage_time_s(shape) < one.batch_time_s(shape) / 3


def test_swapped_bytes_cross_the_host_links_of_all_devices() -> None:
    one, two = roofline(), roofline(tensor=2)
    assert one.batch_time_s(BatchFeatures(swap_bytes=26_300_000)) == pytest.approx(1e-3)
    assert two.batch_time_s(BatchFeatures(swap_bytes=26_300_000)) == pytest.approx(0.5e-3)
    decode = BatchFeatures(4, 400)
    with_swap = decode._replace(swap_bytes=26_300_000)
    assert one.batch_time_s(with_swap) - one.batch_time_s(decode) == pytest.approx(1e-3)


def test_merging_over_kv_groups_costs_time() -> None:
    model = roofline(kv=4)
    chunk = BatchFeatures().with_chunk(512, 100_000)
    merged = chunk._replace(num_merged_tokens=512)
    assert model.breakdown_s(merged)["kv_merge"] > 32 * 9e-6
    assert model.batch_time_s(merged) > model.batch_time_s(chunk)


def test_an_eight_bit_cache_halves_its_reading() -> None:
    model, device = load_model("Llama-3.1-8B"), load_device("h100")
    wide = RooflineModel(model, device)
    narrow = RooflineModel(structs.replace(model, kv_dtype="fp8"), device)
    shape = BatchFeatures(64, 64 * 4096)
    assert narrow.breakdown_s(shape)["decode_attention"] == pytest.approx(
        wide.breakdown_s(shape)["decode_attention"] / 2
    )
    assert narrow.kv_blocks(16) == pytest.approx(2 * wide.kv_blocks(16), abs=1)


# Properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40)
@given(shape=shapes, field=st.sampled_from(BatchFeatures._fields), step=st.integers(1, 5000))
def test_times_are_finite_and_monotone_in_every_feature(name: str, shape: BatchFeatures, field: str, step: int) -> None:
    model = MODELS[name]
    more = shape._replace(**{field: getattr(shape, field) + step})
    for time in (model.batch_time_s, model.stage_time_s):
        assert 0 <= time(shape) < 1e6
        assert time(more) >= time(shape) * (1 - 1e-12)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40)
@given(shape=shapes)
def test_the_breakdown_adds_up_and_no_stage_is_longer_than_the_step(name: str, shape: BatchFeatures) -> None:
    model = MODELS[name]
    assert sum(model.breakdown_s(shape).values()) == pytest.approx(model.batch_time_s(shape), rel=1e-9, abs=1e-12)
    assert model.stage_time_s(shape) <= model.batch_time_s(shape) * (1 + 1e-12)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=30)
@given(num_decodes=st.integers(0, 600), context=st.integers(0, 20_000), num_steps=st.integers(0, 80))
def test_runs_of_decodes_equal_single_steps_bit_for_bit(
    name: str, num_decodes: int, context: int, num_steps: int
) -> None:
    model = MODELS[name]
    first = num_decodes * context
    run = model.decode_run_times_s(num_decodes, first, num_steps)
    single = [model.batch_time_s(BatchFeatures(num_decodes, first + i * num_decodes)) for i in range(num_steps)]
    assert list(run) == single


def test_an_empty_batch_takes_no_time() -> None:
    assert all(model.batch_time_s(BatchFeatures()) == 0 for model in MODELS.values())


# Memory ----------------------------------------------------------------------------------------------------------


def test_llama_8b_leaves_about_as_many_blocks_on_an_a100_as_vidur_finds() -> None:
    # Vidur's memory planner gives 29,696 blocks of 16 tokens for this model on this device.
    assert kv_blocks_that_fit(load_model("Llama-3-8B"), load_device("a100")) == pytest.approx(29_696, rel=0.05)


def test_blocks_grow_with_devices_and_memory_and_shrink_with_block_size() -> None:
    model, device = load_model("Llama-3.1-70B"), load_device("h100")
    four, eight = (kv_blocks_that_fit(model, device, tensor) for tensor in (4, 8))
    assert eight > 2 * four
    assert kv_blocks_that_fit(model, device, 4, 2) > 2 * four
    assert kv_blocks_that_fit(model, device, 4, 1, 32) == pytest.approx(four / 2, abs=1)
    assert kv_blocks_that_fit(model, device, 4, 1, 16, 0.8) < four


def test_more_ranks_than_kv_heads_copy_them() -> None:
    model = load_model("Qwen3-30B-A3B")  # 4 KV heads
    per_token = [
        Deployment(model, load_device("h100"), Parallelism(t)).kv_bytes_per_token_per_layer for t in (1, 2, 4, 8)
    ]
    assert per_token == [2048, 1024, 512, 512]


def test_a_model_that_does_not_fit_is_refused_with_the_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"Llama-3.1-70B in bfloat16 does not fit a100-80gb-sxm.*13\d\.\d GiB.*0\.9 of 80\.0 GiB"
    ):
        kv_blocks_that_fit(load_model("Llama-3.1-70B"), load_device("a100"))


def test_impossible_splits_and_dtypes_are_refused_together() -> None:
    model = structs.replace(load_model("Qwen3-0.6B"), dtype="fp8")
    with pytest.raises(ConfigError) as caught:
        Deployment(model, load_device("a100"), Parallelism(3, 40))
    text = str(caught.value)
    assert "tensor_parallel: does not divide the 16 attention heads of Qwen3-0.6B (3)" in text
    assert "pipeline_parallel: is more than the 28 layers of Qwen3-0.6B (40)" in text
    assert "a100-80gb-sxm does not multiply in fp8" in text
