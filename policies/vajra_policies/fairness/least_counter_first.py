"""Least counter first: the virtual token counter without its lift, as a control.

Left out: nothing.

Source: LCF, a baseline of VTC (Sheng et al., OSDI'24).
"""

from __future__ import annotations

from vajra_policies.fairness.accounts import TokenCostConfig
from vajra_policies.fairness.vtc import Vtc
from vajra_py.contract import Layer, PolicyContext, PolicySpec


class LeastCounterFirstConfig(TokenCostConfig):
    """Parameters of `least_counter_first`, which are those of `vtc`."""


def _build(config: LeastCounterFirstConfig, context: PolicyContext) -> Vtc:
    """Build the policy. A tenant that returns is served alone until its counter has caught up with the others; VTC's
    lift prevents this.
    """
    return Vtc(config, lifts=False)


SPEC = PolicySpec(
    name="least_counter_first",
    layer=Layer.REQUEST_PRIORITIZER,
    config=LeastCounterFirstConfig,
    build=_build,
    summary=(
        "The tenant that has received the least service since the start goes first, even after a pause (a control for "
        "`vtc`)."
    ),
    source="LCF, baseline of VTC (Sheng et al., OSDI'24)",
    advice=(
        "Use it as a control that shows the effect of the lift of `vtc`. Not in production: a tenant that returns "
        "after a pause blocks all others."
    ),
)
