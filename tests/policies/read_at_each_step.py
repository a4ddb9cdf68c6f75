"""Decisions under a prioritizer that declares how its keys move, and under the same keys read at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vajra_py.contract import KeyMotion, Layer, PolicyContext, RequestView
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.plugins import load_registry
from vajra_py.plugins.shapes import LISTENING_METHODS
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec


class ReadAtEachStep:
    """The keys of another policy, declared to change with anything."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.key_motion = KeyMotion.VOLATILE if hasattr(policy, "group") else KeyMotion.ARBITRARY
        for name in LISTENING_METHODS:
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))

    def key(self, request: RequestView, now: float) -> Any:
        """The policy's key, with that of the group before it."""
        key = self._policy.key(request, now)
        return (self._policy.group_key(request.tenant), key) if hasattr(self._policy, "group") else key


def decisions(
    name: str,
    params: Mapping[str, Any],
    motion: KeyMotion,
    batcher: str,
    specs: Sequence[RequestSpec],
    *,
    reads_all: bool,
    **options: Any,
) -> list[Any]:
    """Return tokens, admissions and preemptions of each step under a prioritizer, which has to declare that motion."""
    offer = load_registry().policy(Layer.REQUEST_PRIORITIZER, name).spec

    def build(context: PolicyContext) -> Any:
        policy: Any = offer.build(offer.config(**params), context)
        assert policy.key_motion is motion
        return ReadAtEachStep(policy) if reads_all else policy

    lengths = OracleLengths({one.request_id: one.num_output_tokens for one in specs})
    given = HarnessOptions(latency=AffineModel(0.01, 0.0003), max_batch_size=5, output_lengths=lengths, **options)
    one = Harness(build, "round_robin", batcher, given)
    return [(step.tokens, step.admitted, step.preempted) for step in one.run(specs)]
