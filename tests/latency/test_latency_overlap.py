"""Overlap within a step: closed forms of the roofline's and the affine model's overlaps."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vajra_py.contract.latency import BatchFeatures
from vajra_py.latency import (
    AffineConfig,
    AffineModel,
    OverlappedRooflineModel,
    Parallelism,
    PredictsDecodeRuns,
    RooflineConfig,
    RooflineModel,
    load_device,
    load_model,
)

FROM_FAST_TO_SLOW = ("step", "attention", "operators", "partial", "none")
PLACES: dict[str, tuple[str, str, Parallelism]] = {
    "dense": ("Llama-3.1-8B", "a100", Parallelism()),
    "tensor and pipeline": ("Llama-3.1-70B", "h100", Parallelism(4, 3, 2)),
    "experts": ("Qwen3-30B-A3B", "h200", Parallelism(2)),
    "windows": ("Gemma-2-9B", "a100", Parallelism()),
    "latent": ("DeepSeek-V2-Lite", "h100", Parallelism(2)),
}
Model = RooflineModel | OverlappedRooflineModel


def roofline(overlap: str, place: str = "dense") -> Model:
    model, device, split = PLACES[place]
    config = RooflineConfig.model_validate(
        {
            "model": model,
            "device": device,
            "tensor_parallel": split.tensor,
            "pipeline_parallel": split.pipeline,
            "kv_parallel": split.kv,
            "overlap": overlap,
        }
    )
    return config.build()


MODELS = {place: {overlap: roofline(overlap, place) for overlap in FROM_FAST_TO_SLOW} for place in PLACES}


def _shape(
    decodes: tuple[int, int], drafts: int, chunks: list[tuple[int, int]], merged: int, swap: int
) -> BatchFeatures:
    shape = BatchFeatures(num_merged_tokens=merged, swap_bytes=swap).with_decodes(decodes[0], decodes[0] * decodes[1])
    shape = shape.with_drafts(decodes[0] * drafts)
    for tokens, context in chunks:
        shape = shape.with_chunk(tokens, context)
    return shape


shapes = st.builds(
    _shape,
    st.tuples(st.integers(0, 512), st.integers(0, 8192)),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 100_000)), max_size=3),
    st.integers(0, 2048),
    st.integers(0, 1 << 30),
)


def test_without_the_option_the_model_is_the_plain_one() -> None:
    assert type(RooflineConfig().build()) is RooflineModel
    with pytest.raises(ValueError, match=r"overlap: is not one of this model \('partial'\)"):
        OverlappedRooflineModel(load_model("Llama-3.1-8B"), load_device("a100"), overlap="partial")


def test_the_sum_and_the_largest_sum_of_a_step_follow_from_the_data_sheets() -> None:
    spec, device = load_model("Llama-3.1-8B"), load_device("a100")
    num_decodes, context, chunk = 64, 2048, 480
    shape = BatchFeatures().with_decodes(num_decodes, num_decodes * context).with_chunk(chunk, 0).with_drafts(100)
    tokens, rows = num_decodes + chunk + 100, num_decodes + 1 + 100
    keys = num_decodes * (context + 1)
    flops, attention = device.flops("bfloat16"), device.attention_flops("bfloat16")
    compute = 2 * (tokens * spec.dense_weights + rows * spec.head_weights) / flops
    compute += 4 * spec.num_heads * spec.head_dim * spec.num_layers * (chunk * (chunk + 1) // 2 + keys) / attention
    model = MODELS["dense"]["step"]
    assert isinstance(model, OverlappedRooflineModel)
    work = model.work(shape)
    assert work.compute_s == pytest.approx(compute, rel=1e-9)
    cached = 2 * spec.num_kv_heads * spec.head_dim * 2 * spec.num_layers
    moved = 2 * (spec.dense_weights + spec.head_weights) + (keys + chunk) * cached
    assert moved / device.attainable_bandwidth < work.memory_s < 1.3 * moved / device.attainable_bandwidth
    assert work.network_s == 0.0
    in_turn = model.batch_time_s(shape) - max(work)
    assert in_turn == pytest.approx(10 * spec.num_layers * device.kernel_latency_s + device.step_overhead_s)
    assert MODELS["dense"]["none"].batch_time_s(shape) - in_turn == pytest.approx(sum(work), rel=1e-12)


def test_decode_attention_hides_behind_prefill_attention_where_they_are_one() -> None:
    spec, device = load_model("Llama-3.1-8B"), load_device("a100")
    decodes, chunk = BatchFeatures(64, 64 * 2048), (512, 16_384)
    both = decodes.with_chunk(*chunk)
    separate = MODELS["dense"]["operators"].batch_time_s(both)
    fused = MODELS["dense"]["attention"].batch_time_s(both)
    pairs, keys = both.prefill_attention_pairs, 64 * 2049
    per_pair = 4 * spec.num_heads * spec.head_dim * spec.num_layers / device.attention_flops("bfloat16")
    per_key = 2 * spec.num_kv_heads * spec.head_dim * 2 * spec.num_layers / device.attainable_bandwidth
    compute, memory = (pairs + keys) * per_pair, (keys + 16_384 + 512) * per_key
    apart = max(pairs * per_pair, (16_384 + 512) * per_key) + max(keys * per_pair, keys * per_key)
    assert separate - fused == pytest.approx(apart - max(compute, memory), rel=1e-6)
    alone = {overlap: MODELS["dense"][overlap].batch_time_s(decodes) for overlap in ("attention", "operators")}
    assert alone["attention"] == alone["operators"]


@settings(max_examples=40)
@given(st.sampled_from(list(PLACES)), shapes)
def test_more_overlap_is_never_slower(place: str, shape: BatchFeatures) -> None:
    for ask in ("batch_time_s", "stage_time_s"):
        times = [getattr(MODELS[place][overlap], ask)(shape) for overlap in FROM_FAST_TO_SLOW]
        assert all(fast <= slow * (1 + 1e-12) for fast, slow in pairwise(times)), times
        assert times[-1] <= 3 * times[0] * (1 + 1e-12)  # three resources


@settings(max_examples=40)
@given(st.sampled_from(list(PLACES)), st.sampled_from(["none", "attention", "step"]), shapes, st.integers(1, 4096))
def test_times_grow_with_the_batch_and_no_stage_is_longer_than_the_step(
    place: str, overlap: str, shape: BatchFeatures, more: int
) -> None:
    model = MODELS[place][overlap]
    time = model.batch_time_s(shape)
    assert model.stage_time_s(shape) <= time * (1 + 1e-12)
    for larger in (shape.with_decodes(1, more), shape.with_chunk(more, 0), shape._replace(swap_bytes=1 << 31)):
        assert model.batch_time_s(larger) >= time


@settings(max_examples=20)
@given(st.sampled_from(list(PLACES)), st.integers(1, 300), st.integers(0, 100_000), st.integers(1, 40))
def test_runs_of_decodes_equal_single_steps_bit_for_bit(place: str, decodes: int, context: int, steps: int) -> None:
    affine = AffineModel(0.001, 1e-5, 1e-6, 0.0, 1e-7, overlap=True)
    for model in (MODELS[place]["step"], MODELS[place]["none"], affine):
        assert isinstance(model, PredictsDecodeRuns)
        single = [model.batch_time_s(BatchFeatures(decodes, context + step * decodes)) for step in range(steps)]
        assert list(model.decode_run_times_s(decodes, context, steps)) == single


def test_a_step_waits_for_its_swapped_blocks_and_an_empty_one_takes_no_time() -> None:
    shape = BatchFeatures(4, 400)
    for overlap in ("none", "step"):
        model = MODELS["dense"][overlap]
        with_swap = model.batch_time_s(shape._replace(swap_bytes=26_300_000))
        assert with_swap - model.batch_time_s(shape) == pytest.approx(1e-3)
        assert model.batch_time_s(BatchFeatures()) == 0.0
        assert model.batch_time_s(BatchFeatures(swap_bytes=26_300_000)) == pytest.approx(1e-3)


def test_the_description_names_the_overlap_and_memory_is_the_same() -> None:
    for place, models in MODELS.items():
        plain, overlapped = (models[overlap].describe() for overlap in ("partial", "step"))
        assert overlapped.source == f"{plain.source}, overlap over the whole step", place
        assert plain.kv_blocks is not None
        assert overlapped.kv_blocks is not None
        assert overlapped.kv_blocks(16, 0.9) == plain.kv_blocks(16, 0.9)
        again = pickle.loads(pickle.dumps(models["step"]))
        assert again.batch_time_s(BatchFeatures(8, 800)) == models["step"].batch_time_s(BatchFeatures(8, 800))


def test_an_overlap_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="'none', 'partial', 'operators', 'attention' or 'step'"):
        RooflineConfig.model_validate({"overlap": "all"})


def test_mixing_prompts_with_decodes_pays_only_where_they_overlap() -> None:
    """100 tokens of prompt and 1000 cached tokens of decodes take 10 ms each; together they take as long as one of them."""
    figures = {"base_s": 0.0, "per_token_s": 1e-4, "per_decode_context_token_s": 1e-5}
    beside, behind = (AffineConfig.model_validate({**figures, "overlap": each}).build() for each in (True, False))
    prompt = BatchFeatures().with_chunk(100, 0)
    memory = BatchFeatures(decode_context_tokens=1000)
    both = prompt._replace(decode_context_tokens=1000)
    assert behind.batch_time_s(both) == pytest.approx(0.02)
    assert beside.batch_time_s(both) == pytest.approx(0.01)
    for model in (beside, behind):
        assert model.batch_time_s(prompt) == pytest.approx(0.01)
        assert model.batch_time_s(memory) == pytest.approx(0.01)


def test_what_hides_nothing_is_added_to_the_longer_of_the_two() -> None:
    model = AffineModel(0.01, 1e-4, 1e-3, 1e-6, 1e-5, 1e-9, num_stages=2, overlap=True)
    shape = BatchFeatures(2, 3000, swap_bytes=10**6).with_chunk(100, 0)
    compute, memory = 102 * 1e-4 + 5050 * 1e-6, 3000 * 1e-5
    assert model.batch_time_s(shape) == pytest.approx(0.01 + 3 * 1e-3 + 1e-3 + max(compute, memory))
    assert model.stage_time_s(shape) == pytest.approx(model.batch_time_s(shape) / 2)
