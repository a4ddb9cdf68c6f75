"""The kernels compiled ahead of time for GPUs that are not there: registers, spills, shared memory, instructions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vajra_kernels.aot import compile_launch
from vajra_kernels.config import (
    A10,
    A100,
    H200,
    L4,
    DeviceFacts,
    TileConfig,
    chunk_splits,
    decode_config,
    ragged_config,
)
from vajra_kernels.decode_plan import is_split, max_pieces
from vajra_kernels.metadata import AttentionMetadata, StepMemo, build_metadata
from vajra_kernels.static import AttentionShape, StaticCase, main, static_cases

CASES = list(static_cases())


def case_id(case: StaticCase) -> str:
    return f"{case.name} sm{case.device.capability[0]}{case.device.capability[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_compiled_code_keeps_its_bounds(case: StaticCase) -> None:
    figures = compile_launch(case.launch, case.device.capability)
    assert case.violations(figures) == []
    assert figures.registers > 0
    if "decode" in case.name or "prefill" in case.name:
        assert figures.num_async_copies > 0, "K and V must go straight to shared memory, 16 bytes a thread"


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [256, 512])
def test_tiles_of_a_large_chip_would_not_fit_a_small_one(head_dim: int) -> None:
    """Configurations follow the shared memory: what an H200 takes is more than an A10 or L4 has."""
    large, small = (AttentionShape(512, head_dim, (8, 2), 32).launch(device) for device in (H200, A10))
    taken = [compile_launch(launch, A10.capability).shared_bytes for launch in (large, small)]
    assert taken[1] <= A10.shared_limit_bytes < taken[0]


@pytest.mark.slow
def test_too_few_stages_are_seen() -> None:
    """The overlap check can fail: with three stages each K/V load is waited for, since the block table comes first."""
    (case,) = (c for c in CASES if c.name == "prefill bf16 d64 GQA4 block16")
    launch = replace(case.launch, tile=TileConfig(128, 64, 8, 3))
    assert any("no overlap" in text for text in case.violations(compile_launch(launch, (9, 0))))


def test_cases_cover_what_is_built_in() -> None:
    kernels = {case.launch.kernel.__name__ for case in CASES}
    attention = {
        "decode_kernel",
        "ragged_kernel",
        "kv_write_kernel",
        "copy_blocks_kernel",
        "merge_kernel",
        "plan_kernel",
    }
    assert kernels == attention | {"norm_kernel", "rotate_kernel", "gated_kernel", "sample_kernel"}
    assert {case.device for case in CASES} == {A10, A100, H200, L4}
    for case in CASES:
        is_half_attention = (
            any(word in case.name for word in ("decode", "prefill", "chunk")) and "fp32" not in case.name
        )
        assert case.wants_overlap == (is_half_attention or "sample" in case.name)
        assert case.wants_wgmma == (is_half_attention and case.device is H200 and "decode" not in case.name)


def test_figures_command_refuses_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--fast"])
    assert stop.value.code == 2
    assert "--fast" in capsys.readouterr().err


@pytest.mark.parametrize("device", [A10, A100, H200, L4])
@pytest.mark.parametrize("head_pad", [64, 128, 256, 512])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("group", [1, 4, 7, 32, 128])
def test_configurations_are_shapes_the_kernels_take(
    device: DeviceFacts, head_pad: int, element_bytes: int, group: int
) -> None:
    for query_len in (1, 4, 16, 2000):
        configs = [
            ragged_config(group, query_len, head_pad, element_bytes, device),
            decode_config(group, head_pad, element_bytes, device),
        ]
        for config in configs:
            assert config.tile_m >= 16
            assert config.tile_n >= 16
            assert config.tile_m & (config.tile_m - 1) == config.tile_n & (config.tile_n - 1) == 0
            # Two buffers of K and V tiles and the query tile.
            buffers = 2 * config.tile_n * head_pad * element_bytes * (2 if element_bytes == 2 else 1)
            assert buffers + config.tile_m * head_pad * element_bytes <= device.shared_limit_bytes


@pytest.mark.parametrize("num_programs", [1, 8, 32, 131, 132, 4000])
@pytest.mark.parametrize("longest", [1, 511, 1024, 5000, 131072])
def test_splits_of_chunks_cover_the_longest_context(num_programs: int, longest: int) -> None:
    split_tokens, num_splits = chunk_splits(num_programs, longest, 64, H200)
    assert split_tokens % 64 == 0
    assert split_tokens * num_splits >= longest > split_tokens * (num_splits - 1)
    assert num_splits == 1 or (num_programs < H200.num_sms and split_tokens >= 512)
    if longest == 131072 and 8 < num_programs < H200.num_sms:
        assert num_programs * num_splits >= H200.num_sms


def test_large_even_batches_are_not_split_and_small_ones_fill_the_chip() -> None:
    def batch(num_seqs: int, kv_len: int) -> AttentionMetadata:
        tables = torch.zeros((num_seqs, kv_len // 64), dtype=torch.int32)
        return build_metadata([1] * num_seqs, [kv_len] * num_seqs, tables, 64)

    assert not is_split(batch(256, 1024), 8, 64, None, H200)
    assert is_split(batch(256, 1024).parts()[0], 8, 64, None, H200) is False
    assert is_split(batch(1, 65536), 8, 64, None, H200)
    assert max_pieces(batch(1, 65536), 8, 64, H200) * 8 >= 4 * H200.num_sms
    assert not is_split(batch(1, 65536), 8, 64, 64, H200)  # a window of one tile
    assert not is_split(replace(batch(3, 128), memo=StepMemo()), 8, 64, None, H200)


def test_prefill_and_decode_have_their_own_shapes() -> None:
    assert AttentionShape(1).launch(H200).tile.tile_m == 16
    assert AttentionShape(512).launch(H200).tile.tile_m == 128
