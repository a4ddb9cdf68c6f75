"""Prefill and decode pools as queues in tandem, for which theory has exact answers.

A prompt is computed in one step whose time is proportional to its length, and a replica runs one request at a time. With geometric
lengths of many tokens both stations serve exponential times. By Burke (1956) requests leave an M/M/k station as a Poisson process, so
that the second station is M/M/1, and the numbers at both are independent (product form; Jackson 1957).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.sim.queueing import erlang_c, mean_and_error
from tests.sim.split_pools import Ways, prepared, settings
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)
from vajra_py.plugins import Registry, load_registry
from vajra_py.workload import RequestSpec

TOKEN_S = 0.001
NUM_REQUESTS = 3000
SINGLE = {"max_batch_size": 1, "max_batch_tokens": 20_000, "max_model_len": 20_000, "memory": {"num_blocks": 100_000}}


class NoParameters(PolicyConfig):
    """Nothing."""


class OneQueueThenDecode:
    """One queue for all prefill replicas, and decode replica after decode replica."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Nothing is bound on arrival."""
        return None

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Prefill replicas take whoever is next."""
        return (one.request_id for one in queued) if replica.role == "prefill" else ()

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """The one that decodes."""
        return next(one.replica_id for one in replicas if one.role == "decode")


def with_one_queue() -> Registry:
    """The registry with the scheduler of these tests."""
    spec = PolicySpec(
        "one_queue_then_decode",
        Layer.REPLICASET_SCHEDULER,
        NoParameters,
        lambda config, context: OneQueueThenDecode(),
        "One queue, then decode.",
    )
    return load_registry().with_policies([spec])


@dataclass(frozen=True)
class Tandem:
    """Times of requests that went through both stations, in order of arrival, seconds."""

    arrived: np.ndarray
    computed: np.ndarray
    """Times at which prompts were computed, and requests left the first station."""
    ended: np.ndarray
    prompts: np.ndarray
    """Time that each prompt takes."""

    @property
    def first(self) -> np.ndarray:
        """Time at the first station."""
        return self.computed - self.arrived

    @property
    def second(self) -> np.ndarray:
        """Time at the second station."""
        return self.ended - self.computed


def run_tandem(rate: float, means_s: tuple[float, float], num_servers: int = 1, seed: int = 0) -> Tandem:
    """Simulate Poisson arrivals at `num_servers` prefill replicas and one decode replica with these mean service times."""
    stream = np.random.default_rng(seed)
    arrived = np.cumsum(stream.exponential(1 / rate, NUM_REQUESTS))
    prompts, outputs = (stream.geometric(TOKEN_S / mean, NUM_REQUESTS) for mean in means_s)
    rows = zip(arrived.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    specs = [RequestSpec(f"r{index}", *row) for index, row in enumerate(rows)]
    mapping = settings(
        scheduling={
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "one_queue_then_decode",
            "replica_scheduler": "vllm_v1",
        },
        replica=SINGLE,
        pools={"prefill": {"num_replicas": num_servers}, "decode": {}},
        hand_off={"kv_bytes_per_token": 1, "first_token": "recompute"},
        links={},
        backend={"simulator": {"latency": {"type": "affine", "base_s": 0.0, "per_token_s": TOKEN_S}}},
    )
    run, simulator, ways = prepared(mapping, registry=with_one_queue())
    simulator.run(specs)
    run.controller.check_conservation()
    return Tandem(arrived, *_times(ways, specs), prompts * TOKEN_S)


def _times(ways: Ways, specs: Sequence[RequestSpec]) -> tuple[np.ndarray, np.ndarray]:
    found = [ways.of[spec.request_id] for spec in specs]
    return np.array([way.arrived for way in found], dtype=float), np.array([way.ended for way in found], dtype=float)


def correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Pearson's."""
    return float(np.corrcoef(left, right)[0, 1])


@pytest.fixture(scope="module")
def tandem() -> Tandem:
    """Utilisation 0.5 and 0.6."""
    return run_tandem(10.0, (0.05, 0.06))


def test_both_stations_of_a_tandem_are_m_m_1(tandem: Tandem) -> None:
    for times, mean_s in ((tandem.first, 0.05), (tandem.second, 0.06)):
        expected = 1 / (1 / mean_s - 10.0)
        mean, error = mean_and_error(times)
        assert abs(mean - expected) < 4 * error
        assert error < 0.1 * expected, "long enough to tell"
        # Times in the system are exponential, so that the standard deviation is the mean.
        assert times.std() == pytest.approx(expected, rel=0.25)


def test_requests_leave_the_first_station_as_a_poisson_process(tandem: Tandem) -> None:
    gaps = np.diff(np.sort(tandem.computed))
    few = 4 / np.sqrt(len(gaps))
    assert gaps.mean() == pytest.approx(0.1, rel=few)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=few)
    assert abs(correlation(gaps[1:], gaps[:-1])) < few
    shares = (np.arange(len(gaps)) + 0.5) / len(gaps)
    distance = np.abs(1 - np.exp(-np.sort(gaps) / 0.1) - shares).max()
    assert distance < 1.95 / np.sqrt(len(gaps)), "Kolmogorov and Smirnov, one in a thousand"


def test_numbers_at_both_stations_have_product_form(tandem: Tandem) -> None:
    moments = np.linspace(tandem.arrived[200], tandem.arrived[-1], 4000)

    def numbers(begun: np.ndarray, ended: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.sort(begun), moments, "right") - np.searchsorted(np.sort(ended), moments, "right")

    first, second = numbers(tandem.arrived, tandem.computed), numbers(tandem.computed, tandem.ended)
    for count_first in range(3):
        for count_second in range(3):
            expected = 0.5 * 0.5**count_first * 0.4 * 0.6**count_second
            both = np.mean((first == count_first) & (second == count_second))
            assert both == pytest.approx(expected, abs=0.03)
    assert abs(correlation(first, second)) < 0.12
    # The times of one request at both stations are independent, too (Reich 1957).
    assert abs(correlation(tandem.first, tandem.second)) < 0.1


def test_erlang_c_with_a_second_station_behind_it() -> None:
    """Three prefill replicas of utilisation 0.7, one decode replica of 0.5."""
    rate, num_servers = 10.0, 3
    tandem = run_tandem(rate, (0.21, 0.05), num_servers, seed=1)
    waits = tandem.first - tandem.prompts
    all_busy = erlang_c(num_servers, rate * 0.21)
    assert np.mean(waits > TOKEN_S / 2) == pytest.approx(all_busy, abs=0.06)
    mean, error = mean_and_error(waits)
    assert abs(mean - all_busy / (num_servers / 0.21 - rate)) < 4 * error
    mean, error = mean_and_error(tandem.second)
    expected = 1 / (1 / 0.05 - rate)
    assert abs(mean - expected) < 4 * error
    assert error < 0.1 * expected, "long enough to tell"
