"""Compute one step's batch on a device: weights, paged KV tensors, attention, sampling.

Importing this package, or its modules `interface` and `model.inspect`, loads no tensor library; `load_runner` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from vajra_py.engine.compute.interface import (
    AdapterRunner,
    AdapterSource,
    Chunk,
    DoneStep,
    KvRunner,
    LoadAdapter,
    LookaheadDecodes,
    LookaheadRunner,
    LookaheadStep,
    ModelFacts,
    ModelRunner,
    NewRow,
    PendingStep,
    RunnerOptions,
    SamplingParams,
    StepInput,
    StepOutput,
    TableUpdate,
    TokenLogprobs,
)
from vajra_py.engine.compute.model.inspect import inspect_model

__all__ = [
    "AdapterRunner",
    "AdapterSource",
    "Chunk",
    "DoneStep",
    "KvRunner",
    "LoadAdapter",
    "LoadRunner",
    "LookaheadDecodes",
    "LookaheadRunner",
    "LookaheadStep",
    "ModelFacts",
    "ModelRunner",
    "NewRow",
    "PendingStep",
    "RunnerOptions",
    "SamplingParams",
    "StepInput",
    "StepOutput",
    "TableUpdate",
    "TokenLogprobs",
    "inspect_model",
    "load_runner",
]

LoadRunner: TypeAlias = Callable[[RunnerOptions], ModelRunner]
"""Factory of a runner; a module-level function, so that another process can import it."""


def load_runner(options: RunnerOptions) -> ModelRunner:
    """Load a model onto a device and check it; KV memory is not allocated yet.

    Raises:
        ConfigError: the model directory is missing or broken, the architecture does not use transformers' attention
            interface, the model does not fit, or the device is absent. The error states one problem per line.
    """
    # Importing tensor libraries takes seconds. The model is checked before that, so its errors are reported at once.
    inspect_model(options.model, options.random_weights)
    from vajra_py.engine.compute.step.runner import TorchRunner

    return TorchRunner.load(options)
