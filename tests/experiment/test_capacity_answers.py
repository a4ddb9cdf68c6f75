"""Answers about capacity as their readers get them: a sentence, a row, the curve's numbers and figure."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.config.capacity import CapacityConfig
from vajra_py.experiment.capacity import CapacityAnswer, CurvePoint
from vajra_py.experiment.capacity_files import answer_rows, write_capacity_files
from vajra_py.experiment.capacity_search import Answer, RateQuestion, Search, Setting, search_rate, search_replicas
from vajra_py.metrics.intervals import Interval

METRIC = "p99(ttft)"


def point(setting: Setting, *values: float | None, overloaded: int = 0) -> CurvePoint:
    slacks = tuple(0.0 if one is None else 1.0 - one for one in values)
    return CurvePoint(setting, {METRIC: values}, slacks, overloaded)


RATE = CapacityAnswer(
    label="fcfs",
    answer=Answer("found", (12.345,), Interval(11.9, 12.81), 5),
    curve=(point((6.0,), 0.2, 0.4), point((12.0,), 0.9, None), point((20.0,), 3.0, 5.0)),
    paths=("workload.rate",),
    num_runs=40,
    num_new=7,
    range=(0.5, 80.0),
)
REPLICAS = CapacityAnswer(
    label="lrs",
    answer=Answer("found", (3.0,), Interval(3.0, 4.0), 5),
    curve=(point((2.0,), 2.0), point((3.0,), 0.5)),
    paths=("num_replicas",),
    costs=(1.0,),
    unit="replicas",
    num_runs=9,
)
MIX = replace(
    REPLICAS,
    answer=Answer("found", (2.0, 1.0), Interval(5.5, 7.25), 5),
    curve=(point((2.0, 1.0), 0.5), point((0.0, 1.0), 2.0)),
    paths=("replicasets.small.num_replicas", "replicasets.large.num_replicas"),
    costs=(1.0, 3.5),
    unit="$ an hour",
)


# Sentences


def ended(answer: CapacityAnswer, outcome: str, setting: Setting) -> CapacityAnswer:
    return replace(answer, answer=Answer(outcome, setting, num_seeds=5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (RATE, "fcfs: 12.3 requests/s (95 % interval 11.9 to 12.8; 5 seeds, 40 runs)"),
        (replace(RATE, answer=Answer("found", (12.345,))), "fcfs: 12.3 requests/s"),
        (
            ended(RATE, "never", (0.5,)),
            "fcfs: the SLO never holds: it fails even at the lowest rate allowed (0.5 requests/s; capacity.rate.min)",
        ),
        (
            ended(RATE, "always", (80.0,)),
            "fcfs: the SLO always holds: even at the highest rate allowed (80 requests/s; capacity.rate.max)",
        ),
        (replace(RATE, answer=None, error="out of memory"), "fcfs: failed: out of memory"),
        (replace(REPLICAS, answer=None, error="out of memory"), "lrs: failed: out of memory"),
        (REPLICAS, "lrs: 3 replicas (95 % interval 3.00 to 4.00 replicas; 5 seeds, 9 runs)"),
        (replace(REPLICAS, answer=Answer("found", (1.0,))), "lrs: 1 replica"),
        (
            ended(REPLICAS, "never", (8.0,)),
            "lrs: the SLO never holds: it fails even with the most replicas allowed (8 replicas)",
        ),
        (
            ended(REPLICAS, "always", (1.0,)),
            "lrs: the SLO always holds: even with the fewest replicas allowed (1 replica)",
        ),
        (MIX, "lrs: 2 small + 1 large, 5.50 $ an hour (95 % interval 5.50 to 7.25 $ an hour; 5 seeds, 9 runs)"),
        (replace(MIX, answer=Answer("found", (0.0, 2.0))), "lrs: 2 large, 7.00 $ an hour"),
        (
            replace(REPLICAS, answer=Answer("found", (3.0,), Interval(3.0, math.inf), 5)),
            "lrs: 3 replicas (95 % interval 3.00 replicas to more than the range allows)",
        ),
    ],
)
def test_an_answer_in_a_sentence(answer: CapacityAnswer, sentence: str) -> None:
    assert answer.sentence == sentence


@pytest.mark.parametrize(
    ("rate", "is_warned"),
    [(12.0, True), (12.3, True), (11.2, True), (11.0, False), (12.4, False)],
    ids=["just below", "at most the answer", "a tenth below", "further below", "above"],
)
def test_runs_just_below_the_answer_that_do_not_keep_up_are_a_warning(rate: float, is_warned: bool) -> None:
    near = replace(RATE, curve=(point((6.0,), 0.2, 0.4), point((rate,), 0.9, 0.9, 0.9, overloaded=2)))
    assert near.sentence.endswith(
        "; 2 of 3 runs just below it are overloaded: in longer runs the SLO would fail at lower rates"
    ) is (is_warned)
    assert near.sentence.startswith(RATE.sentence)


# Rows


def test_a_table_of_rates() -> None:
    header, *rows = answer_rows(
        [RATE, ended(RATE, "never", (0.5,)), replace(RATE, label="edf", answer=None, num_runs=3)]
    )
    assert header == ("setting", "rate, requests/s", "95 % interval", "seeds", "runs", "new runs")
    assert rows == [
        ("fcfs", "12.3", "11.9 to 12.8", "5", "40", "7"),
        ("fcfs", "never holds", "", "5", "40", "7"),
        ("edf", "failed", "", "", "3", "7"),
    ]


def test_a_table_of_replicas() -> None:
    unbounded = replace(REPLICAS, answer=Answer("found", (3.0,), Interval(3.0, math.inf), 5))
    header, *rows = answer_rows([MIX, unbounded])
    assert header[1] == "replicas"
    assert [row[1:3] for row in rows] == [("2 small + 1 large", "5.50 to 7.25"), ("3 replicas", "3.00 or more")]


# Files


def written(answers: list[CapacityAnswer], folder: Path, *formats: str) -> tuple[list[str], list[dict[str, str]]]:
    asked = CapacityConfig(slo=f"{METRIC} <= 1")
    paths = write_capacity_files(answers, asked, folder, formats)
    assert all(path.stat().st_size for path in paths)
    with (folder / "capacity.csv").open() as file:
        return [path.name for path in paths], list(csv.DictReader(file))


def test_the_numbers_of_a_curve_have_a_row_for_each_run(tmp_path: Path) -> None:
    names, rows = written([RATE, replace(RATE, label="edf", curve=RATE.curve[:1])], tmp_path)
    assert names == ["capacity.csv"]
    assert [(row["setting"], row["workload.rate"], row["seed_position"]) for row in rows] == [
        *(("fcfs", rate, seed) for rate in ("6.0", "12.0", "20.0") for seed in "01"),
        *(("edf", "6.0", seed) for seed in "01"),
    ]
    assert [row[METRIC] for row in rows[:4]] == ["0.2", "0.4", "0.9", ""]
    assert float(rows[0]["slack"]) == pytest.approx(0.8)


def test_numbers_of_replicas_have_a_column_for_each_kind(tmp_path: Path) -> None:
    _, rows = written([MIX], tmp_path)
    small, large = MIX.paths
    assert [(row[small], row[large]) for row in rows] == [("2.0", "1.0"), ("0.0", "1.0")]


def test_a_figure_names_settings_and_limit_in_each_format_asked_for(tmp_path: Path) -> None:
    names, _ = written([RATE, replace(RATE, label="edf")], tmp_path, "svg", "png")
    assert names == ["capacity.csv", "capacity.svg", "capacity.png"]
    drawn = (tmp_path / "capacity.svg").read_text()
    for text in ("fcfs", "edf", "rate (requests/s)"):
        assert text in drawn
    again = tmp_path / "again"
    again.mkdir()
    written([RATE, replace(RATE, label="edf")], again, "svg")
    assert (again / "capacity.svg").read_text() == drawn  # without a date


def test_searches_that_got_nowhere_leave_no_files(tmp_path: Path) -> None:
    nothing = replace(RATE, answer=None, curve=(), error="out of memory")
    assert write_capacity_files([nothing], CapacityConfig(slo=f"{METRIC} <= 1"), tmp_path, ["svg"]) == []
    assert not list(tmp_path.iterdir())
    _, rows = written([nothing, RATE], tmp_path)
    assert {row["setting"] for row in rows} == {"fcfs"}


# Searches, whatever the system is like


def drive(search: Search, slack: Callable[[Setting, int], float]) -> tuple[Answer, int]:
    """The answer, and how many runs it took."""
    num_runs = 0
    try:
        probes = next(search)
        while True:
            num_runs += sum(count for _, count in probes)
            probes = search.send({one: [slack(one, k) for k in range(count)] for one, count in probes})
    except StopIteration as stop:
        return stop.value, num_runs


RATES = st.floats(0.02, 5_000)


@settings(max_examples=150)
@given(capacity=RATES, start=RATES, steepness=st.floats(0.05, 50.0), cliff=st.floats(0.0, 5.0))
def test_a_rate_is_found_from_anywhere_however_suddenly_the_slo_fails(
    capacity: float, start: float, steepness: float, cliff: float
) -> None:
    """The slack falls with the logarithm of the rate, and by a jump at the capacity."""
    question = RateQuestion(0.01, 10_000, start, 0.02, 3, 12)

    def slack(setting: Setting, seed: int) -> float:
        distance = math.log(capacity / setting[0])
        return steepness * distance + math.copysign(cliff, distance)

    answer, num_runs = drive(search_rate(question), slack)
    assert answer.outcome == "found"
    assert answer.setting[0] == pytest.approx(capacity, rel=0.021)
    assert answer.interval is not None
    assert answer.interval.low <= answer.setting[0] <= answer.interval.high
    assert num_runs < 200


@settings(max_examples=60)
@given(
    start=RATES,
    noise=st.lists(st.floats(-5, 5), min_size=40, max_size=40),
    high=st.floats(0.05, 10_000),
)
def test_a_search_comes_to_an_end_whatever_it_is_told(start: float, noise: list[float], high: float) -> None:
    """Slacks that have nothing to do with the rate: an answer all the same, within the range, in bounded time."""
    question = RateQuestion(0.01, high, min(start, high), 0.05, 3, 6)
    answer, num_runs = drive(
        search_rate(question), lambda setting, seed: noise[(hash(setting) + 7 * seed) % len(noise)]
    )
    assert 0.01 <= answer.setting[0] <= high * 1.0001
    assert num_runs < 600
    if answer.outcome == "found":
        assert answer.interval is not None
        assert answer.interval.low <= answer.interval.high


@pytest.mark.parametrize(("slack", "outcome", "edge"), [(-1.0, "never", 0.012346), (1.0, "always", 123.4321)])
def test_ends_of_the_range_with_many_digits_are_reached(slack: float, outcome: str, edge: float) -> None:
    question = RateQuestion(0.012346, 123.4321, 2.0, 0.02, 3, 6)
    answer, _ = drive(search_rate(question), lambda setting, seed: slack)
    assert (answer.outcome, answer.setting) == (outcome, (edge,))


def test_a_precision_finer_than_four_digits() -> None:
    question = RateQuestion(0.01, 10_000, 2.0, 1e-5, 3, 3)
    answer, _ = drive(search_rate(question), lambda setting, seed: math.log(7.123456 / setting[0]) + 1e-4 * (seed - 1))
    assert answer.setting[0] == pytest.approx(7.123456, rel=2e-4)


@given(need=st.integers(1, 12), most=st.integers(1, 12))
def test_the_fewest_replicas_are_exact_without_noise(need: int, most: int) -> None:
    answer, _ = drive(search_replicas([range(1, most + 1)], [1.0], 3), lambda one, seed: one[0] - need)
    if need > most:
        assert (answer.outcome, answer.setting) == ("never", (float(most),))
    else:
        assert answer.outcome == ("always" if need == 1 else "found")
        assert answer.setting == (float(need),)
        assert answer.interval is not None
        assert (answer.interval.low, answer.interval.high) == (need, need)
