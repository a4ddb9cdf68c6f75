"""Load a model from a directory onto a device, ready for paged attention.

Invariants:
    - Process-wide state that loading changes (torch's default dtype and generator, transformers' verbosity) is changed
      by one load at a time, and never while a step of another model computes.
    - Errors detectable from file headers, the config or the device's free memory are raised before weights are read.
    - A model's own code is never run; random weights depend on the config and the seed alone.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from vajra_py.engine.compute.interface import RunnerOptions
from vajra_py.engine.compute.model.attention import PLAIN, register
from vajra_py.engine.compute.model.exclusion import LOADING
from vajra_py.engine.compute.model.inspect import ModelFiles, free_host_bytes, inspect_model, readable_bytes
from vajra_py.errors import ConfigError, Problem, did_you_mean

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, in evaluation mode, with paged attention registered.

    Attributes:
        model: transformers' module.
        config: text configuration of the model.
        where: model directory, for messages.
        device: device of the weights.
        dtype: dtype of weights and computation.
        max_model_len: length of the longest sequence in tokens.
    """

    model: torch.nn.Module
    config: Any
    where: str
    device: torch.device
    dtype: torch.dtype
    max_model_len: int


def load_model(options: RunnerOptions, *, on_host: bool = False) -> LoadedModel:
    """Load the model that `options` names. Steps of other models in this process wait meanwhile.

    `on_host`: load it into host memory, with the dtype that is chosen for `options.device`.

    Raises:
        ConfigError: the model cannot be loaded; one line per problem.
    """
    with LOADING.exclusively():
        return _load_model(options, on_host)


def _load_model(options: RunnerOptions, on_host: bool) -> LoadedModel:
    files = inspect_model(options.model, options.random_weights)
    device = find_device(options.device)
    config = _read_config(files)
    dtype = _choose_dtype(options.dtype, config, device)
    if on_host:
        device = torch.device("cpu")
    max_model_len = _choose_length(options.max_model_len, config, str(files.directory))
    num_parameters = files.num_elements or _count_parameters(config, str(files.directory))
    ranks = options.tensor_parallel_size
    _check_memory(num_parameters * dtype.itemsize // ranks, device, f"model {files.directory}")
    register()
    model = _build(files, config, dtype, device, options.seed)
    model.eval().requires_grad_(False)
    return LoadedModel(model, config, str(files.directory), device, dtype, max_model_len)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings; the problems that matter are checked and raised elsewhere."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def find_device(name: str) -> torch.device:
    """Return the device with this name.

    Raises:
        ConfigError: this machine has no such device.
    """
    kind, _, index = name.partition(":")
    allowed = "Allowed: cpu, cuda, cuda:N"
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not re.fullmatch("[0-9]{1,4}", index))):
        raise ConfigError(Problem("device", f"not a device ({name!r})", allowed))
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise ConfigError(
                Problem("device", f"this machine has no such device ({name!r})", f"torch sees {count} GPUs")
            )
        return torch.device("cuda", int(index or 0))
    return torch.device("cpu")


def _read_config(files: ModelFiles) -> Any:
    where = str(files.directory / "config.json")
    if files.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = did_you_mean(files.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).partition("Allowed:")[0]
        raise ConfigError(
            Problem(
                where,
                f"no causal language model of transformers {transformers.__version__} ({files.model_type!r})",
                f"{known}docs/reference/models.md lists the types that pass; a model's own code is never run",
            )
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(files.directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ConfigError(Problem(where, f"transformers cannot read this configuration ({error})")) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(Problem(where, f"an encoder-decoder ({files.model_type})", "Decoder-only models can be run"))
    if not hasattr(config, "vocab_size"):
        raise ConfigError(
            Problem(
                where, f"a model of several kinds of input ({files.model_type})", "Give the directory of a text model"
            )
        )
    config.use_cache = False
    return config


def _choose_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(Problem("dtype", f"not a type ({name!r})", f"Allowed: auto, {', '.join(DTYPES)}"))
        return DTYPES[name]
    stored: torch.dtype | None = getattr(config, "dtype", None)
    if device.type == "cpu" or stored is None or stored not in DTYPES.values():
        return torch.float32
    return stored


def _choose_length(asked: int | None, config: Any, where: str) -> int:
    """Return the length of the longest sequence: the requested one, or by default the model's own limit.

    Raises `ConfigError` if the requested length exceeds the model's limit.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    kinds = _rope_kinds(getattr(config, "rope_parameters", None))
    if kinds & {"dynamic", "longrope"}:
        # These models rescale all positions of a batch once its longest sequence exceeds the original length, so a
        # ragged batch is exact only if no sequence exceeds that length.
        original = getattr(config, "original_max_position_embeddings", None)
        longest = min(longest, int(original or longest))
    if asked is not None and not 1 <= asked <= longest:
        raise ConfigError(Problem("max_model_len", f"out of range for {where} ({asked})", f"Allowed: 1 to {longest}"))
    return asked or longest


def _rope_kinds(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in (parameters, *nested)}


def _count_parameters(config: Any, where: str) -> int:
    try:
        with torch.device("meta"), quiet():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(Problem(where, f"transformers cannot make this model ({error})")) from error
    return sum(parameter.numel() for parameter in model.parameters())


def _check_memory(num_bytes: int, device: torch.device, where: str) -> None:
    free = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if num_bytes > free:
        raise ConfigError(
            Problem(
                where,
                f"its weights ({readable_bytes(num_bytes)}) are larger than the free memory of {device} "
                f"({readable_bytes(free)})",
                "Use a smaller type, more ranks or a smaller model",
            )
        )


def _build(files: ModelFiles, config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> torch.nn.Module:
    where = str(files.directory)
    try:
        if not files.weight_files:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device, quiet():
                torch.manual_seed(seed)
                made: torch.nn.Module = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=PLAIN, trust_remote_code=False
                )
            return made
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                files.directory,
                config=config,
                dtype=dtype,
                attn_implementation=PLAIN,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(Problem(where, f"the weights do not fit on {device} ({error})")) from error
    except Exception as error:
        reason = f"transformers cannot load this model ({error})"
        if isinstance(error, KeyError) and error.args == (PLAIN,):
            reason = "its attention does not go through transformers' attention interface"
        raise ConfigError(Problem(where, reason)) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            Problem(
                where, f"the weight files lack {len(missing)} tensors ({', '.join(missing[:3])}, …)", "Copy them again"
            )
        )
    loaded: torch.nn.Module = model.to(device)
    return loaded
