"""Searches for a capacity on systems whose capacity is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.experiment.searches import BOTH, ONE, drive, question
from vajra_py.experiment.capacity.rate import search_rate
from vajra_py.experiment.capacity.search import Setting, search_replicas


def noisy(
    capacity: float, noise: Sequence[float] | np.ndarray, steepness: float = 1.5
) -> Callable[[Setting, int], float]:
    """The slack falls with the logarithm of the rate; seeds' capacities differ by the noise, which is one of logarithms."""
    return lambda setting, seed: steepness * (math.log(capacity / setting[0]) + noise[seed])


@pytest.mark.parametrize("capacity", [0.03, 0.7, 2.0, 7.3, 900.0])
def test_without_noise_the_capacity_is_found(capacity: float) -> None:
    found = drive(search_rate(question()), noisy(capacity, np.zeros(100)))
    assert found.answer.outcome == "found"
    assert found.answer.setting[0] == pytest.approx(capacity, rel=1e-3)
    assert (found.answer.num_seeds, found.answer.stop) == (5, "precision")
    assert found.num_runs < 40


def test_the_answer_is_the_geometric_mean_of_the_seeds_capacities() -> None:
    noise = [0.1, -0.2, 0.05, 0.3, -0.1]
    answer = drive(search_rate(question(max_replications=5)), noisy(7.3, noise)).answer
    assert answer.setting[0] == pytest.approx(7.3 * math.exp(0.03), rel=1e-3)
    assert [one.rate for one in answer.conditions[0].by_seed] == pytest.approx(
        [7.3 * math.exp(one) for one in noise], rel=2e-3
    )


def test_a_condition_that_hardly_ever_fails_first_does_not_lower_the_answer() -> None:
    """The slack of an attainment is 0.1 at most and that of a latency has no limit: a mean of the worse of both is low wherever some seed fails."""
    noise = np.array([0.2, -0.2, 0.1, -0.1, 0.15, -0.15])

    def slacks(setting: Setting, seed: int) -> tuple[float, float]:
        ttft = 8 * (math.log(5.0 / setting[0]) + noise[seed])
        attainment = min(0.105, 2 * (math.log(5.1 / setting[0]) + noise[seed]))
        return ttft, attainment

    both = drive(search_rate(question(slo=BOTH.text, max_replications=6, replications=6)), slacks).answer
    alone = [
        drive(
            search_rate(question(max_replications=6, replications=6)), lambda one, seed, k=k: slacks(one, seed)[k]
        ).answer
        for k in (0, 1)
    ]
    assert both.setting[0] == pytest.approx(min(one.setting[0] for one in alone), rel=2e-3)
    assert both.decides == 0
    assert [one.rate for one in both.conditions] == pytest.approx([5.0, 5.1], rel=5e-3)


def test_each_condition_of_an_or_may_give_the_answer() -> None:
    def slacks(setting: Setting, seed: int) -> tuple[float, float]:
        return 2 * math.log(5.0 / setting[0]), 2 * math.log(30.0 / setting[0])

    answer = drive(search_rate(question(slo="p99(ttft) <= 1 or p99(tpot) <= 1")), slacks).answer
    assert (answer.outcome, answer.decides) == ("found", 1)
    assert answer.setting[0] == pytest.approx(30.0, rel=1e-3)


def test_a_condition_that_holds_far_beyond_the_answer_is_a_lower_bound() -> None:
    def slacks(setting: Setting, seed: int) -> tuple[float, float]:
        return 2 * math.log(5.0 / setting[0]) + 0.01 * seed, 3.0

    found = drive(search_rate(question(slo=BOTH.text, max_replications=5)), slacks)
    other = found.answer.conditions[1]
    assert other.bound == "at least"
    assert 7 < other.rate < 12
    assert found.num_runs < 50
    assert found.answer.bound == "exact"


@pytest.mark.parametrize("num_seeds", [5, 6, 10])
def test_the_interval_ends_where_the_last_seed_fails(num_seeds: int) -> None:
    """In a system whose slack falls ever faster, the variance beyond the capacity says nothing about where that is."""
    for study in range(40):
        noise = np.random.default_rng(study).normal(0, 0.15, num_seeds)

        def slack(setting: Setting, seed: int, noise: np.ndarray = noise) -> float:
            distance = math.log(5.0 / setting[0]) + noise[seed]
            return min(0.1, distance) if distance > 0 else 20 * distance

        answer = drive(search_rate(question(replications=num_seeds, max_replications=num_seeds)), slack).answer
        assert answer.interval is not None
        assert answer.interval.low < answer.setting[0] < answer.interval.high
        assert any(slack((answer.interval.high * 0.98,), seed) >= 0 for seed in range(num_seeds))


def test_a_slack_that_turns_its_sign_more_than_once_has_one_capacity() -> None:
    """Of a seed that fails by chance at one rate and holds at the next, the fit passes zero once, in between."""

    def slack(setting: Setting, seed: int) -> float:
        distance = math.log(5.0 / setting[0])
        return distance + 0.02 * math.sin(90 * distance + seed)

    rates = [
        drive(search_rate(question(start=start, max_replications=5)), slack).answer.setting[0]
        for start in (1.0, 3.3, 40.0)
    ]
    assert rates == pytest.approx([5.0] * 3, rel=0.02)


def test_noise_costs_seeds_and_certainty_does_not() -> None:
    rng = np.random.default_rng(1)
    quiet = drive(search_rate(question()), noisy(7.3, rng.normal(0, 0.002, 100))).answer
    loud = drive(search_rate(question()), noisy(7.3, rng.normal(0, 0.2, 100))).answer
    assert (quiet.num_seeds, quiet.stop) == (5, "precision")
    assert (loud.num_seeds, loud.stop) == (20, "max_replications")
    assert quiet.interval is not None
    assert loud.interval is not None
    assert quiet.interval.half_width <= 0.02 * quiet.setting[0] < loud.interval.half_width


@pytest.mark.parametrize(("slack", "outcome", "edge"), [(-1.0, "never", 0.01), (1.0, "always", 10_000)])
def test_an_slo_that_never_or_always_holds(slack: float, outcome: str, edge: float) -> None:
    answer = drive(search_rate(question()), lambda setting, seed: slack).answer
    assert (answer.outcome, answer.setting, answer.interval) == (outcome, (edge,), None)


def test_a_seed_beyond_the_range_makes_the_answer_a_bound() -> None:
    noise = [
        math.log(41.0),
        0.0,
        0.01,
        -0.01,
        0.02,
    ]  # the first seed takes forty times as much, which is more than is allowed
    answer = drive(search_rate(question(1.0, 100.0, max_replications=20)), noisy(5.0, noise)).answer
    assert (answer.outcome, answer.bound, answer.stop, answer.num_seeds) == ("found", "at least", "range", 5)
    assert answer.setting[0] == pytest.approx((100 * 5**4) ** 0.2, rel=0.01)
    assert answer.interval is not None
    assert answer.interval.low == pytest.approx(4.95, rel=0.01)
    assert math.isinf(answer.interval.high)


def test_a_seed_below_the_range_makes_the_answer_a_bound() -> None:
    answer = drive(search_rate(question(1.0, 100.0)), noisy(5.0, [0.0, -5.0, 0.1, -0.1, 0.0])).answer
    assert (answer.bound, answer.stop) == ("at most", "range")
    assert answer.interval is not None
    assert answer.interval.low == 0
    assert answer.interval.high == pytest.approx(5 * math.exp(0.1), rel=0.01)


def test_fewer_than_five_seeds_have_no_interval_of_95_percent() -> None:
    answer = drive(search_rate(question(replications=3, max_replications=4)), noisy(5.0, [0.1, -0.1, 0.0, 0.3])).answer
    assert (answer.num_seeds, answer.confidence, answer.stop) == (4, 0.875, "max_replications")
    assert answer.interval is not None
    assert answer.interval.low == pytest.approx(5 * math.exp(-0.1), rel=0.005)
    assert answer.interval.high == pytest.approx(5 * math.exp(0.3), rel=0.005)


def test_one_seed_has_no_interval() -> None:
    answer = drive(search_rate(question(replications=1, max_replications=1)), noisy(5.0, [0.1])).answer
    assert (answer.num_seeds, answer.interval, answer.stop) == (1, None, "one seed")
    assert answer.setting[0] == pytest.approx(5 * math.exp(0.1), rel=0.005)


def test_a_goodput_that_few_requests_cannot_reach_ends_at_its_upper_rate() -> None:
    """It fails at low rates and at high ones: the search goes up where the slack rises with the rate."""

    def slack(setting: Setting, seed: int) -> float:
        return min(math.log(setting[0] / 3.0), 3 * math.log(8.0 / setting[0]))

    answer = drive(search_rate(question(start=1.0)), slack).answer
    assert answer.outcome == "found"
    assert answer.setting[0] == pytest.approx(8.0, rel=2e-3)


def test_conditions_that_hold_at_different_rates_never_hold_together() -> None:
    def slacks(setting: Setting, seed: int) -> tuple[float, float]:
        return 2 * math.log(5.0 / setting[0]), math.log(setting[0] / 8.0)

    answer = drive(search_rate(question(slo="p99(ttft) <= 1 and throughput >= 8", start=4.0)), slacks).answer
    assert (answer.outcome, answer.decides) == ("apart", 1)


def test_the_fewest_replicas() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 5)
    found = drive(
        search_replicas(ONE, [range(1, 65)], [1.0], 5), lambda one, seed: math.log(one[0] / 17.5) + float(noise[seed])
    )
    assert found.answer.setting == (18.0,)
    assert found.answer.interval is not None
    assert found.answer.interval.low <= 18 <= found.answer.interval.high
    assert found.num_runs < 60  # of 320


def test_the_replicas_of_two_conditions_are_the_more_that_one_of_them_needs() -> None:
    """Each is judged by the mean of its own slack: the one that is 0.1 at most does not lower the other one's."""
    noise = [0.1, -0.15, 0.08, -0.06, 0.04]

    def slacks(setting: Setting, seed: int) -> tuple[float, float]:
        return 2 * (math.log(setting[0] / 10.0) + noise[seed]), min(0.1, math.log(setting[0] / 8.0))

    alone = drive(search_replicas(ONE, [range(1, 33)], [1.0], 5), lambda one, seed: slacks(one, seed)[0]).answer
    both = drive(search_replicas(BOTH, [range(1, 33)], [1.0], 5), slacks).answer
    assert both.setting == alone.setting == (10.0,)


def test_replicas_with_which_every_seed_fails_are_outside_the_interval() -> None:
    def slack(setting: Setting, seed: int) -> float:
        distance = math.log(setting[0] / 17.5) + 0.01 * seed
        return min(0.1, distance) if distance > 0 else (1 + 30 * (seed == 0)) * distance

    answer = drive(search_replicas(ONE, [range(1, 65)], [1.0], 5), slack).answer
    assert answer.interval is not None
    assert any(slack((answer.interval.low,), seed) >= 0 for seed in range(5))


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

        answer = drive(search_replicas(ONE, ranges, costs, 3), slack).answer
        if not holds:
            assert answer.outcome == "never"
        else:
            assert answer.setting == min(holds)[1]


def test_a_kind_that_may_be_left_out_is_a_question_of_its_own() -> None:
    """One small replica gets all short requests and fails; none leaves them to the large ones, which hold."""

    def slack(setting: Setting, seed: int) -> float:
        small, large = setting
        return large - 3.5 if not small else min(small - 4.5, large - 1.5)

    found = drive(search_replicas(ONE, [range(0, 8), range(1, 8)], [1.0, 3.0], 2), slack)
    assert found.answer.setting == (5.0, 2.0)
    found = drive(search_replicas(ONE, [range(0, 8), range(1, 8)], [2.0, 3.0], 2), slack)
    assert found.answer.setting == (0.0, 4.0)
    assert len({setting for setting, _ in found.probes}) < 20
