"""Methods of vLLM's schedulers for features that are refused: nothing is there, and nothing is done."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput


class WithoutExtras(SchedulerInterface):  # type: ignore[misc]  # vLLM is there at run time alone
    """A scheduler without encoder and its connectors, whose drafts are known before a step is formed."""

    ec_connector = None

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: SchedulerOutput) -> None:
        """Drafts with asynchronous scheduling are refused."""
