"""Settings under `backend: {vllm: …}`: a vLLM that computes what this project's policies decide.

Importing this loads neither vLLM nor a tensor library.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from vajra_py.config import register_backend
from vajra_py.engine.config import EngineConfig

_ENGINES_OWN = (
    "workers",
    "self_check",
    "fused",
    "cuda_graphs",
    "look_ahead",
    "num_threads",
    "replicasets",
    "weights_seed",
)


class VllmBackendConfig(EngineConfig):
    """Compute steps with a vLLM of this process. Its options are the engine's where both have them."""

    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's engine, by vLLM's names (`enforce_eager: true`).",
    )

    @model_validator(mode="after")
    def _vllms(self) -> VllmBackendConfig:
        for name in _ENGINES_OWN:
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{name}: is a setting of the built-in engine alone; vLLM's go under `options`")
        return self


register_backend("vllm", VllmBackendConfig)
