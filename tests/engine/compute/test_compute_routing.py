"""The self-check of mixtures of experts in 16 bits: choices between experts of nearly equal scores are no fault; faults are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vajra_py.engine.compute import RunnerOptions  # noqa: E402
from vajra_py.engine.compute.model.forward import TransformersForward, probe_layers  # noqa: E402
from vajra_py.engine.compute.model.fused import FusedForward  # noqa: E402
from vajra_py.engine.compute.model.loading import load_model  # noqa: E402
from vajra_py.engine.compute.model.routing import Routing  # noqa: E402
from vajra_py.engine.compute.model.selfcheck import SelfCheck  # noqa: E402
from vajra_py.engine.compute.model.shard import Shard  # noqa: E402

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": 12},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 12},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
        **{"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 32},
    },
}
"""Experts of the last are chosen from groups that are chosen first."""
FUSED = ("mixtral", "qwen3_moe")


@pytest.fixture
def load(compute_kit: Any, tmp_path: Any) -> Callable[[str], Any]:
    """Load a bfloat16 model of a family, with three experts a token."""

    def loaded(family: str) -> Any:
        directory = compute_kit.write_model(tmp_path, family, **FAMILIES[family], num_experts_per_tok=3)
        return load_model(RunnerOptions(directory, dtype="bfloat16"))

    return loaded


def check_of(loaded: Any) -> SelfCheck:
    return SelfCheck(loaded, probe_layers(loaded.model, "the model"))


def routers(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]


def rounded_otherwise(x: Any, seed: int) -> Any:
    """Move a third of the elements up by one rounding, a third down."""
    moves = torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(seed))
    return (x.float() * (1.0 + moves * torch.finfo(x.dtype).eps)).to(x.dtype)


@contextmanager
def other_roundings(model: Any) -> Iterator[None]:
    """Round what routers get in another way."""
    hooks = [
        router.register_forward_pre_hook(lambda _, given: (rounded_otherwise(given[0], 1), *given[1:]))
        for router in routers(model)
    ]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_choice_between_nearly_equal_experts_is_no_fault(
    family: str, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(family)
    for router in routers(loaded.model):  # three are chosen, so of some pair one
        router.weight.data[1::2] = rounded_otherwise(router.weight.data[::2], 0)
    check = check_of(loaded)
    with other_roundings(loaded.model):
        assert check.difference(TransformersForward(loaded.model), check.layers, loaded.device) is None
        monkeypatch.setattr(Routing, "repeated", lambda *_: nullcontext())
        assert "differ by" in str(check.difference(TransformersForward(loaded.model), check.layers, loaded.device))


def test_a_pass_over_some_layers_and_tokens_chooses_as_recorded_and_later_ones_for_themselves(
    load: Callable[[str], Any],
) -> None:
    model = load("mixtral").model
    first, last = routers(model)
    hidden = torch.randn((5, 48), dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    routing = Routing()
    with routing.recorded(model, 5):
        first(hidden)
        chosen = last(hidden)[2]
    last.weight.data = last.weight.data.flip(0)
    with routing.repeated(torch.tensor([3, 1])):
        _, weights, again = last(hidden[[3, 1]])
    assert torch.equal(again, chosen[[3, 1]])
    own = last(hidden)
    assert torch.equal(own[2], 3 - chosen)
    assert not torch.equal(weights, own[1][[3, 1]])  # of other experts, by this pass's scores


def moved_up(weight: Any) -> None:
    weight.data = weight.data.roll(1, 0)


FAULTS: dict[str, Callable[[Any], None]] = {
    "experts": lambda model: moved_up(model.model.layers[1].mlp.experts.down_proj),
    "router": lambda model: moved_up(model.model.layers[1].mlp.gate.weight),
    "norm": lambda model: model.model.layers[1].post_attention_layernorm.weight.data.mul_(1.1),
    "keys": lambda model: moved_up(model.model.layers[0].self_attn.k_proj.weight),
    "rotary": lambda model: model.model.rotary_emb.inv_freq.mul_(1.2),
}
LAYER_FAULTS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda facts: replace(facts, scale=1.5 * facts.scale),
    "no window": lambda facts: replace(facts, window=None),
    "window": lambda facts: replace(facts, window=facts.window + 1),
}


class Wrapped:
    """A fused forward pass with a fault."""

    name = "fused"
    has_head = True

    def __init__(self, forward: FusedForward, fault: str) -> None:
        self._forward = forward
        self._fault = fault

    def __call__(self, token_ids: Any, positions: Any, rows: Any, metadata: Any, caches: Any) -> Any:
        if self._fault == "positions" and len(token_ids) == 2:
            positions = positions + 1
        logits = self._forward(token_ids, positions, rows, metadata, caches)
        if self._fault == "kv":
            caches[1][1][4] = caches[1][1][7]
        return logits


@pytest.mark.parametrize("fault", ["", "positions", "kv", *FAULTS, *LAYER_FAULTS])
@pytest.mark.parametrize("family", FUSED)
def test_a_fault_is_found_in_a_mixture(family: str, fault: str, load: Callable[[str], Any]) -> None:
    loaded = load(family)
    check = check_of(loaded)
    layers = list(check.layers)
    if fault in FAULTS:
        FAULTS[fault](loaded.model)
    if fault in LAYER_FAULTS:
        layers[1] = LAYER_FAULTS[fault](layers[1])
    with torch.inference_mode():
        forward = FusedForward(loaded.model, layers, Shard(), torch.device("cpu"))
    difference = check.difference(Wrapped(forward, fault), layers, loaded.device)
    assert (difference is not None) == bool(fault), difference
    assert not fault or "its logits differ by" in str(difference)
