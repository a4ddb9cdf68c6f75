"""Simple queues, for which theory has exact answers: waiting times must agree with it.

A server that runs one request at a time in steps of equal length serves a geometric number of steps when output lengths
are geometric. With many short steps that is an exponential service time: replicas that pull from one queue are M/M/k.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import pytest

from tests.sim.queueing import erlang_c, mean_and_error
from vajra_py.contract import RequestView
from vajra_py.contract.observer import Observer
from vajra_py.latency import ConstantModel
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload import RequestSpec

STEP_S = 0.003
MEAN_STEPS = 16


class Waits(Observer):
    """Seconds from arrival to the first step, in order of arrival."""

    def __init__(self, num_requests: int) -> None:
        self.seconds = np.full(num_requests, np.nan)

    def on_admitted(self, request: RequestView, replica_id: int, now: float) -> None:
        self.seconds[request.index] = now - request.arrived_at


@dataclass(frozen=True)
class Queue:
    """Poisson arrivals at servers that each run one request at a time."""

    utilisation: float
    num_servers: int
    num_requests: int
    seed: int

    def arrivals_and_services(self) -> tuple[np.ndarray, np.ndarray]:
        """When requests arrive, and how many steps each needs."""
        stream = np.random.default_rng(self.seed)
        rate = self.utilisation * self.num_servers / (MEAN_STEPS * STEP_S)
        times = np.cumsum(stream.exponential(1 / rate, self.num_requests))
        return times, stream.geometric(1 / MEAN_STEPS, self.num_requests)

    def simulated_waits(self) -> np.ndarray:
        options = HarnessOptions(
            num_replicas=self.num_servers, max_batch_size=1, latency=ConstantModel(STEP_S), max_model_len=1000
        )
        harness = Harness("fcfs", "pull" if self.num_servers > 1 else "round_robin", "fixed_chunk", options)
        waits = Waits(self.num_requests)
        harness.controller.watch((waits,))
        pairs = zip(*self.arrivals_and_services(), strict=True)
        specs = [RequestSpec(f"r{index}", float(at), 1, int(steps)) for index, (at, steps) in enumerate(pairs)]
        harness.simulator(SimulationOptions()).run(specs)
        assert harness.controller.num_alive == 0
        return waits.seconds

    def recursive_waits(self) -> np.ndarray:
        """The same from the recursion of Kiefer and Wolfowitz (1955): who comes next takes the server that is free first."""
        free_at = [0.0] * self.num_servers
        waits = []
        for at, steps in zip(*self.arrivals_and_services(), strict=True):
            begun_at = max(at, heapq.heappop(free_at))
            waits.append(begun_at - at)
            heapq.heappush(free_at, begun_at + steps * STEP_S)
        return np.array(waits)


@pytest.mark.parametrize(("utilisation", "num_servers"), [(0.6, 1), (0.6, 2)])
def test_mean_waits_are_those_of_m_m_k(utilisation: float, num_servers: int) -> None:
    waits = Queue(utilisation, num_servers, 2600, seed=1).simulated_waits()
    mean, error = mean_and_error(waits)
    all_busy = erlang_c(num_servers, utilisation * num_servers)
    exponential = all_busy * MEAN_STEPS * STEP_S / (num_servers * (1 - utilisation))
    # A geometric number of steps varies a little less than an exponential time (Pollaczek 1930; Lee and Longton 1959).
    expected = exponential * (1 + (1 - 1 / MEAN_STEPS)) / 2
    assert abs(mean - expected) < 4 * error
    assert error < 0.15 * expected, "long enough to tell"
    assert np.mean(waits > 0) == pytest.approx(all_busy, abs=0.05)


@pytest.mark.parametrize(("utilisation", "num_servers"), [(0.9, 1), (0.9, 3), (1.2, 2)])
def test_every_wait_is_what_the_recursion_says(utilisation: float, num_servers: int) -> None:
    queue = Queue(utilisation, num_servers, 500, seed=3)
    assert queue.simulated_waits() == pytest.approx(queue.recursive_waits(), abs=1e-9)


def test_one_queue_for_all_beats_one_each() -> None:
    """Requests that are bound on arrival wait longer than in one queue for all: no server idles while one waits."""
    together = Queue(0.8, 2, 800, seed=4).simulated_waits().mean()
    apart = np.mean([Queue(0.8, 1, 400, seed=seed).simulated_waits().mean() for seed in (5, 6)])
    assert together < 0.8 * apart
