"""Answers about capacity against the truth, which is known where seeds are drawn: how often intervals hold it, and how far answers are from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.experiment.searches import BOTH, ONE, drive, question
from vajra_py.experiment.capacity import seeds as capacity_seeds
from vajra_py.experiment.capacity.rate import search_rate
from vajra_py.experiment.capacity.search import Answer, Setting
from vajra_py.metrics.comparison.intervals import Interval, replication_interval

TRUTH = 5.0


@dataclass(frozen=True)
class System:
    """Seeds of a system with a P99 TTFT and an attainment, whose capacities are lognormal: those of the profile workload of `examples/capacity.yaml` have these spreads."""

    spreads: tuple[float, float] = (0.18, 0.10)
    gap: float = 0.07
    """How far the second condition ends above the first, on the logarithm of the rate."""
    common: float = 0.7
    """Part of the variance that both conditions have from the seed."""
    wiggle: float = 0.01
    """Size of what is not monotone in a seed's slack, as a part of the rate."""

    def slacks(self, study: int, num_seeds: int) -> Callable[[Setting, int], tuple[float, float]]:
        """Of both conditions by rate and seed: steep where they fail, flat where they hold, capped as an attainment is."""
        rng = np.random.default_rng(study)
        drawn = rng.normal(size=(num_seeds, 3))
        errors = math.sqrt(self.common) * drawn[:, :1] + math.sqrt(1 - self.common) * drawn[:, 1:]
        ends = math.log(TRUTH) + np.array([0.0, self.gap]) + errors * np.array(self.spreads)
        phases = rng.uniform(0, 2 * math.pi, (num_seeds, 2))

        def slacks(setting: Setting, seed: int) -> tuple[float, float]:
            found = []
            for k, (steepness, best) in enumerate(((8.0, 3.0), (2.0, 0.105))):
                end, phase, rate = float(ends[seed, k]), float(phases[seed, k]), math.log(setting[0])
                distance = end - rate + self.wiggle * (math.sin(80 * rate + phase) - math.sin(80 * end + phase))
                found.append(min(best, max(-3.0, steepness * distance * (1.0 if distance < 0 else 0.4))))
            return found[0], found[1]

        return slacks


def studies(
    system: System, count: int, seeds: tuple[int, int], precision: float = 0.05, *, both: bool = True
) -> list[Answer]:
    """The answers to so many studies with seeds of their own."""
    answers = []
    for study in range(count):
        asked = question(0.5, 50.0, 4.0, precision, *seeds, slo=(BOTH if both else ONE).text)
        slacks = system.slacks(study, seeds[1])
        answers.append(
            drive(search_rate(asked), slacks if both else lambda one, seed, own=slacks: own(one, seed)[:1]).answer
        )
    return answers


def coverage(answers: list[Answer]) -> float:
    """The part of the intervals that hold the truth."""
    return sum(one.interval is not None and one.interval.low <= TRUTH <= one.interval.high for one in answers) / len(
        answers
    )


@pytest.mark.parametrize(
    ("system", "seeds", "both"),
    [
        (System(), (5, 5), False),
        (System(), (6, 6), True),
        (System(gap=0.0, common=0.0), (6, 6), True),
        pytest.param(System(), (6, 6), False, marks=pytest.mark.long),
        pytest.param(System(), (10, 10), True, marks=pytest.mark.long),
        pytest.param(System(gap=0.0), (6, 6), True, marks=pytest.mark.long),
        pytest.param(System(spreads=(0.18, 0.18), gap=0.0, common=0.0), (10, 10), True, marks=pytest.mark.long),
        pytest.param(System(gap=0.5), (6, 6), True, marks=pytest.mark.long),
    ],
    ids=lambda value: str(value) if not isinstance(value, System) else f"gap {value.gap} common {value.common} {value.spreads}",
)  # fmt: skip
def test_intervals_hold_the_capacity_in_93_to_97_percent(system: System, seeds: tuple[int, int], both: bool) -> None:
    assert 0.93 <= coverage(studies(system, 1000, seeds, both=both)) <= 0.97


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_intervals_a_fifth_too_short_or_a_quarter_too_long_would_not_pass(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(values: Sequence[float]) -> Interval | None:
        found = replication_interval(values)
        if found is None:
            return None
        mean = (found.low + found.high) / 2
        return Interval(mean - factor * found.half_width, mean + factor * found.half_width)

    monkeypatch.setattr(capacity_seeds, "replication_interval", scaled)
    assert not 0.93 <= coverage(studies(System(), 1000, (6, 6))) <= 0.97


@pytest.mark.parametrize(
    ("seeds", "precision"),
    [
        ((4, 6), 0.15),
        ((5, 20), 0.3),
        pytest.param((4, 10), 0.1, marks=pytest.mark.long),
        pytest.param((5, 20), 0.1, marks=pytest.mark.long),
        pytest.param((5, 20), 0.07, marks=pytest.mark.long),
    ],
)
def test_stopping_when_the_interval_is_short_does_not_make_it_too_short(
    seeds: tuple[int, int], precision: float
) -> None:
    answers = studies(System(), 600, seeds, precision)
    assert 0.93 <= coverage(answers) <= 0.97
    if precision < 0.3:
        assert len({one.num_seeds for one in answers}) > 1
    for one in answers:
        assert one.interval is not None
        is_short = one.interval.half_width <= precision * one.setting[0]
        assert is_short == (one.stop == "precision")
        assert is_short or one.num_seeds == seeds[1]


def test_the_range_of_four_seeds_holds_as_often_as_it_says() -> None:
    answers = studies(System(), 1000, (4, 4))
    assert {one.confidence for one in answers} == {0.875}
    assert 0.85 <= coverage(answers) <= 0.905


def test_intervals_are_short_enough_to_be_of_use() -> None:
    """With six seeds about 2.57 / sqrt(6) of their spread to each side."""
    widths = [
        one.interval.half_width / one.setting[0] for one in studies(System(), 200, (6, 6)) if one.interval is not None
    ]
    assert np.mean(widths) == pytest.approx(0.18 * 2.57 / math.sqrt(6), rel=0.15)


def test_the_search_finds_what_a_fine_grid_finds() -> None:
    """Under the same 40 seeds, each by a grid of 1 % and by the rates at which both conditions end to hold."""
    system, count = System(wiggle=0.003), 40
    for study in range(5):
        slacks = system.slacks(study, count)
        rates = np.exp(np.arange(math.log(1.5), math.log(15.0), 0.01))
        logs = np.zeros((count, 2))
        for seed in range(count):
            values = np.array([slacks((rate,), seed) for rate in rates])
            logs[seed] = [math.log(rates[int(np.flatnonzero(values[:, k] >= 0)[-1])]) + 0.005 for k in (0, 1)]
        found = drive(search_rate(question(0.5, 50.0, 4.0, 0.05, count, count, slo=BOTH.text)), slacks)
        assert found.answer.setting[0] == pytest.approx(float(np.exp(logs.mean(axis=0)).min()), rel=0.01)
        assert found.num_runs < 9 * count  # of 9,200
