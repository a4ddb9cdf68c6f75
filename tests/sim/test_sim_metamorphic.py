"""Changes to a workload whose effect is known exactly: stretched time, one replica, equal deadlines, equal priorities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from vajra_py.contract import Layer
from vajra_py.latency import AffineModel
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.plugins import build_policy
from vajra_py.runtime.queues import make_queue
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload import RequestSpec

OPTIONS = HarnessOptions(num_blocks=40, max_batch_size=6, check_conservation=False)


def workload(seed: int, count: int = 30, **facts: Any) -> list[RequestSpec]:
    """Arrivals on whole milliseconds, so that stretching them is exact; some of them together."""
    stream = np.random.default_rng(seed)
    times = np.sort(stream.integers(0, 800, count)) / 1000
    return [
        RequestSpec(f"r{index}", float(at), int(stream.integers(5, 300)), int(stream.integers(1, 40)), **facts)
        for index, at in enumerate(times)
    ]


def latency(factor: float = 1.0) -> AffineModel:
    return AffineModel(base_s=0.004 * factor, per_token_s=0.0002 * factor, per_decode_context_token_s=1e-6 * factor)


def story(specs: Sequence[RequestSpec], policies: Sequence[Any], options: HarnessOptions) -> list[tuple[Any, ...]]:
    """What every request lived through: times, replica, preemptions."""
    harness = Harness(*policies, options)
    harness.run(specs)
    lives = [harness.request(spec.request_id) for spec in specs]
    return [
        (one.admitted_at, one.ended_at, tuple(token_times(one)), one.replica_id, one.num_preemptions) for one in lives
    ]


@pytest.mark.parametrize("chooser", ["round_robin", "pull", "least_loaded"])
@pytest.mark.parametrize(
    ("prioritizer", "scheduler"),
    [
        (lambda factor: "fcfs", lambda factor: ("fixed_chunk", {"chunk_size": 96})),
        (
            lambda factor: ("edf", {"min_deadline_s": 0.125 * factor}),
            lambda factor: ("dynamic_chunk", {"target_batch_time_s": 0.03125 * factor}),
        ),
        (
            lambda factor: ("lrs", {"min_deadline_s": 0.125 * factor}),
            lambda factor: ("space_sharing", {"target_batch_time_s": 0.03125 * factor}),
        ),
    ],
)
def test_stretching_time_stretches_everything(prioritizer: Any, scheduler: Any, chooser: str) -> None:
    """Twice the gaps between arrivals, twice the step times: every moment of every request comes exactly twice as late."""
    stories = []
    for factor in (1.0, 2.0):
        options = replace(OPTIONS, num_replicas=2, latency=latency(factor))
        specs = [replace(spec, arrived_at=spec.arrived_at * factor) for spec in workload(1)]
        stories.append(story(specs, (prioritizer(factor), chooser, scheduler(factor)), options))
    for (admitted, ended, tokens, *rest), (admitted_2, ended_2, tokens_2, *rest_2) in zip(*stories, strict=True):
        assert (admitted_2, ended_2) == (2 * admitted, 2 * ended)
        assert tokens_2 == tuple(2 * at for at in tokens)
        assert rest_2 == rest


def test_starting_later_shifts_everything() -> None:
    stories = []
    for delay in (0.0, 64.0):
        specs = [replace(spec, arrived_at=spec.arrived_at + delay) for spec in workload(2)]
        policies = ("fcfs", "pull", ("fixed_chunk", {"chunk_size": 96}))
        stories.append(story(specs, policies, replace(OPTIONS, num_replicas=2, latency=latency())))
    for (_, ended, tokens, *rest), (_, ended_2, tokens_2, *rest_2) in zip(*stories, strict=True):
        assert ended_2 == pytest.approx(ended + 64.0, abs=1e-9)
        assert tokens_2 == pytest.approx([at + 64.0 for at in tokens], abs=1e-9)
        assert rest_2 == rest


@pytest.mark.parametrize("prioritizer", ["fcfs", "edf", "lrs", "priority"])
@pytest.mark.parametrize("scheduler", [("fixed_chunk", {"chunk_size": 64}), "dynamic_chunk", "vllm_v1", "nano_vllm"])
def test_with_one_replica_pull_is_round_robin(prioritizer: str, scheduler: Any) -> None:
    options = replace(OPTIONS, num_blocks=30, latency=latency(), max_batch_tokens=512)
    specs = workload(3)
    pull, bound = (story(specs, (prioritizer, chooser, scheduler), options) for chooser in ("pull", "round_robin"))
    assert pull == bound
    assert any(life[4] for life in pull) or scheduler == "dynamic_chunk", "memory was short"


def test_with_one_pipelined_replica_too() -> None:
    """A pipeline holds several steps, each with its own slots: pulling must fill them all."""
    options = replace(OPTIONS, pipeline_stages=3, max_batch_size=2, latency=structs.replace(latency(), num_stages=3))
    policies = ("fcfs", ("fixed_chunk", {"chunk_size": 64}))
    pull, bound = (
        story(workload(6), (policies[0], chooser, policies[1]), options) for chooser in ("pull", "round_robin")
    )
    assert pull == bound


@pytest.mark.parametrize("chooser", ["round_robin", "pull"])
@pytest.mark.parametrize(("num_blocks", "chunk_size"), [(300, 64), (25, 4096)], ids=["chunks", "preemptions"])
def test_equal_priorities_are_first_come_first_served(chooser: str, num_blocks: int, chunk_size: int) -> None:
    """Not with both at once: of two prompts of equal priority the one in progress goes on, whoever came first."""
    options = replace(OPTIONS, num_replicas=2, num_blocks=num_blocks, latency=latency())
    specs = workload(4, priority=3)
    by_priority, by_arrival = (
        story(specs, (prioritizer, chooser, ("fixed_chunk", {"chunk_size": chunk_size})), options)
        for prioritizer in ("priority", "fcfs")
    )
    assert by_priority == by_arrival
    assert any(life[4] for life in by_arrival) == (num_blocks == 25)


def test_equal_deadlines_without_progress_make_lrs_edf() -> None:
    """Prompts of one length that are computed in one piece, and one relative deadline: least slack is earliest deadline."""
    options = replace(OPTIONS, num_blocks=16, max_batch_size=4, latency=latency())
    specs = [replace(spec, num_prompt_tokens=64, ttft_slo_s=0.25) for spec in workload(5)]
    params = {"use_request_deadlines": True}
    lrs, edf = (
        story(specs, ((name, params), "pull", ("fixed_chunk", {"chunk_size": 4096})), options)
        for name in ("lrs", "edf")
    )
    assert lrs == edf
    assert any(life[4] for life in edf)


@given(
    arrivals=st.lists(st.integers(0, 10**6).map(lambda ms: ms / 1000), min_size=2, max_size=12),
    deadline_s=st.sampled_from([0.1, 0.25, 3.0, 1000.0]),
    now=st.floats(0.0, 5000.0),
)
def test_equal_deadlines_queue_alike_at_any_time(arrivals: list[float], deadline_s: float, now: float) -> None:
    harness = Harness("fcfs", "pull", "fixed_chunk", HarnessOptions(max_batch_size=1))
    params = {"use_request_deadlines": True}
    requests = []
    for index, at in enumerate(sorted(arrivals)):
        harness.wait(at - harness.now)
        requests.append(harness.submit(f"r{index}", 32, 2, deadline_s=deadline_s))
    orders = []
    for name in ("lrs", "edf"):
        queue = make_queue(build_policy(Layer.REQUEST_PRIORITIZER, name, params, harness.context))
        for request in requests:
            queue.add(request, now)
        orders.append([request.request_id for request in queue.ordered(now)])
    assert orders[0] == orders[1] == [request.request_id for request in requests]
