"""DynaServe: cuts that leave two replicas with the same work, and requests that are computed in two places."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.policies.routing_views import context, replicas
from vajra_policies.routers.dynaserve import Cuts, Dynaserve, DynaserveConfig
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec

WEIGHT, LEAST = 8.0, 64


class Job:
    """What the router reads of a request."""

    def __init__(self, index: int, num_prompt_tokens: int) -> None:
        self.request_id = f"r{index}"
        self.num_prompt_tokens = self.num_known_tokens = num_prompt_tokens
        self.num_computed_tokens = self.num_output_tokens = 0
        self.max_tokens = 1000


sizes = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 400)), min_size=1, max_size=20)


@given(sizes)
def test_after_each_placement_loads_differ_by_a_token_or_the_request_is_whole_for_a_reason(
    jobs: list[tuple[int, int]],
) -> None:
    lengths = OracleLengths({f"r{index}": output for index, (_, output) in enumerate(jobs)})
    policy = Dynaserve(DynaserveConfig(min_part_tokens=LEAST), context(2, output_lengths=lengths))
    views = replicas(num_running=[0, 0])
    for index, (prompt, output) in enumerate(jobs):
        before = policy.loads(views)
        gap = abs(before[0] - before[1])
        work = prompt + WEIGHT * output
        assert policy.assign(Job(index, prompt), views, 0.0) == min(before, key=lambda one: (before[one], one))  # type: ignore[arg-type]
        after = policy.loads(views)
        assert sum(after.values()) == sum(before.values()) + work
        part = (work + gap) / 2
        is_cut = LEAST <= part <= work - LEAST
        assert abs(after[0] - after[1]) <= (WEIGHT if is_cut else abs(work - gap))


def test_the_first_part_is_computed_here_and_the_rest_there() -> None:
    specs = [RequestSpec("a", 0.0, 1000, 100)]
    options = HarnessOptions(num_replicas=2, num_blocks=200, output_lengths=OracleLengths({"a": 100}))
    harness = Harness("fcfs", "dynaserve", ("micro_requests", {"chunk_size": 300}), options)
    harness.run(specs)
    tokens = [0, 0]
    for step in harness.steps:
        tokens[step.replica_id] += step.num_tokens
    assert tokens == [900, 100 + 99], "(1000 + 8 * 100) / 2 tokens of the prompt, then the rest and the decodes"
    assert not harness.context.shared.get(Cuts).of


@given(st.integers(1, 900), st.integers(2, 60))
def test_a_cut_anywhere_loses_no_token(prompt: int, output: int) -> None:
    specs = [RequestSpec(f"r{index}", 0.02 * index, prompt, output) for index in range(3)]
    lengths = OracleLengths({spec.request_id: output for spec in specs})
    options = HarnessOptions(num_replicas=2, num_blocks=400, output_lengths=lengths)
    harness = Harness("fcfs", ("dynaserve", {"min_part_tokens": 1}), ("micro_requests", {"chunk_size": 256}), options)
    harness.run(specs)
    done: Any = [harness.request(spec.request_id).num_output_tokens for spec in specs]
    assert done == [output] * 3


def test_a_hand_off_that_waits_for_a_full_target_is_asked_for_again_and_the_rest_is_there_once_moved() -> None:
    policy = Dynaserve(DynaserveConfig(), context(2, output_lengths=OracleLengths({"r0": 500})))
    views, job = replicas(num_running=[0, 0]), Job(0, 4000)
    request: Any = job
    assert policy.assign(request, views, 0.0) == 0
    job.num_computed_tokens = 4000
    assert [policy.place_after_prompt(request, views, now) for now in (0.0, 1.0)] == [1, 1]
    policy.on_moved(request, 0, 1, 2.0)
    assert policy.place_after_prompt(request, views, 3.0) is None
    assert policy.loads(views) == {0: 0.0, 1: WEIGHT * 500}
