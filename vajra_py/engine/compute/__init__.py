"""Compute one step's batch on a device: weights, paged KV tensors, attention, sampling.

Importing this package, or its `interface` and `inspect`, loads no tensor library; `load_runner` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from vajra_py.engine.compute.interface import (
    Ahead,
    Chunk,
    DoneStep,
    ForeseeingRunner,
    Foreseen,
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
    "Ahead",
    "Chunk",
    "DoneStep",
    "ForeseeingRunner",
    "Foreseen",
    "LoadRunner",
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
"""Makes a runner; a function of a module, so that another process can import it."""


def load_runner(options: RunnerOptions) -> ModelRunner:
    """A model on a device, weights loaded and checked, KV memory not yet allocated.

    Raises:
        ConfigError: the model directory is missing or broken, the architecture does not keep to the attention interface,
            the model does not fit, or the device is absent; one problem a line.
    """
    # Before tensor libraries, whose import takes seconds.
    inspect_model(options.model, options.random_weights)
    from vajra_py.engine.compute.step.runner import TorchRunner

    return TorchRunner.load(options)
