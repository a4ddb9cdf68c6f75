"""The verdict on queues whose truth is known: below, at and above the capacity of their servers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vajra_py.metrics.definitions import Window
from vajra_py.metrics.summary.stability import Lifetimes, Stability, StabilityLabel, assess


def queue(load: float, num_requests: int, seed: int = 0, servers: int = 16, shortest_first: bool = False) -> Lifetimes:
    """Poisson arrivals at `load` times the capacity of `servers`, each of which serves one request at a time."""
    rng = np.random.default_rng(seed)
    service_s = rng.lognormal(-0.5, 1.0, num_requests) * servers
    arrived_at = np.cumsum(rng.exponential(1 / load, num_requests))
    free_at, admitted_at = np.zeros(servers), np.zeros(num_requests)
    waiting: list[int] = []
    arrivals = list(range(num_requests))
    while arrivals or waiting:
        server = int(free_at.argmin())
        now = float(free_at[server])
        while arrivals and arrived_at[arrivals[0]] <= now:
            waiting.append(arrivals.pop(0))
        if not waiting:
            waiting.append(arrivals.pop(0))
        chosen = min(waiting, key=lambda i: service_s[i]) if shortest_first else waiting[0]
        waiting.remove(chosen)
        admitted_at[chosen] = max(now, arrived_at[chosen])
        free_at[server] = admitted_at[chosen] + service_s[chosen]
    none = np.zeros(num_requests, dtype=bool)
    tokens = (100 * service_s).astype(np.int64) + 1
    return Lifetimes(arrived_at, admitted_at, admitted_at + service_s, tokens, np.ones_like(tokens), ~none, none, none)


def judge(own: Lifetimes) -> Stability:
    return assess(own, Window(0.0, float(np.nanmax(own.ended_at))))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("load", "label"), [(0.3, "stable"), (0.7, "stable"), (1.25, "overloaded"), (2.0, "overloaded")]
)
def test_far_from_capacity_the_label_is_right(load: float, label: str, seed: int) -> None:
    assert judge(queue(load, 1000, seed)).label.value == label


def test_the_growth_is_the_fraction_that_stays_behind() -> None:
    # At 1.5 times the capacity a third of the arriving requests is not served.
    assert judge(queue(1.5, 4000)).growth_fraction == pytest.approx(1 / 3, abs=0.07)
    assert judge(queue(0.5, 4000)).growth_fraction == pytest.approx(0.0, abs=0.02)


def test_serving_the_short_ones_first_does_not_hide_overload() -> None:
    found = judge(queue(1.5, 2000, shortest_first=True))
    assert found.label is StabilityLabel.OVERLOADED
    assert found.token_growth_fraction > found.growth_fraction


def test_an_empty_system_that_fills_is_not_overloaded() -> None:
    # Ten requests a second that take 20 s each: the number in the system rises to 200 in the first quarter, then stays.
    arrived_at = np.arange(0, 100, 0.1)
    none, tokens = np.zeros(1000, dtype=bool), np.full(1000, 10)
    own = Lifetimes(arrived_at, arrived_at, arrived_at + 20.0, tokens, tokens, ~none, none, none)
    found = judge(own)
    assert found.label is StabilityLabel.STABLE
    assert found.in_system_by_quarter[0] < found.in_system_by_quarter[1]


def test_one_burst_is_a_backlog() -> None:
    none, tokens = np.zeros(100, dtype=bool), np.full(100, 10)
    admitted_at = np.arange(100.0)
    own = Lifetimes(np.zeros(100), admitted_at, admitted_at + 1.0, tokens, tokens, ~none, none, none)
    found = judge(own)
    assert found.label is StabilityLabel.BACKLOGGED
    assert math.isnan(found.growth_fraction)
    assert found.mean_waiting == pytest.approx(49.5)


@pytest.mark.parametrize(("every", "label"), [(10, "overloaded"), (50, "backlogged"), (500, "stable")])
def test_shedding_keeps_a_queue_short_and_is_still_seen(every: int, label: str) -> None:
    own = queue(0.5, 1000)
    expired = np.arange(1000) % every == 0
    shed = Lifetimes(
        own.arrived_at, own.admitted_at, own.ended_at, own.num_prompt_tokens, own.num_output_tokens,
        own.completed & ~expired, expired, own.rejected,
    )  # fmt: skip
    assert judge(shed).label.value == label


def test_a_request_that_can_never_fit_is_no_sign_of_load() -> None:
    own = queue(0.5, 1000)
    too_large = np.arange(1000) % 10 == 0
    tokens = np.where(too_large, 10**9, own.num_prompt_tokens)
    rejected = Lifetimes(
        own.arrived_at, np.where(too_large, np.nan, own.admitted_at), np.where(too_large, own.arrived_at, own.ended_at),
        tokens, own.num_output_tokens, own.completed & ~too_large, own.expired, too_large,
    )  # fmt: skip
    found = judge(rejected)
    assert (found.shed_fraction, found.label.value) == (0.0, "stable")


def test_nothing_is_stable() -> None:
    empty, none = np.zeros(0), np.zeros(0, dtype=bool)
    counts = np.zeros(0, dtype=np.int64)
    found = assess(Lifetimes(empty, empty, empty, counts, counts, none, none, none), Window(0.0, 0.0))
    assert found.label is StabilityLabel.STABLE


def test_more_demand_that_is_served_is_not_overload() -> None:
    # The rate doubles in the second half; every request is admitted at once and takes as long as before.
    arrived_at = np.concatenate([np.arange(0, 100, 0.2), np.arange(100, 200, 0.1)])
    none, tokens = np.zeros(1500, dtype=bool), np.full(1500, 10)
    own = Lifetimes(arrived_at, arrived_at, arrived_at + 20.0, tokens, tokens, ~none, none, none)
    found = judge(own)
    assert found.growth_fraction > 0.05
    assert found.label is StabilityLabel.STABLE


@pytest.mark.parametrize("load", [0.5, 0.75])
def test_a_single_server_below_its_capacity_is_stable(load: float) -> None:
    rng = np.random.default_rng(3)
    arrived_at, service_s = np.cumsum(rng.exponential(1 / load, 5000)), rng.exponential(1.0, 5000)
    admitted_at, free_at = np.zeros(5000), 0.0
    for i in range(5000):
        admitted_at[i] = max(arrived_at[i], free_at)
        free_at = admitted_at[i] + service_s[i]
    none, tokens = np.zeros(5000, dtype=bool), np.full(5000, 10)
    own = Lifetimes(arrived_at, admitted_at, admitted_at + service_s, tokens, tokens, ~none, none, none)
    assert judge(own).label is StabilityLabel.STABLE


def test_a_burst_at_the_start_is_a_backlog_although_it_is_worked_off() -> None:
    # 700 requests in the first tenth, one every 0.1 s served; then a trickle that is served at once. On average over the whole run few wait.
    bursts, trickle = np.linspace(0.0, 10.0, 700), np.linspace(110.0, 1000.0, 300)
    arrived_at = np.concatenate([bursts, trickle])
    admitted_at = np.concatenate([np.maximum(bursts, 0.14 * np.arange(700)), trickle])
    none, tokens = np.zeros(1000, dtype=bool), np.full(1000, 10)
    own = Lifetimes(arrived_at, admitted_at, admitted_at + 20.0, tokens, tokens, ~none, none, none)
    found = judge(own)
    assert found.mean_waiting < 5 * found.mean_in_service
    assert found.label is StabilityLabel.BACKLOGGED
    assert found.reason.startswith("in the first quarter")
    assert found.waiting_by_quarter[0] > 50 > found.waiting_by_quarter[1]


@pytest.mark.parametrize("seed", range(5))
def test_a_short_wait_now_and_then_is_no_backlog(seed: int) -> None:
    assert judge(queue(0.8, 2000, seed)).label is StabilityLabel.STABLE
