"""Kernels that a decoder layer starts on a GPU, counted with stand-ins: nothing is launched, and operators are noted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vajra_kernels import attention, backend, build_metadata
from vajra_kernels.launch import Launch
from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.compute.model import fused, fused_parts
from vajra_py.engine.compute.model.kv_memory import KvMemory
from vajra_py.engine.compute.model.prepare import prepare
from vajra_py.engine.compute.model.ranks import Ranks

MOST_KERNELS = 11


class OperatorNotes(TorchDispatchMode):
    """Notes every operator that computes: those that only allocate or make views start no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view and "empty" not in name and name not in ("detach", "_unsafe_view"):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels of Triton that were to be launched, by name; tensors of the CPU count as a GPU's."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(Launch, "run", lambda launch: found.update([launch.kernel.__name__]))
    monkeypatch.setattr(fused_parts, "can_pack", lambda weight: False)  # as on a GPU
    for module in (backend, fused, attention):
        monkeypatch.setattr(module, "uses_triton", lambda device: True)
    return found


def kernels_of_a_step(directory: str, launched: Counter[str]) -> Counter[str]:
    """Of 40 decodes behind 500 tokens each, which is enough for attention to be split and merged."""
    model = prepare(RunnerOptions(directory, self_check=False, max_model_len=1024), Ranks())
    assert model.facts.forward == "fused"
    memory = KvMemory(model.layers, (40, 0, 16), model.dtype, model.device)
    metadata = build_metadata([1] * 40, [500] * 40, [list(range(32))] * 40, 16)
    token_ids, rows = torch.zeros(40, dtype=torch.int64), torch.arange(40)
    launched.clear()
    with torch.inference_mode(), OperatorNotes() as notes:
        model.forward(token_ids, token_ids + 499, rows, metadata, memory.caches)
    return launched + notes.names


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"])
def test_a_layer_starts_few_kernels(family: str, compute_kit: Any, tmp_path: Path, launched: Counter[str]) -> None:
    found = []
    for depth in (2, 4):
        types = {"layer_types": ["full_attention"] * depth} if family == "gemma3_text" else {}
        folder = compute_kit.write_model(
            tmp_path / str(depth), family, num_hidden_layers=depth, max_position_embeddings=1024, **types
        )
        found.append(kernels_of_a_step(folder, launched))
    deeper = found[1]
    deeper.subtract(found[0])
    of_a_layer = {name: count / 2 for name, count in deeper.items() if count}
    assert of_a_layer["rotate_kernel"] == of_a_layer["decode_kernel"] == 1, of_a_layer
    assert sum(of_a_layer.values()) <= MOST_KERNELS, of_a_layer
    if family == "llama":
        assert sum(of_a_layer.values()) == 10
