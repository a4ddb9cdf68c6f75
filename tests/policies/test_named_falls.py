"""Do policies that name falls decide as if all keys were read at each step?"""

from __future__ import annotations

import random
from typing import Any

import pytest

from vajra_py.contract import KeyMotion, Layer, PolicyContext
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.plugins import load_registry
from vajra_py.plugins.shapes import LISTENING_METHODS
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec

POLICIES: dict[str, dict[str, Any]] = {
    "ltr": {"starvation_s": 0.4, "boost_steps": 4},
    "skip_join_mlfq": {"quantum_s": 0.02, "starvation_s": 0.3, "promotion_steps": 9},
    "jitserve": {"refresh_steps": 7},
    "qoserve": {"first_throughput": 1500.0, "decay": 0.6},
}


class ReadAtEachStep:
    """The same keys, declared to change with anything."""

    key_motion = KeyMotion.ARBITRARY

    def __init__(self, policy: Any) -> None:
        self.key = policy.key
        for name in LISTENING_METHODS:
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))


def workload(seed: int) -> list[RequestSpec]:
    stream = random.Random(seed)
    specs, at = [], 0.0
    for index in range(70):
        at += stream.expovariate(25.0)
        promises: dict[str, float] = {"ttft_slo_s": stream.choice([0.1, 0.4, 1.5])} if stream.random() < 0.8 else {}
        specs.append(RequestSpec(f"r{index}", at, stream.randint(5, 150), stream.randint(1, 30), **promises))
    return specs


def decisions(name: str, batcher: str, seed: int, *, reads_all: bool) -> list[Any]:
    """Tokens of each request in each step."""
    offer = load_registry().policy(Layer.REQUEST_PRIORITIZER, name).spec

    def build(context: PolicyContext) -> Any:
        policy: Any = offer.build(offer.config(**POLICIES[name]), context)
        assert policy.key_motion is KeyMotion.NAMED_FALLS
        if not reads_all:
            return policy
        return ReadAtEachStep(policy)

    specs = workload(seed)
    lengths = OracleLengths({one.request_id: one.num_output_tokens for one in specs})
    options = HarnessOptions(
        latency=AffineModel(0.01, 0.0003), max_batch_size=5, num_blocks=40, output_lengths=lengths, max_model_len=300
    )
    one = Harness(build, "round_robin", batcher, options)
    return [(step.tokens, step.preempted) for step in one.run(specs)]


@pytest.mark.parametrize("batcher", ["preemptive", "fixed_chunk"])
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_those_of_keys_that_are_read_at_each_step(name: str, batcher: str) -> None:
    for seed in range(3):
        named = decisions(name, batcher, seed, reads_all=False)
        assert named == decisions(name, batcher, seed, reads_all=True)
        assert any(preempted for _, preempted in named) or batcher == "fixed_chunk"
