"""P-PAS: a large budget for prompts under low pressure, a small one while several prompts compete with decodes."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.chunking.prompt_budget import PromptBudget
from vajra_policies.fixed_chunk import FixedChunkConfig
from vajra_py.contract import Layer, LocalReplicaView, PolicyContext, PolicySpec


class PPasConfig(FixedChunkConfig):
    """Parameters of `p_pas`; the defaults are those of the paper's experiments."""

    chunk_size: int = Field(
        16384,
        ge=1,
        description="Query tokens of one step, decodes included (B_max).",
        json_schema_extra={"unit": "tokens"},
    )
    capped_tokens: int = Field(
        2048,
        ge=1,
        description="Prompt tokens of a step under pressure (B_cap).",
        json_schema_extra={"unit": "tokens"},
    )
    pressure_prefills: int = Field(
        2,
        ge=1,
        description=(
            "Number of prompts in progress and waiting from which there is pressure while other requests decode (N_th)."
        ),
    )


class PPas(PromptBudget):
    """Limits a step to B_cap prompt tokens while a request decodes and at least N_th prompts wait or are in progress,
    else to B_max.

    A single prompt is computed in large, efficient chunks. Several prompts would delay the decodes by several large
    steps, so they are computed in smaller chunks.

    Left out: vLLM's scheduler around the rule; everything else is as in `fixed_chunk`.

    Source: Sämann, "P-PAS: Prefill-Pressure Adaptive Scheduling for Long-Context LLM Serving" (arXiv:2608.15171); its patch of vLLM
    0.22.1.
    """

    def __init__(self, config: PPasConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._capped_tokens = config.capped_tokens
        self._pressure_prefills = config.pressure_prefills

    def _budget(self, replica: LocalReplicaView, now: float) -> int:
        num_prefills = replica.num_partial_prefills + replica.num_waiting
        is_pressed = num_prefills >= self._pressure_prefills and replica.num_decodes > 0
        return self._capped_tokens if is_pressed else self._chunk_size


SPEC = PolicySpec(
    name="p_pas",
    layer=Layer.REPLICA_SCHEDULER,
    config=PPasConfig,
    build=PPas,
    summary="Large chunks, except while several prompts compete with decodes.",
    source="P-PAS (arXiv:2608.15171)",
    advice=(
        "Use it for long prompts with short outputs under changing load. Not with a small B_max, where it changes "
        "nothing."
    ),
)
