"""Paged attention on the CPU: against float64, against torch's own attention, and the parts of a KV-parallel group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_kernels import (
    AttentionMetadata,
    allocate_kv_cache,
    build_metadata,
    merge_partials,
    paged_attention,
)
from vajra_kernels.checks import (
    LSE_TOLERANCES,
    TOLERANCES,
    AttentionCase,
    AttentionInputs,
    expected,
    gpu_cases,
    interpreter_cases,
    make_inputs,
    worst_errors,
)

LONG_MIX = ((1, 700), (1, 40), (300, 420), (1, 699), (200, 200), (0, 9), (1, 0), (1, 650), (2, 130))
BASE = AttentionCase((8, 2), (64, 64), 16, LONG_MIX, head_major=False)
CASES = [
    *(replace(case, head_major=False) for case in interpreter_cases()),
    *(replace(case, head_major=False) for case in gpu_cases()[len(interpreter_cases()) :: 7]),
    BASE,
    replace(BASE, window=100, dtype=torch.bfloat16),
    replace(BASE, window=300, softcap=20.0, block_size=48),
    replace(BASE, dims=(64, 32), dtype=torch.float16),
    replace(BASE, lens=((300, 100), (1, 80), (4, 0)), causal=False),
]


def attend(case: AttentionCase, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return paged_attention(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.metadata,
        window=case.window,
        softcap=case.softcap,
        return_lse=True,
    )


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_equals_float64(case: AttentionCase, generator: torch.Generator) -> None:
    inputs = make_inputs(case, generator, "cpu")
    out, lse = attend(case, inputs)
    error, lse_error = worst_errors(out, lse, expected(case, inputs))
    assert error < TOLERANCES[case.dtype]
    assert lse_error < LSE_TOLERANCES[case.dtype]
    alone = paged_attention(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, window=case.window, softcap=case.softcap
    )
    assert torch.equal(alone, out)


@pytest.mark.parametrize("widens", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_in_half_precision_with_and_without_matrix_tiles(
    dtype: torch.dtype, widens: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors with tiles for a dtype attend chunks in it, others in float32."""
    monkeypatch.setattr("vajra_kernels.cpu._widens_chunks", lambda dtype: widens and dtype != torch.float32)
    for case in (replace(BASE, dtype=dtype), replace(BASE, dtype=dtype, window=100, softcap=20.0)):
        inputs = make_inputs(case, generator, "cpu")
        out, lse = attend(case, inputs)
        error, lse_error = worst_errors(out, lse, expected(case, inputs))
        assert out.dtype == dtype
        assert error < TOLERANCES[dtype]
        assert lse_error < LSE_TOLERANCES[dtype]


def test_it_may_be_called_in_inference_mode_and_outside_of_it_by_turns(generator: torch.Generator) -> None:
    case = replace(BASE, dims=(48, 48), lens=tuple((num_query, 3 * kv_len) for num_query, kv_len in LONG_MIX))
    with torch.inference_mode():  # longer than any before, so that fresh memory is needed
        inside, _ = attend(case, make_inputs(case, generator, "cpu"))
    inputs = make_inputs(case, generator, "cpu")
    outside, lse = attend(case, inputs)
    assert inside.shape == outside.shape
    assert worst_errors(outside, lse, expected(case, inputs))[0] < TOLERANCES[case.dtype]


lengths = st.tuples(st.sampled_from([0, 1, 1, 1, 2, 40, 140]), st.integers(0, 200)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)


@settings(max_examples=40)
@given(
    lens=st.lists(lengths, min_size=1, max_size=9).map(tuple),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([1, 7, 16, 64]),
    window=st.sampled_from([None, 1, 30, 150]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 2**31),
)
def test_any_ragged_batch_equals_float64(
    lens: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    case = AttentionCase(heads, (16, 16), block_size, lens, torch.float32, window, softcap, head_major=False)
    inputs = make_inputs(case, torch.Generator().manual_seed(seed), "cpu")
    out, lse = attend(case, inputs)
    error, lse_error = worst_errors(out, lse, expected(case, inputs))
    assert error < TOLERANCES[case.dtype]
    assert lse_error < LSE_TOLERANCES[case.dtype]


def test_equals_torch_attention_on_a_dense_prompt(generator: torch.Generator) -> None:
    case = AttentionCase((8, 2), (64, 64), 16, ((150, 150),), head_major=False)
    inputs = make_inputs(case, generator, "cpu")
    blocks = inputs.metadata.block_table[0].long()
    k = inputs.k_cache[blocks].flatten(0, 1)[:150].transpose(0, 1)[None]
    v = inputs.v_cache[blocks].flatten(0, 1)[:150].transpose(0, 1)[None]
    dense = torch.nn.functional.scaled_dot_product_attention(
        inputs.q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True
    )
    assert torch.allclose(attend(case, inputs)[0], dense[0].transpose(0, 1), atol=2e-6)


def test_batch_mates_and_stale_memory_do_not_leak(generator: torch.Generator) -> None:
    """A sequence attended alone, in a mixed batch, and with infinities around its slots gives the same numbers."""
    inputs = make_inputs(BASE, generator, "cpu")
    out, _ = attend(BASE, inputs)
    inputs.k_cache[inputs.k_cache.isnan()] = float("inf")
    inputs.v_cache[inputs.v_cache.isnan()] = float("-inf")
    assert torch.equal(attend(BASE, inputs)[0], out)
    seq, row = 3, 302
    alone = build_metadata([1], [BASE.lens[seq][1]], inputs.metadata.block_table[seq : seq + 1], BASE.block_size)
    single = paged_attention(inputs.q[row : row + 1], inputs.k_cache, inputs.v_cache, alone)
    assert torch.allclose(single[0], out[row], atol=2e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_what_is_not_a_number_stays_with_its_sequence(generator: torch.Generator, broken: float, which: str) -> None:
    case = replace(BASE, lens=((1, 40), (1, 37), (1, 90)))
    inputs = make_inputs(case, generator, "cpu")
    whole, _ = attend(case, inputs)
    block = int(inputs.metadata.block_table[1, 1])
    getattr(inputs, which)[block, 3] = broken
    out, _ = attend(case, inputs)
    assert torch.equal(out[[0, 2]], whole[[0, 2]])
    assert not out[1].isfinite().any()


def test_consecutive_blocks_are_read_in_place(generator: torch.Generator) -> None:
    """Blocks in ascending order take the copy-free path; the result is that of any other order."""
    k, v = (torch.randn((8, 16, 2, 32), generator=generator) for _ in range(2))
    q = torch.randn((21, 4, 32), generator=generator)
    order = torch.tensor([5, 0, 7, 3, 1, 6, 2, 4])
    moved_k, moved_v = (torch.empty_like(cache).index_copy_(0, order, cache) for cache in (k, v))
    in_order = build_metadata([1, 20], [50, 70], [[0, 1, 2, 3], [3, 4, 5, 6, 7]], 16)
    moved = build_metadata([1, 20], [50, 70], [order[:4].tolist(), order[3:].tolist()], 16)
    wanted = paged_attention(q, moved_k, moved_v, moved)
    assert torch.allclose(paged_attention(q, k, v, in_order), wanted, atol=1e-6)


def test_one_step_serves_layers_of_different_windows(generator: torch.Generator) -> None:
    inputs = make_inputs(BASE, generator, "cpu")
    for window in (None, 64, None, 10_000, 64):
        case = replace(BASE, window=window)
        out, lse = attend(case, inputs)
        assert worst_errors(out, lse, expected(case, inputs))[0] < TOLERANCES[torch.float32]


def test_result_goes_to_the_given_tensor(generator: torch.Generator) -> None:
    for lens in (LONG_MIX, ((1, 20), (1, 30))):
        case = replace(BASE, lens=lens)
        inputs = make_inputs(case, generator, "cpu")
        target = torch.full_like(inputs.q, float("nan"))
        result = paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, out=target)
        assert result.data_ptr() == target.data_ptr()
        assert worst_errors(target, None, expected(case, inputs))[0] < TOLERANCES[torch.float32]


def test_metadata_made_of_tensors_alone_works(generator: torch.Generator) -> None:
    inputs = make_inputs(BASE, generator, "cpu")
    built = inputs.metadata
    plain = AttentionMetadata(
        query_start=built.query_start,
        kv_lens=built.kv_lens,
        block_table=built.block_table,
        slot_mapping=built.slot_mapping,
        block_size=built.block_size,
        num_decodes=0,
        num_query_tokens=built.num_query_tokens,
        max_query_len=built.max_query_len,
        max_kv_len=built.max_kv_len,
        num_kv_tokens=built.num_kv_tokens,
    )
    assert torch.allclose(attend(BASE, replace(inputs, metadata=plain))[0], attend(BASE, inputs)[0], atol=2e-6)


def test_kv_parallel_parts_merge_to_the_whole(generator: torch.Generator) -> None:
    """Three ranks hold consecutive parts of the sequences, the last with the chunk's own tokens; a fourth holds nothing."""
    case = replace(BASE, lens=((1, 300), (40, 330), (1, 160)))
    inputs = make_inputs(case, generator, "cpu")
    whole, whole_lse = attend(case, inputs)
    new, total = [q for q, _ in case.lens], [kv for _, kv in case.lens]
    table = inputs.metadata.block_table
    shares = [
        build_metadata(new, [4 * 16] * 3, table[:, :4], 16, causal=False),
        build_metadata(new, [5 * 16] * 3, table[:, 4:9], 16, causal=False),
        build_metadata(new, [n - 9 * 16 for n in total], table[:, 9:], 16),
        build_metadata(new, [0, 0, 0], table, 16, causal=False),
    ]
    parts = [
        paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, metadata, return_lse=True) for metadata in shares
    ]
    assert not parts[3][0].any()
    assert bool((parts[3][1] == float("-inf")).all())
    merged, merged_lse = merge_partials([out for out, _ in parts], [lse for _, lse in parts])
    assert torch.allclose(merged, whole, atol=2e-6)
    assert torch.allclose(merged_lse, whole_lse, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 32)}, "3 query rows"),
        ({"q": torch.zeros(2, 3, 32)}, "3 query heads"),
        ({"q": torch.zeros(2, 4, 16)}, "Head dimensions are equal"),
        ({"q": torch.zeros(2, 4, 32, dtype=torch.float16)}, "torch.float16"),
        ({"k_cache": torch.zeros(4, 8, 2, 32)}, "v_cache"),
        ({"window": 0}, "window 0"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"scale": 0.0}, "scale is not positive"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    k_cache, v_cache = (cache[0] for cache in allocate_kv_cache(1, 4, (16, 2, 32), torch.float32, "cpu"))
    arguments: dict[str, Any] = {"q": torch.zeros(2, 4, 32), "k_cache": k_cache, "v_cache": v_cache}
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments | {"metadata": build_metadata([2], [5], [[1]], 16)} | change)
    paged_attention(**arguments, metadata=build_metadata([2], [5], [[1]], 16))


def test_windows_need_causal_metadata() -> None:
    cache = torch.zeros(4, 16, 2, 32)
    metadata = build_metadata([2], [5], [[1]], 16, causal=False)
    with pytest.raises(ValueError, match="Windows need causal metadata"):
        paged_attention(torch.zeros(2, 4, 32), cache, cache, metadata, window=3)
