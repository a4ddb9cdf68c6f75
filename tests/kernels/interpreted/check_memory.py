"""The K/V write, merge and block copy kernels in Triton's interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from vajra_kernels import SwapSpace, copy_blocks
from vajra_kernels.kv_write import kv_write_launch
from vajra_kernels.merge import merge_launch
from vajra_kernels.reference import copy_blocks_reference, merge_reference, write_kv_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "head_major"), [((64, 64), True), ((80, 48), False)])
def test_write(dtype: torch.dtype, dims: tuple[int, int], head_major: bool, generator: torch.Generator) -> None:
    caches = [torch.randn((6, 16, 3, dim), generator=generator).to(dtype) for dim in dims]
    if head_major:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    slots = torch.randperm(6 * 16, generator=generator)[:20]
    slots[3] = -1
    fused = torch.randn((20, 9, dims[0]), generator=generator).to(dtype)
    key, value = fused[:, 3:6], fused[:, 6:, : dims[1]]
    wanted = [cache.clone() for cache in caches]
    write_kv_reference(key, wanted[0], slots)
    write_kv_reference(value, wanted[1], slots)
    kv_write_launch(key, value, caches[0], caches[1], slots).run()
    assert torch.equal(caches[0], wanted[0])
    assert torch.equal(caches[1], wanted[1])


def test_write_of_rows_that_several_programs_share(generator: torch.Generator) -> None:
    """Wider than what one program writes: 33 heads of multi-head attention, of which K and V end in different programs."""
    caches = [torch.zeros((3, 4, 33, dim)) for dim in (128, 72)]
    key, value = (torch.randn((5, 33, dim), generator=generator) for dim in (128, 72))
    slots = torch.tensor([7, 2, -1, 11, 0])
    wanted = [cache.clone() for cache in caches]
    write_kv_reference(key, wanted[0], slots)
    write_kv_reference(value, wanted[1], slots)
    launch = kv_write_launch(key, value, caches[0], caches[1], slots)
    assert launch.grid[1] >= 3
    launch.run()
    assert torch.equal(caches[0], wanted[0])
    assert torch.equal(caches[1], wanted[1])


@pytest.mark.parametrize("num_parts", [1, 3, 16, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge(num_parts: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Parts that saw nothing (lse -inf) hold NaN, some rows have no part at all, and lse spans 60 units."""
    parts = torch.randn((num_parts, 5, 3, 80), generator=generator).to(dtype)
    lses = torch.rand((num_parts, 5, 3), generator=generator) * 60 - 30
    empty = torch.rand(lses.shape, generator=generator) < 0.3
    empty[:, 2, 1] = True
    lses[empty] = float("-inf")
    parts[empty] = float("nan")
    out = torch.full((5, 3, 80), float("nan"), dtype=dtype)
    lse = torch.full((5, 3), float("nan"))
    merge_launch(parts, lses, out, lse).run()
    wanted, wanted_lse = merge_reference(parts.double(), lses.double())
    assert (out.double() - wanted).abs().max() < (2e-6 if dtype == torch.float32 else 2e-3)
    assert torch.allclose(lse.double(), wanted_lse, rtol=0, atol=1e-5)
    assert torch.equal(out[2, 1], torch.zeros(80, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_major", [True, False])
def test_copy_blocks(dtype: torch.dtype, head_major: bool, generator: torch.Generator) -> None:
    def cache(num_blocks: int) -> torch.Tensor:
        drawn = torch.randn((2, num_blocks, 16, 3, 48), generator=generator).to(dtype)
        return drawn.transpose(2, 3).contiguous().transpose(2, 3) if head_major else drawn

    src, dst = cache(7), cache(5)
    pairs = torch.tensor([[6, 0], [1, 4], [3, 2]])
    wanted = dst.clone()
    copy_blocks_reference(src, wanted, pairs)
    copy_blocks(src, dst, pairs)
    assert torch.equal(dst, wanted)
    pairs = torch.tensor([[0, 5], [2, 6]])
    wanted = src.clone()
    copy_blocks_reference(src, wanted, pairs)
    copy_blocks(src, src, pairs)
    assert torch.equal(src, wanted)


def test_swap(generator: torch.Generator) -> None:
    """Blocks of caches of two widths in rows of one host tensor, and back into other blocks."""
    made = [torch.randn((2, 7, 16, 3, dim), generator=generator) for dim in (48, 20)]
    made[1] = made[1].transpose(2, 3).contiguous().transpose(2, 3)
    before = [cache.clone() for cache in made]
    space = SwapSpace(made, 4)
    space.to_host([(6, 0), (1, 3), (2, 1)])
    space.to_device([(0, 0), (5, 3)])
    for cache, old in zip(made, before, strict=True):
        old[:, [0, 5]] = old[:, [6, 1]]
        assert torch.equal(cache, old)
