"""The kernels in Triton's interpreter on caches whose elements 32 bits cannot count, as a GPU's are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vajra_kernels.call import AttentionCall
from vajra_kernels.config import H200
from vajra_kernels.gpu import attention_launches
from vajra_kernels.kv_write import kv_write_launch
from vajra_kernels.metadata import build_metadata

BLOCK, HEADS, DIM = 16, 2, 64
NUM_BLOCKS = (1 << 31) // (BLOCK * HEADS * DIM) + 8
"""The last blocks begin beyond element 2**31."""


@pytest.fixture
def caches(tmp_path: Path) -> list[torch.Tensor]:
    """K and V in sparse files, of which only accessed pages take memory."""
    made = []
    for name in ("k", "v"):
        size = NUM_BLOCKS * BLOCK * HEADS * DIM
        with (tmp_path / name).open("wb") as file:
            file.truncate(size * 2)
        flat = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.float16)
        made.append(flat.view(NUM_BLOCKS, BLOCK, HEADS, DIM))
    return made


@pytest.mark.parametrize("query_len", [1, 5])
def test_blocks_beyond_32_bits_are_written_and_read(
    query_len: int, caches: list[torch.Tensor], generator: torch.Generator
) -> None:
    kv_len = 2 * BLOCK + 3
    tables = {"far": [NUM_BLOCKS - 1, NUM_BLOCKS - 4, NUM_BLOCKS - 2], "near": [1, 5, 2]}
    key, value = (torch.randn((kv_len, HEADS, DIM), generator=generator).half() for _ in range(2))
    q = torch.randn((query_len, 4, DIM), generator=generator).half()
    found = {}
    for name, table in tables.items():
        slots = torch.tensor([table[position // BLOCK] * BLOCK + position % BLOCK for position in range(kv_len)])
        kv_write_launch(key, value, caches[0], caches[1], slots).run()
        metadata = build_metadata([query_len], [kv_len], [table], BLOCK)
        out = torch.zeros((query_len, 4, DIM), dtype=torch.float16)
        call = AttentionCall(q, caches[0], caches[1], metadata, DIM**-0.5, None, None, out, None)
        for launch in attention_launches(call, H200):
            launch.run()
        found[name] = out
        assert torch.equal(caches[0].view(-1, HEADS, DIM)[slots], key)
    assert torch.equal(found["far"], found["near"])
    assert found["far"].abs().sum() > 0
