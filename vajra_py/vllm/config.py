"""Settings under `backend: {vllm: …}`: what policies that schedule a vLLM may ask for predictions.

Importing this loads neither vLLM nor a tensor library.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from vajra_py.config import register_backend
from vajra_py.config.schema import Text
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
    """A vLLM that is started by its own commands and schedules by this file (`--scheduler-cls`). `vajra run` starts none."""

    fallback: Text | None = Field(
        None,
        description="Preset whose policies take over from one that breaks the contract, so that its requests finish; "
        "null: they end with an error.",
    )

    @model_validator(mode="after")
    def _vllms(self) -> VllmBackendConfig:
        for name in _ENGINES_OWN:
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{name}: is a setting of the built-in engine alone")
        return self


register_backend("vllm", VllmBackendConfig)
