"""Methods of vLLM's schedulers for features that are refused: nothing is there, and nothing is done."""

from __future__ import annotations

from vllm.v1.core.sched.interface import SchedulerInterface


class WithoutExtras(SchedulerInterface):  # type: ignore[misc]  # vLLM is there at run time alone
    """A scheduler without encoder and its connectors."""

    ec_connector = None

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no encoder."""
