"""BlendServe: memory for both ends of the line, and its order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policies.routing_views import context
from vajra_policies.slo.blendserve import Blendserve, BlendserveConfig, left_share
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.testing.harness import Harness, HarnessOptions


def test_the_ends_have_the_memory_of_the_example_in_the_paper() -> None:
    share = left_share(1.27, 3.73, 0.096)
    assert 60 * share == pytest.approx(19.3, abs=0.1)
    assert 60 * (1 - share) == pytest.approx(40.7, abs=0.1)
    assert share * 3.73 + (1 - share) * 0.096 == pytest.approx(1.27), "together they have the density of all"
    assert left_share(1.0, 1.0, 1.0) == 1.0


class Job:
    """What the order reads of a request."""

    num_output_tokens = 0
    max_tokens = 1000

    def __init__(self, index: int, num_prompt_tokens: int, hashes: tuple[Any, ...] = ()) -> None:
        self.request_id, self.index = f"r{index}", index
        self.num_prompt_tokens, self._hashes = num_prompt_tokens, hashes

    def block_hashes(self) -> tuple[Any, ...]:
        return self._hashes


def test_requests_with_a_common_prefix_stay_together_and_count_it_once() -> None:
    outputs = {"r0": 10, "r1": 400, "r2": 10, "r3": 10}
    policy = Blendserve(BlendserveConfig(), context(1, output_lengths=OracleLengths(outputs)))
    shared = tuple(range(20))
    jobs: list[Any] = [Job(0, 320, shared), Job(1, 100), Job(2, 320, shared), Job(3, 300)]
    line, rho_root = policy.by_density(jobs)
    assert [one.index for _, one in line] == [3, 0, 2, 1]
    family = (320 + 2 * 10) / 1e4 / (2 * 10 * (320 + 5) / 5e6)
    assert line[1][0] == line[2][0] == pytest.approx(family)
    assert line[-1][0] < rho_root < line[0][0]


def test_both_ends_are_admitted_together() -> None:
    sizes = {"read": (20, 200), "compute": (600, 2)}
    requests = [(f"{kind}{index}", *sizes[kind]) for kind in sizes for index in range(6)]
    lengths = OracleLengths({name: output for name, _, output in requests})
    options = HarnessOptions(num_blocks=100, max_batch_size=16, output_lengths=lengths)
    harness = Harness("fcfs", "round_robin", ("blendserve", {"chunk_size": 1000}), options)
    for name, prompt, output in requests:
        harness.submit(name, prompt, output)
    first = harness.step()
    assert first is not None
    assert {name.rstrip("0123456789") for name in first.tokens} == {"read", "compute"}
    harness.steps_until_idle()


def test_the_last_token_of_a_step_is_used() -> None:
    harness = Harness("fcfs", "round_robin", ("blendserve", {"chunk_size": 101}), HarnessOptions())
    for name in ("first", "second"):
        harness.submit(name, 100, 10)
    done = harness.step()
    assert done is not None
    assert sorted(done.tokens.values()) == [1, 100]
