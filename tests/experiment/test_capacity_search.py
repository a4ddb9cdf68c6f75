"""Searches for a capacity on systems whose capacity is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from vajra_py.experiment.capacity_search import (
    Answer,
    RateQuestion,
    Search,
    Setting,
    search_rate,
    search_replicas,
)

QUESTION = RateQuestion(low=0.01, high=10_000, start=2.0, precision_fraction=0.02, replications=5, max_replications=20)


def drive(search: Search, slack: Callable[[Setting, int], float]) -> tuple[Answer, dict[Setting, int]]:
    """The answer, and how many seeds each setting was run under."""
    runs: dict[Setting, int] = {}
    try:
        probes = next(search)
        while True:
            for setting, count in probes:
                runs[setting] = max(count, runs.get(setting, 0))
            probes = search.send({one: [slack(one, k) for k in range(count)] for one, count in probes})
    except StopIteration as stop:
        return stop.value, runs


def noisy(capacity: float, noise: np.ndarray, steepness: float = 1.5) -> Callable[[Setting, int], float]:
    return lambda setting, seed: steepness * math.log(capacity * (1 + noise[seed]) / setting[0])


@pytest.mark.parametrize("capacity", [0.03, 0.7, 2.0, 7.3, 900.0])
def test_without_noise_the_capacity_is_found(capacity: float) -> None:
    answer, runs = drive(search_rate(QUESTION), noisy(capacity, np.zeros(100)))
    assert answer.outcome == "found"
    assert answer.setting[0] == pytest.approx(capacity, rel=1e-3)
    assert answer.num_seeds == 5
    assert sum(runs.values()) < 60


def test_intervals_hold_the_capacity_as_often_as_they_say() -> None:
    held = 0
    for seed in range(150):
        noise = np.random.default_rng(seed).normal(0, 0.04, 100)
        answer, _ = drive(search_rate(QUESTION), noisy(7.3, noise))
        assert answer.interval is not None
        held += answer.interval.low <= 7.3 <= answer.interval.high
    assert 135 <= held <= 149  # 95 % of 150, give or take three standard errors


def test_noise_costs_seeds_and_certainty_does_not() -> None:
    rng = np.random.default_rng(1)
    quiet, _ = drive(search_rate(QUESTION), noisy(7.3, rng.normal(0, 0.002, 100)))
    loud, _ = drive(search_rate(QUESTION), noisy(7.3, rng.normal(0, 0.1, 100)))
    assert quiet.num_seeds == 5
    assert loud.num_seeds == 20
    assert quiet.interval is not None
    assert loud.interval is not None
    assert quiet.interval.half_width < loud.interval.half_width


@pytest.mark.parametrize(("slack", "outcome", "edge"), [(-1.0, "never", 0.01), (1.0, "always", 10_000)])
def test_an_slo_that_never_or_always_holds(slack: float, outcome: str, edge: float) -> None:
    answer, _ = drive(search_rate(QUESTION), lambda setting, seed: slack)
    assert (answer.outcome, answer.setting) == (outcome, (edge,))


def test_one_lucky_seed_at_the_end_of_the_range_does_not_decide() -> None:
    question = RateQuestion(1.0, 100.0, 2.0, 0.02, 5, 5)
    noise = np.array([40.0, 0.0, 0.01, -0.01, 0.02])  # the first seed takes forty times as much
    answer, _ = drive(search_rate(question), noisy(5.0, noise))
    assert answer.outcome == "found"


def test_the_fewest_replicas() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 5)
    answer, runs = drive(
        search_replicas([range(1, 65)], [1.0], 5), lambda one, seed: math.log(one[0] / 17.5) + noise[seed]
    )
    assert answer.setting == (18.0,)
    assert answer.interval is not None
    assert answer.interval.low <= 18 <= answer.interval.high
    assert sum(runs.values()) < 60  # of 320


def test_the_cheapest_mix_is_that_of_a_full_search() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        costs, powers, need = rng.uniform(1, 4, 2).tolist(), rng.uniform(1, 4, 2), float(rng.uniform(5, 30))
        ranges = [range(1, 9), range(1, 7)]
        holds = [
            (a * costs[0] + b * costs[1], (float(a), float(b)))
            for a in ranges[0]
            for b in ranges[1]
            if a * powers[0] + b * powers[1] >= need
        ]

        def slack(one: Setting, seed: int, powers: np.ndarray = powers, need: float = need) -> float:
            return math.log(float(np.dot(one, powers)) / need)

        answer, _ = drive(search_replicas(ranges, costs, 3), slack)
        if not holds:
            assert answer.outcome == "never"
        else:
            assert answer.setting == min(holds)[1]


def test_a_kind_that_may_be_left_out_is_a_question_of_its_own() -> None:
    """One small replica gets all short requests and fails; none leaves them to the large ones, which hold."""

    def slack(setting: Setting, seed: int) -> float:
        small, large = setting
        return large - 3.5 if not small else min(small - 4.5, large - 1.5)

    answer, runs = drive(search_replicas([range(0, 8), range(1, 8)], [1.0, 3.0], 2), slack)
    assert answer.setting == (5.0, 2.0)
    answer, _ = drive(search_replicas([range(0, 8), range(1, 8)], [2.0, 3.0], 2), slack)
    assert answer.setting == (0.0, 4.0)
    assert len(runs) < 20
