"""LoRA adapters of random weights, as `peft` writes them, and the models that they mean: W + scale * B A."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    seed: int,
    rank: int = 3,
    targets: Sequence[str] = EVERYWHERE,
    alpha: float = 6.0,
    tensors: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for transformers' model; `tensors` replace, or with None remove, tensors by name."""
    import torch
    from safetensors.torch import save_file

    stream = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
            outputs, inputs = module.weight.shape
            where = f"base_model.model.{name}"
            found[f"{where}.lora_A.weight"] = torch.randn(rank, inputs, generator=stream) * 0.3
            found[f"{where}.lora_B.weight"] = torch.randn(outputs, rank, generator=stream) * 0.3
    found = {name: one for name, one in {**found, **(tensors or {})}.items() if one is not None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(found, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """Return transformers' model with an adapter merged into its weights."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, first in tensors.items():
            if name.endswith("lora_A.weight"):
                module = made.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                module.weight += scale * tensors[name.replace("lora_A", "lora_B")] @ first
    return made
