"""What is compiled before the first request is all that a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_kernels import build_metadata, warm_up
from vajra_kernels.aot import specialization
from vajra_kernels.config import A100, H200, L4, DeviceFacts
from vajra_kernels.gpu import attention_launches
from vajra_kernels.metadata import AttentionMetadata
from vajra_kernels.warm_up import AttentionKind, Limits, warm_up_attention

LIMITS = Limits(max_seqs=48, max_query_len=700, max_kv_len=20_000)
KINDS = [
    (AttentionKind(8, 0.1), 2, 64, torch.bfloat16),
    (AttentionKind(8, 0.1, window=300, softcap=30.0), 4, 128, torch.float16),
    (AttentionKind(32, 0.1, with_lse=True), 1, 80, torch.float32),
]


def cache_of(num_kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    cache = torch.zeros((50, num_kv_heads, 16, dim), dtype=dtype).transpose(1, 2)
    return cache, cache


def warmed(monkeypatch: pytest.MonkeyPatch, number: int, device: DeviceFacts, limits: Limits = LIMITS) -> set[str]:
    kind, *shape = KINDS[number]
    with monkeypatch.context() as patch:
        patch.setattr(warm_up, "device_facts", lambda _: device)
        patch.setattr(warm_up, "_run", lambda launches: None)
        return warm_up_attention(kind, cache_of(*shape), limits)


def moved_off(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is no multiple of 16, as a part of a larger transfer has."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:] = tensor.reshape(-1)
    return room[1:].view(tensor.shape)


def needed(number: int, device: DeviceFacts, lens: Sequence[tuple[int, int]], causal: bool = True) -> set[str]:
    """Specialisations of a step's launches."""
    kind, *shape = KINDS[number]
    cache = cache_of(*shape)
    lens = sorted(lens, key=lambda one: one[0] > 1)
    blocks = torch.zeros((len(lens), max(-(-kv // 16) for _, kv in lens)), dtype=torch.int32)
    made: AttentionMetadata = build_metadata(
        [new for new, _ in lens], [kv for _, kv in lens], blocks, 16, causal=causal
    )
    facts: dict[str, Any] = {
        name: moved_off(getattr(made, name)) for name in ("query_start", "kv_lens", "block_table", "slot_mapping")
    }
    call = warm_up._call(kind, cache, replace(made, **facts))
    return {specialization(launch) for launch in attention_launches(call, device)}


@pytest.mark.parametrize("number", range(len(KINDS)))
@pytest.mark.parametrize("device", [A100, H200, L4], ids=["A100", "H200", "L4"])
def test_no_step_needs_what_was_not_compiled(number: int, device: DeviceFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = warmed(monkeypatch, number, device)
    assert 5 <= len(ready) <= 40, "a start compiles few programs"
    kv = st.integers(1, LIMITS.max_kv_len) | st.integers(1, 1200)
    decodes = st.lists(kv.map(lambda n: (1, n)), max_size=40)
    chunks = st.lists(
        st.tuples(st.integers(2, 700) | st.integers(2, 20), kv).map(lambda one: (one[0], sum(one))), max_size=8
    )
    batches = st.builds(lambda ones, more: [(n, min(k, LIMITS.max_kv_len)) for n, k in ones + more], decodes, chunks)

    @given(batches.filter(bool))
    @settings(max_examples=60)
    def check(lens: list[tuple[int, int]]) -> None:
        assert needed(number, device, lens) <= ready

    check()


def test_parts_of_sequences_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = warmed(monkeypatch, 2, H200)
    earlier = needed(2, H200, [(30, 400)], causal=False)
    assert not earlier <= ready
    assert earlier <= warmed(monkeypatch, 2, H200, replace(LIMITS, causal=False))


def test_longer_sequences_than_the_limits_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    ready = warmed(monkeypatch, 0, H200, Limits(max_seqs=4, max_query_len=16, max_kv_len=100))
    assert not needed(0, H200, [(1, 5000)]) <= ready
    assert not needed(0, H200, [(500, 500)]) <= ready
