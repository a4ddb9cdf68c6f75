"""Empty implementations of the scheduler methods that vLLM calls for unsupported features."""

from __future__ import annotations

from vllm.v1.core.sched.interface import SchedulerInterface


class WithoutExtras(SchedulerInterface):  # type: ignore[misc]  # vLLM is not installed for type checking
    """Base class of a scheduler that supports neither multimodal encoders nor connectors for them."""

    ec_connector = None

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no encoder."""
