"""Products over weights that oneDNN packed: the same results as plain ones, for any number of rows, and used in every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from vajra_kernels import build_metadata  # noqa: E402
from vajra_py.engine.compute import RunnerOptions  # noqa: E402
from vajra_py.engine.compute.model import fused_parts  # noqa: E402
from vajra_py.engine.compute.model.fused_parts import Product, can_pack  # noqa: E402
from vajra_py.engine.compute.model.kv_memory import KvMemory  # noqa: E402
from vajra_py.engine.compute.model.prepare import prepare  # noqa: E402
from vajra_py.engine.compute.model.ranks import Ranks  # noqa: E402

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operands(dtype: Any, num_rows: int, sizes: tuple[int, int]) -> tuple[Any, Any, Any]:
    """x, weight and bias; entries of the result are about 1."""
    generator = torch.Generator().manual_seed(num_rows)
    inputs, outputs = sizes
    x = torch.randn((num_rows, inputs), generator=generator).to(dtype)
    weight = (torch.randn((outputs, inputs), generator=generator) / inputs**0.5).to(dtype)
    return x, weight, torch.randn(outputs, generator=generator).to(dtype)


def off(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("sizes", [(64, 96), (40, 1031)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33, 300])
def test_a_packed_product_equals_the_plain_one(dtype: Any, sizes: tuple[int, int], num_rows: int) -> None:
    x, weight, bias = operands(dtype, num_rows, sizes)
    wanted = x.double() @ weight.double().t()
    for packed in (Product.packed(weight, None), Product(weight, None)):
        assert off(packed(x), wanted) <= TOLERANCES[dtype]
    wanted = wanted + bias.double()
    for packed in (Product.packed(weight, bias), Product(weight, bias)):
        assert off(packed(x), wanted) <= TOLERANCES[dtype]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_a_product_is_added_in_place(pack: bool, with_bias: bool) -> None:
    x, weight, bias = operands(torch.float32, 5, (32, 48))
    product = (Product.packed if pack else Product)(weight, bias if with_bias else None)
    hidden = torch.arange(5 * 48.0).view(5, 48)
    wanted = hidden.double() + x.double() @ weight.double().t() + (bias.double() if with_bias else 0.0)
    assert product.add_to(hidden, x) is hidden
    assert off(hidden, wanted) < 1e-6


def test_rows_of_a_wider_tensor_are_taken_as_they_lie() -> None:
    x, weight, _ = operands(torch.float32, 6, (64, 16))
    product = Product.packed(weight[:, :32], None)
    assert off(product(x[:, 32:]), x[:, 32:].double() @ weight[:, :32].double().t()) < 1e-5


def test_what_onednn_does_not_compute_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = operands(torch.float32, 1, (16, 16))
    assert not can_pack(weight.double())
    assert not can_pack(weight.to("meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(weight)
    x = torch.ones(3, 16)
    assert torch.equal(Product.packed(weight, None)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_every_product_of_a_layer_is_packed(small_models: Callable[[str], str], family: str) -> None:
    model = prepare(RunnerOptions(small_models(family), self_check=False), Ranks())
    memory = KvMemory(model.layers, (8, 0, 16), model.dtype, model.device)
    metadata = build_metadata([1, 1], [9, 20], [[0, 1], [2, 3]], 16)
    token_ids, rows = torch.tensor([3, 4]), torch.arange(2)
    with torch.inference_mode(), Operators() as found:
        model.forward(token_ids, torch.tensor([8, 19]), rows, metadata, memory.caches)
    assert found.names["_linear_pointwise"] >= 4 * len(model.layers)
    # What is left is the output layer of a model that shares it with its embedding.
    assert found.names["mm"] + found.names["addmm"] + found.names["linear"] <= 1


def test_logits_are_the_same_packed_and_not(
    small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = []
    for packs in (True, False):
        if not packs:
            monkeypatch.setattr(fused_parts, "can_pack", lambda weight: False)
        model = prepare(RunnerOptions(small_models("llama")), Ranks())
        assert model.facts.forward == "fused"
        memory = KvMemory(model.layers, (8, 0, 16), model.dtype, model.device)
        metadata = build_metadata([12, 20], [12, 20], [[0, 1], [2, 3]], 16)
        token_ids = torch.arange(32) % 7 + 3
        positions = torch.cat((torch.arange(12), torch.arange(20)))
        with torch.inference_mode():
            logits.append(model.forward(token_ids, positions, torch.arange(32), metadata, memory.caches))
    assert off(logits[0], logits[1].double()) < 1e-5
