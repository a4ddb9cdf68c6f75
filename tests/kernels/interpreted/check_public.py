"""The public functions on CPU tensors in an interpreting process: they take the Triton kernels, and all of them."""

from __future__ import annotations

import pytest
import torch

import vajra_kernels
from vajra_kernels.reference import attention_reference, copy_blocks_reference, merge_reference


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched during a test."""
    from vajra_kernels.launch import Launch

    names: list[str] = []
    run = Launch.run

    def recording(launch: Launch) -> None:
        names.append(launch.kernel.__name__)
        run(launch)

    monkeypatch.setattr(Launch, "run", recording)
    return names


def test_a_prompt_and_its_decodes(generator: torch.Generator, launched: list[str]) -> None:
    """Chunks of two prompts, then mixed steps: written, attended and merged through the package's front."""
    k_cache, v_cache = (cache[0] for cache in vajra_kernels.allocate_kv_cache(1, 9, (16, 2, 64), torch.float32, "cpu"))
    tables = [[7, 2, 4], [0, 5, 8]]
    done = [0, 0]
    for steps in ([0, 20], [1, 18], [1, 1]):
        done = [at + n for at, n in zip(done, steps, strict=True)]
        metadata = vajra_kernels.build_metadata(steps, done, tables, 16)
        key, value = torch.randn((2, sum(steps), 2, 64), generator=generator)
        q = torch.randn((sum(steps), 4, 64), generator=generator)
        vajra_kernels.write_kv(key, value, k_cache, v_cache, metadata.slot_mapping)
        out, lse = vajra_kernels.paged_attention(q, k_cache, v_cache, metadata, scale=0.2, return_lse=True)
        wanted = attention_reference(q.double(), k_cache.double(), v_cache.double(), metadata, scale=0.2)
        assert torch.allclose(out.double(), wanted[0], atol=3e-6)
        assert torch.allclose(lse.double(), wanted[1], atol=5e-6)
    assert set(launched) == {"kv_write_kernel", "ragged_kernel", "decode_kernel"}


def test_merge_and_copy(generator: torch.Generator, launched: list[str]) -> None:
    parts, lses = torch.randn((3, 2, 4, 32), generator=generator), torch.randn((3, 2, 4), generator=generator)
    out, lse = vajra_kernels.merge_partials(list(parts), list(lses))
    wanted = merge_reference(parts.double(), lses.double())
    assert torch.allclose(out.double(), wanted[0], atol=1e-6)
    assert torch.allclose(lse.double(), wanted[1], atol=1e-6)
    src, dst = torch.randn((2, 2, 4, 16, 2, 8), generator=generator)
    copied = dst.clone()
    pairs = torch.tensor([[3, 0], [1, 2]])
    copy_blocks_reference(src, copied, pairs)
    vajra_kernels.copy_blocks(src, dst, pairs)
    assert torch.equal(dst, copied)
    assert launched == ["merge_kernel", "copy_blocks_kernel"]
