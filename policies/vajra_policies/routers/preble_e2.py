"""Preble's E2: exploit a cached prefix where it is longer than the rest of the prompt, else explore by cost.

Left out: the cost of evicting prefixes, which is off in Preble's code by default.

Source: Preble (arXiv:2407.00023), section 4; code WukLab/preble.
"""

from __future__ import annotations

from pydantic import Field

from vajra_py.contract import Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicasetScheduler


class E2Config(PolicyConfig):
    """Parameters of `preble_e2`."""

    window_s: float = Field(
        180.0, gt=0, description="Length of the window whose requests are a replica's load, seconds."
    )
    default_output_tokens: float = Field(45.0, ge=0, description="Output length where nothing is predicted, tokens.")
    imbalance_ratio: float = Field(
        1.5, ge=1, description="Load of the heaviest replica over that of the lightest from which prefixes are moved."
    )
    min_requests_per_replica: int = Field(50, ge=0, description="Requests in the window before prefixes are moved.")


def _build(config: E2Config, context: PolicyContext) -> ReplicasetScheduler:
    from vajra_policies.routers.preble import E2

    return E2(config, context)


SPEC = PolicySpec(
    name="preble_e2",
    layer=Layer.REPLICASET_SCHEDULER,
    config=E2Config,
    build=_build,
    summary="Exploits a prefix that is longer than the rest of the prompt, else explores by the work sent of late.",
    source="Preble E2 (arXiv:2407.00023)",
    advice=(
        "Use it where long prefixes are shared by some requests and loads are uneven. Not for prompts without "
        "common prefixes."
    ),
)
