"""Do policies whose keys move with prefix hits decide as if all keys were read at each step?"""

from __future__ import annotations

import random
from typing import Any

import pytest

from vajra_py.contract import KeyMotion, Layer, PolicyContext, RequestView
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.plugins import load_registry
from vajra_py.plugins.shapes import LISTENING_METHODS
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import PromptContent, RequestSpec

POLICIES: dict[str, dict[str, Any]] = {
    "residual_sjf": {"max_wait_s": 0.4},
    "preflow": {"doubling_s": 0.3},
    "lpm": {"fcfs_above": 12},
    "dlpm": {"quantum": 60.0, "tenant_weights": {"t1": 3.0}},
}
WORLDS: dict[str, dict[str, Any]] = {
    "little memory": {"num_blocks": 40},
    "swap": {"num_blocks": 40, "host_blocks": 30},
    "two replicas": {"num_replicas": 2, "num_blocks": 50},
    "pipeline": {"pipeline_stages": 2},
}


class ReadAtEachStep:
    """The same keys, declared to change with anything."""

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


def workload(seed: int) -> list[RequestSpec]:
    stream = random.Random(seed)
    specs, at = [], 0.0
    for index in range(60):
        at += stream.expovariate(40.0)
        tenant = stream.randrange(4)
        segments = [(f"system {tenant % 2}", stream.choice([16, 48, 80])), (f"own {index}", stream.randint(1, 60))]
        if stream.random() < 0.7:
            segments.insert(1, (f"document {tenant} {stream.randrange(3)}", stream.choice([20, 64, 120])))
        num_tokens = sum(length for _, length in segments)
        content = PromptContent(tuple(segments))
        specs.append(
            RequestSpec(f"r{index}", at, num_tokens, stream.randint(1, 30), tenant=f"t{tenant}", content=content)
        )
    return specs


def decisions(name: str, batcher: str, world: str, *, reads_all: bool) -> list[Any]:
    offer = load_registry().policy(Layer.REQUEST_PRIORITIZER, name).spec

    def build(context: PolicyContext) -> Any:
        policy: Any = offer.build(offer.config(**POLICIES[name]), context)
        assert policy.key_motion is KeyMotion.PREFIX_HITS
        return ReadAtEachStep(policy) if reads_all else policy

    specs = workload(len(world))
    options: dict[str, Any] = {"num_blocks": 64, "max_batch_size": 5, "max_model_len": 600} | WORLDS[world]
    lengths = OracleLengths({one.request_id: one.num_output_tokens for one in specs})
    sizes = HarnessOptions(
        latency=AffineModel(0.01, 0.0003), output_lengths=lengths, prefix_cache=PrefixCacheOptions(), **options
    )
    one = Harness(build, "round_robin", batcher, sizes)
    return [(step.tokens, step.admitted, step.preempted) for step in one.run(specs)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("batcher", ["preemptive", "fixed_chunk"])
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_those_of_keys_that_are_read_at_each_step(name: str, batcher: str, world: str) -> None:
    assert decisions(name, batcher, world, reads_all=False) == decisions(name, batcher, world, reads_all=True)
