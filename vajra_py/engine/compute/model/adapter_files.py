"""Check a LoRA adapter's folder in the format of `peft`, by its configuration and file header; loads no tensor library.

Invariants:
    - Options that the engine cannot compute exactly are refused, and the error names the key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vajra_py.engine.compute.interface import AdapterSource
from vajra_py.engine.compute.model.inspect import read_tensor_shapes
from vajra_py.errors import ConfigError, Problem

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules of a decoder layer that adapters may change."""
_LARGEST = 1 << 20
"""Largest accepted `r`, and largest accepted magnitude of `lora_alpha`; very large integers do not fit into a float."""
_EXPECTED = f"An adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as `peft` writes it"
_NEUTRAL = frozenset(
    {
        "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
        "init_lora_weights", "layers_pattern", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config",
        "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config",
        "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Keys of `CONFIG_FILE` that are read here or matter for training only; others are refused unless empty or false."""
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_(A|B)\.weight")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A complete adapter folder.

    Attributes:
        rank: inner dimension of the adapter's matrices.
        scale: factor of the matrices' product: alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA.
        shapes: (outputs, inputs) of each module that the adapter changes, by (layer, module).
    """

    source: AdapterSource
    rank: int
    scale: float
    shapes: Mapping[tuple[int, str], tuple[int, int]]

    @property
    def weights_file(self) -> Path:
        """File of the adapter's tensors."""
        return Path(self.source.folder).expanduser() / WEIGHTS_FILE


def tensor_name(layer: int, module: str, letter: str) -> str:
    """Return the name of a module's matrix A or B in the tensor file."""
    part = "self_attn" if MODULES.index(module) < 4 else "mlp"
    return f"base_model.model.model.layers.{layer}.{part}.{module}.lora_{letter}.weight"


def inspect_adapter(source: AdapterSource) -> AdapterFiles:
    """Check an adapter's folder and describe it. Raises `ConfigError` if it is missing, broken or not supported."""
    folder = Path(source.folder).expanduser()
    file = folder / CONFIG_FILE
    if not file.is_file():
        found = "is missing" if folder.is_dir() else "there is no such folder"
        raise ConfigError(Problem(str(file if folder.is_dir() else folder), found, _EXPECTED))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(str(file), f"this is not readable JSON ({error})", _EXPECTED)) from error
    problems = list(_unsupported(str(file), config))
    if problems:
        raise ConfigError(problems)
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ConfigError(Problem(str(weights), "is missing", _EXPECTED))
    shapes = _shapes(weights, rank)
    _check_targets(str(weights), config.get("target_modules"), shapes)
    return AdapterFiles(source, rank, scale, shapes)


def _unsupported(where: str, config: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key of a configuration that the engine does not support."""
    problems = []

    def refuse(key: str, message: str, allowed: str) -> None:
        problems.append(Problem(where, f"{key}: {message}", allowed))

    if config.get("peft_type") != "LORA":
        refuse("peft_type", f"not LoRA ({config.get('peft_type')!r})", "Allowed: LORA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= _LARGEST:
        refuse("r", f"not a rank ({rank!r})", f"Allowed: a whole number, 1 to {_LARGEST}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not -_LARGEST <= alpha <= _LARGEST:
        refuse("lora_alpha", f"not an allowed number ({alpha!r})", f"Allowed: a number, -{_LARGEST} to {_LARGEST}")
    targets = config.get("target_modules")
    if isinstance(targets, list):
        for name in targets:
            if str(name).rpartition(".")[2] not in MODULES:
                refuse("target_modules", f"this module is not adapted ({name!r})", f"Allowed: {', '.join(MODULES)}")
    if config.get("bias", "none") != "none":
        refuse("bias", f"biases are those of the base model (got {config['bias']!r})", "Allowed: none")
    for key, value in config.items():
        if key not in _NEUTRAL and key != "bias" and value not in (None, False, 0, "", [], {}):
            refuse(key, f"is not supported (got {value!r})", "Allowed: plain LoRA of linear modules")
    return problems


def _shapes(weights: Path, rank: int) -> dict[tuple[int, str], tuple[int, int]]:
    """Return the (outputs, inputs) of each module in a tensor file. Raises `ConfigError`."""
    where, problems = str(weights), []
    inputs: dict[tuple[int, str], int] = {}
    outputs: dict[tuple[int, str], int] = {}
    for name, shape in read_tensor_shapes(weights).items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[2] not in MODULES:
            problems.append(
                Problem(where, f"tensor of a module that is not adapted ({name})", f"Allowed: {', '.join(MODULES)}")
            )
            continue
        is_first = match[3] == "A"
        if len(shape) != 2 or shape[0 if is_first else 1] != rank:
            problems.append(Problem(where, f"{name} has not the rank of {CONFIG_FILE} ({shape}, and r is {rank})"))
            continue
        key = int(match[1]), match[2]
        (inputs if is_first else outputs)[key] = shape[1] if is_first else shape[0]
    for key in inputs.keys() ^ outputs.keys():
        lacking = tensor_name(*key, "A" if key in outputs else "B")
        problems.append(Problem(where, f"lacks a tensor ({lacking})", "Copy the folder again"))
    if not problems and not inputs:
        problems.append(Problem(where, "has no tensor", _EXPECTED))
    if problems:
        raise ConfigError(problems[:5])
    return {key: (outputs[key], inputs[key]) for key in sorted(inputs)}


def _check_targets(where: str, targets: Any, shapes: Mapping[tuple[int, str], tuple[int, int]]) -> None:
    """Raise `ConfigError` if a layer with adapted modules lacks tensors of a module that the configuration names."""
    if not isinstance(targets, list):  # without a list (a pattern, or None), there are no names to check
        return
    layers = {layer for layer, _ in shapes}
    named = {str(name).rpartition(".")[2] for name in targets}
    lacking = sorted((layer, name) for layer in layers for name in named if (layer, name) not in shapes)
    if lacking:
        layer, name = lacking[0]
        message = f"lacks {len(lacking)} modules of target_modules ({name} of layer {layer})"
        raise ConfigError(Problem(where, message, "Copy the folder again"))
