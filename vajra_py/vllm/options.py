"""Options of a runner on vLLM's workers.

Importing this loads neither vLLM nor a tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vajra_py.engine.compute import RunnerOptions


@dataclass(frozen=True, slots=True)
class VllmOptions(RunnerOptions):
    """Options of a runner on vLLM's workers, in addition to those of every runner.

    Attributes:
        max_batch_size: maximum number of requests in a step.
        memory_fraction: fraction of a device's memory for weights and KV blocks.
        shards: number of devices for tensor parallelism; if there are several, each has its own process of vLLM.
        engine_args: further arguments of vLLM's engine.
    """

    max_batch_size: int = 128
    memory_fraction: float = 0.9
    shards: int = 1
    engine_args: Mapping[str, Any] = field(default_factory=dict)
