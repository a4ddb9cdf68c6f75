"""Caches, slots, block copies and merging on the CPU; the step's metadata."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vajra_kernels import (
    allocate_kv_cache,
    build_metadata,
    copy_blocks,
    kv_block_bytes,
    merge_partials,
    token_slots,
    write_kv,
)
from vajra_kernels.cache import block_words
from vajra_kernels.reference import copy_blocks_reference, merge_reference, sequence_kv, write_kv_reference


def test_written_tokens_are_found_again() -> None:
    """Chunk by chunk, through the slots of the metadata, a sequence's rows come back in order."""
    k_caches, v_caches = allocate_kv_cache(2, 9, (16, 2, 8), torch.float32, "cpu")
    tables = [[7, 2, 4], [0, 5]]
    keys = [torch.randn(40, 2, 8), torch.randn(20, 2, 8)]
    done = [0, 0]
    for steps in ([16, 3], [20, 0], [4, 17]):
        rows = [key[at : at + n] for key, at, n in zip(keys, done, steps, strict=True)]
        done = [at + n for at, n in zip(done, steps, strict=True)]
        metadata = build_metadata(steps, done, tables, 16)
        new = torch.cat(rows)
        write_kv(new, -new, k_caches[1], v_caches[1], metadata.slot_mapping)
    for key, blocks in zip(keys, tables, strict=True):
        assert torch.equal(sequence_kv(k_caches[1], torch.tensor(blocks), key.shape[0]), key)
        assert torch.equal(sequence_kv(v_caches[1], torch.tensor(blocks), key.shape[0]), -key)
    assert not k_caches[0].any()


def test_written_values_take_the_cache_dtype() -> None:
    cache = torch.zeros((2, 4, 1, 4), dtype=torch.bfloat16)
    other = cache.clone()
    wanted = cache.clone()
    key = torch.randn(3, 1, 4)
    slots = torch.tensor([5, 0, 3])
    write_kv_reference(key, wanted, slots)
    write_kv(key, key, cache, other, slots)
    assert torch.equal(cache, wanted)
    with pytest.raises(IndexError):
        write_kv(key, key, cache, other, torch.tensor([5, -1, 3]))


@given(
    lens=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), min_size=1, max_size=6),
    block_size=st.integers(1, 20),
    as_tensor=st.booleans(),
)
def test_slots_are_those_of_the_block_tables(lens: list[tuple[int, int]], block_size: int, as_tensor: bool) -> None:
    query_lens, kv_lens = [new for new, _ in lens], [new + old for new, old in lens]
    tables: list[list[int]] = []
    for n in kv_lens:
        first = sum(len(table) for table in tables)
        tables.append([100 - first - i for i in range(-(-n // block_size))][: -(-n // block_size)])
    given_tables: list[list[int]] | torch.Tensor = tables
    if as_tensor:
        width = max(1, *(len(table) for table in tables))
        given_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    metadata = build_metadata(query_lens, kv_lens, given_tables, block_size)
    wanted = [
        tables[seq][p // block_size] * block_size + p % block_size
        for seq, (new, total) in enumerate(zip(query_lens, kv_lens, strict=True))
        for p in range(total - new, total)
    ]
    assert metadata.slot_mapping.tolist() == wanted
    assert metadata.num_query_tokens == len(wanted)
    assert metadata.num_kv_tokens == sum(kv_lens)
    assert (metadata.max_query_len, metadata.max_kv_len) == (max(query_lens), max(kv_lens))
    leading = 0
    while leading < len(lens) and query_lens[leading] == 1:
        leading += 1
    assert metadata.num_decodes == leading
    on_device = token_slots(metadata.query_start, metadata.kv_lens, metadata.block_table, block_size, len(wanted))
    assert on_device.tolist() == wanted


def test_padding_rows_are_written_nowhere() -> None:
    metadata = build_metadata([1, 1], [20, 0], [[3, 1], []], 16)
    assert metadata.slot_mapping.tolist() == [1 * 16 + 3, -1]


def test_the_two_parts_of_a_mixed_batch() -> None:
    metadata = build_metadata([1, 1, 5, 3], [9, 30, 40, 3], torch.arange(12).view(4, 3), 16)
    decodes, chunks = metadata.parts()
    assert (decodes.num_seqs, decodes.num_decodes, decodes.num_query_tokens) == (2, 2, 2)
    assert (decodes.max_kv_len, decodes.num_kv_tokens, decodes.max_query_len) == (30, 39, 1)
    assert (chunks.num_seqs, chunks.num_decodes, chunks.num_query_tokens) == (2, 0, 8)
    assert (chunks.max_kv_len, chunks.num_kv_tokens, chunks.max_query_len) == (40, 43, 5)
    assert chunks.query_start.tolist() == [2, 7, 10]
    assert torch.equal(torch.cat((decodes.slot_mapping, chunks.slot_mapping)), metadata.slot_mapping)
    assert metadata.parts()[0] is decodes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [20], [[1]], 16), "It needs 2 blocks"),
        (([5], [4], [[1]], 16), "5 new tokens and KV length 4"),
        (([-1], [4], [[1]], 16), "-1 new tokens"),
        (([1, 1], [4], [[1]], 16), "2 query lengths, 1 KV lengths"),
        (([1], [4], [[1]], 0), "block_size is not positive"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_metadata(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("layered", [True, False])
def test_blocks_are_copied_between_caches(layered: bool) -> None:
    shape = (2, 5, 4, 2, 8) if layered else (5, 4, 2, 8)
    src, dst = torch.randn(shape), torch.randn(shape)
    wanted = dst.clone()
    pairs = torch.tensor([[4, 0], [0, 3]])
    copy_blocks_reference(src, wanted, pairs)
    copy_blocks(src, dst, pairs)
    assert torch.equal(dst, wanted)


def test_copies_between_unlike_caches_are_refused() -> None:
    pairs = torch.tensor([[0, 0]])
    with pytest.raises(ValueError, match="same dtype"):
        copy_blocks(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8, dtype=torch.float16), pairs)
    with pytest.raises(ValueError, match="same dtype"):
        copy_blocks(torch.zeros(2, 4, 2, 8), torch.zeros(2, 8, 2, 8), pairs)
    with pytest.raises(ValueError, match="on cpu and meta"):
        copy_blocks(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8, device="meta"), pairs)
    with pytest.raises(ValueError, match="int64"):
        copy_blocks(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8), pairs.int())


def test_blocks_as_words_share_memory_in_either_order() -> None:
    for head_major in (False, True):
        cache = torch.zeros((3, 5, 2, 16, 8) if head_major else (3, 5, 16, 2, 8), dtype=torch.bfloat16)
        view = cache.transpose(2, 3) if head_major else cache
        words = block_words(view)
        assert words.shape == (3, 5, 16 * 2 * 8 * 2 // 4)
        words[1, 2] = 0x3F803F80
        assert torch.equal(view[1, 2].float(), torch.ones(16, 2, 8))
        assert view.float().sum() == 16 * 2 * 8
    with pytest.raises(ValueError, match="one dense run"):
        block_words(torch.zeros(3, 16, 2, 8)[:, ::2])


def test_block_bytes_are_those_of_the_caches() -> None:
    k_caches, v_caches = allocate_kv_cache(3, 10, (16, 2, 8), torch.float16, "cpu")
    total = k_caches.nbytes + v_caches.nbytes
    assert kv_block_bytes(3, (16, 2, 8), torch.float16) * 10 == total


def test_merge_equals_the_reference_and_skips_empty_parts() -> None:
    parts, lses = torch.randn(4, 3, 2, 8), torch.randn(4, 3, 2) * 20
    lses[1] = float("-inf")
    lses[:, 2, 1] = float("-inf")
    parts[1] = float("nan")
    out, lse = merge_partials(parts, lses)
    wanted, wanted_lse = merge_reference(parts.double(), lses.double())
    assert torch.allclose(out.double(), wanted, atol=1e-6)
    assert torch.allclose(lse.double(), wanted_lse, atol=1e-5)
    assert not out[2, 1].any()
    with pytest.raises(ValueError, match="merge_partials"):
        merge_partials(parts, lses[:2])


def test_cpu_use_does_not_import_triton() -> None:
    """Where Triton is not published (it is for Linux only) the CPU path still works."""
    code = (
        "import sys, torch, vajra_kernels as v\n"
        "sys.modules['triton'] = None\n"
        "k, w = (c[0] for c in v.allocate_kv_cache(1, 4, (16, 2, 32), torch.float32, 'cpu'))\n"
        "m = v.build_metadata([2], [5], [[1]], 16)\n"
        "v.write_kv(torch.ones(2, 2, 32), torch.ones(2, 2, 32), k, w, m.slot_mapping)\n"
        "print(float(v.paged_attention(torch.ones(2, 4, 32), k, w, m).max()))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert 0.0 < float(result.stdout) < 1.0
