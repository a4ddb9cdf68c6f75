"""Prepare a loaded model for its first step: probe its layers, choose a forward pass, check it.

Invariants:
    - With the self-check (the default), every forward pass is compared with transformers' own, on the same weights,
      before use.
    - Without the self-check, transformers' modules (if they are used) run with the attention that reads windows from
      the mask.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, replace
from typing import Any

import torch

from vajra_py.engine.compute.interface import ModelFacts, RunnerOptions
from vajra_py.engine.compute.model.attention import MASKED, LayerFacts
from vajra_py.engine.compute.model.exclusion import LOADING
from vajra_py.engine.compute.model.forward import Forward, TransformersForward, probe_layers, unsupported
from vajra_py.engine.compute.model.fused import ADAPTED_TYPES, KNOWN_TYPES, FusedForward
from vajra_py.engine.compute.model.loading import LoadedModel, find_device, load_model
from vajra_py.engine.compute.model.lora import AdapterSlots
from vajra_py.engine.compute.model.ranks import Ranks
from vajra_py.engine.compute.model.selfcheck import SelfCheck
from vajra_py.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that can run steps: its forward pass, the attention parameters of this rank's layers, and model facts."""

    forward: Forward
    layers: list[LayerFacts]
    facts: ModelFacts
    config: Any
    device: torch.device
    dtype: torch.dtype
    adapters: AdapterSlots | None = None


def prepare(options: RunnerOptions, ranks: Ranks) -> PreparedModel:
    """Load and check a model.

    Raises:
        ConfigError: as for `load_runner`.
    """
    device = find_device(options.device)
    # A model that is divided among ranks is loaded on the host: each rank then moves only its own part to its device,
    # whose memory may be too small for the whole model.
    loaded = load_model(options, on_host=ranks.divides_layers)
    with LOADING.shared():
        prepared = _prepared(loaded, options, ranks, device)
    # If the fused forward pass turns out to be unusable after the weights were moved out of the model, the model is
    # loaded again, without that pass.
    return prepared or prepare(replace(options, fused=False), ranks)


def _prepared(loaded: LoadedModel, options: RunnerOptions, ranks: Ranks, device: torch.device) -> PreparedModel | None:
    """Return the model with its forward pass; None if it must be loaded again, without the fused forward pass."""
    where = f"model {loaded.where}"
    layers = probe_layers(loaded.model, where)
    counts = _count(loaded.model)
    if ranks.groups is not None:
        _check_windows(loaded, layers, ranks.groups.group_tokens, where)
    fuses = options.fused and loaded.config.model_type in KNOWN_TYPES
    adapters = _adapters(loaded, options, ranks, where) if options.adapters else None
    if ranks.divides_layers:
        _check_divisible(loaded, layers, ranks, options.fused, where)
    elif options.self_check and not fuses:
        layers = _check_modules(loaded, layers, where)
    local = ranks.own_layers(layers)
    forward: Forward | None = None
    if fuses:
        forward, difference = _fuse(loaded, layers, ranks, options.self_check, device, adapters)
        if adapters is not None and forward is None:
            raise unsupported(where, loaded.model, f"adapters need the fused forward pass, and {difference}")
        if forward is None and ranks.divides_layers:
            raise unsupported(where, loaded.model, f"its division among {options.num_ranks} ranks failed: {difference}")
        if forward is None:
            _log.warning("%s: runs on transformers' modules, since %s", where, difference)
            return None
    if forward is None:
        if not options.self_check:
            # Without the fused forward pass no rank divides the model, so this rank's layers are all layers.
            layers = local = _masked(loaded.model, where)
        forward = TransformersForward(loaded.model)
    facts = _facts(loaded, forward.name, local, options, counts)
    if adapters is not None:
        adapters.check_all_used(where)
    return PreparedModel(forward, local, facts, loaded.config, device, loaded.dtype, adapters)


def _adapters(loaded: LoadedModel, options: RunnerOptions, ranks: Ranks, where: str) -> AdapterSlots:
    """Read the adapters. Raises `ConfigError` if the engine cannot compute them."""
    if not options.fused or loaded.config.model_type not in ADAPTED_TYPES:
        known = ", ".join(sorted(ADAPTED_TYPES))
        raise unsupported(where, loaded.model, f"adapters need the fused forward pass of one of these types: {known}")
    if options.device != "cpu":
        raise unsupported(where, loaded.model, f"adapters are computed on a CPU alone (got {options.device})")
    if not ranks.is_alone:
        raise unsupported(where, loaded.model, "adapters are computed by a single rank")
    return AdapterSlots(options)


def _check_divisible(loaded: LoadedModel, layers: list[LayerFacts], ranks: Ranks, fused: bool, where: str) -> None:
    if loaded.config.model_type not in KNOWN_TYPES:
        known = ", ".join(sorted(KNOWN_TYPES))
        reason = f"tensor parallelism and pipeline stages divide these types alone: {known}"
        raise unsupported(where, loaded.model, reason)
    if not fused:
        raise unsupported(where, loaded.model, "only the fused forward pass can be divided (fused: false)")
    inner = getattr(loaded.config, "moe_intermediate_size", None) or loaded.config.intermediate_size
    problem = ranks.shard.problem(layers, int(inner))
    if len(layers) < ranks.stage.count:
        problem = f"{len(layers)} layers cannot be divided among {ranks.stage.count} pipeline stages"
    if problem is not None:
        raise unsupported(where, loaded.model, problem)


def _check_windows(loaded: LoadedModel, layers: list[LayerFacts], group_tokens: int, where: str) -> None:
    """Raise `ConfigError` if a layer has a window and requests may be spread over KV-parallel groups.

    The window could begin inside an earlier group's part, but kernels attend over the whole part.
    """
    for layer in layers:
        if layer.window is not None and group_tokens < loaded.max_model_len and layer.window < loaded.max_model_len:
            reason = (
                f"KV-parallel groups spread requests, and layer {layer.layer_index} sees {layer.window} tokens only"
            )
            raise unsupported(where, loaded.model, reason)


def _check_modules(loaded: LoadedModel, layers: list[LayerFacts], where: str) -> list[LayerFacts]:
    """Check transformers' modules with paged attention, and return the layers' facts under the attention that passed.

    If the check fails, the attention that reads windows from the mask is tried. Raises `ConfigError` if both fail.
    """
    model: Any = loaded.model
    check = SelfCheck(loaded, layers)
    difference = check.difference(TransformersForward(model), check.layers, loaded.device)
    if difference is None:
        return layers
    model.set_attn_implementation(MASKED)
    try:
        layers = probe_layers(model, where)
        check = SelfCheck(loaded, layers)
        passes = check.difference(TransformersForward(model), check.layers, loaded.device) is None
    except ConfigError:  # not reported: the difference of the first check is more informative
        passes = False
    if not passes:
        raise unsupported(where, model, difference)
    return layers


def _masked(model: Any, where: str) -> list[LayerFacts]:
    """Select the attention that reads windows from the mask, and return the layers' facts.

    Some models specify their window in the mask only.
    """
    model.set_attn_implementation(MASKED)
    return probe_layers(model, where)


def _fuse(
    loaded: LoadedModel,
    layers: list[LayerFacts],
    ranks: Ranks,
    checks: bool,
    device: torch.device,
    adapters: AdapterSlots | None = None,
) -> tuple[Forward | None, str | None]:
    """Return (fused forward pass, None), or (None, description of why it cannot be used)."""
    check = SelfCheck(loaded, layers) if checks else None
    local = ranks.own_layers(layers)
    try:
        with torch.inference_mode():
            forward = FusedForward(loaded.model, local, ranks.shard, device, ranks.stage, adapters)
    except (AttributeError, ValueError, RuntimeError, AssertionError) as error:
        return None, f"its modules are not what {loaded.config.model_type} has ({error})"
    if check is not None:
        narrow = ranks.own_layers(check.layers)
        forward.set_layers(narrow)
        difference = check.difference(forward, narrow, device)
        forward.set_layers(local)
        if difference is not None:
            return None, difference
    return forward, None


def _count(model: torch.nn.Module) -> tuple[int, int]:
    """Return (number of parameters, bytes that they take)."""
    parameters = list(model.parameters())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return sum(parameter.numel() for parameter in parameters), num_bytes


def _facts(
    loaded: LoadedModel, forward: str, layers: list[LayerFacts], options: RunnerOptions, counts: tuple[int, int]
) -> ModelFacts:
    first = layers[0]
    kv_elements = sum(layer.kv_elements for layer in layers)
    device = find_device(options.device)
    return ModelFacts(
        model_type=str(loaded.config.model_type),
        num_parameters=counts[0],
        weight_bytes=counts[1] // (options.tensor_parallel_size * options.pipeline_stages),
        num_layers=len(layers),
        num_query_heads=first.num_query_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_dim,
        kv_bytes_per_token=kv_elements * loaded.dtype.itemsize,
        block_size=options.block_size,
        max_model_len=loaded.max_model_len,
        vocab_size=int(loaded.config.vocab_size),
        eos_token_ids=_eos_tokens(loaded),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        forward=forward,
        device_ids=(_device_id(device),),
    )


def _device_id(device: torch.device) -> str:
    """Return a name that no other device has, also on other machines."""
    if device.type == "cpu":
        return f"cpu of {platform.node()}"
    return str(torch.cuda.get_device_properties(device).uuid)


def _eos_tokens(loaded: LoadedModel) -> tuple[int, ...]:
    generation: Any = getattr(loaded.model, "generation_config", None)
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = getattr(loaded.config, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
