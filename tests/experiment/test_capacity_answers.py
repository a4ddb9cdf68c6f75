"""Answers about capacity as their readers get them: a sentence, a row, the curve's numbers and figure."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.experiment.searches import ONE, drive, question
from vajra_py.config.capacity import CapacityConfig
from vajra_py.experiment.capacity.answers import CapacityAnswer, CurvePoint
from vajra_py.experiment.capacity.differences import capacity_differences, difference_lines
from vajra_py.experiment.capacity.files import write_capacity_files
from vajra_py.experiment.capacity.rate import search_rate
from vajra_py.experiment.capacity.search import Answer, Setting, search_replicas
from vajra_py.experiment.capacity.seeds import ConditionCapacity, SeedCapacity, condition_capacity, typical_curve
from vajra_py.experiment.capacity.tables import answer_table, difference_table
from vajra_py.metrics.comparison.intervals import Interval
from vajra_py.metrics.comparison.table_renderers import csv_table

METRIC = "p99(ttft)"


def point(setting: Setting, *values: float | None, overloaded: int = 0) -> CurvePoint:
    slack = tuple(-3.0 if one is None else -math.log(one) for one in values)
    return CurvePoint(
        setting, tuple(range(len(values))), {METRIC: values}, tuple((one,) for one in slack), slack, overloaded
    )


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


def shown(answers: list[CapacityAnswer]) -> list[tuple[str, ...]]:
    """Heads and rows as readers see them."""
    table = answer_table(answers, f"{METRIC} <= 1").for_readers
    return [(table.corner, *table.heads), *((row.head, *(cell.plain for cell in row.cells)) for row in table.rows)]


def test_a_table_of_rates() -> None:
    failed = replace(RATE, label="edf", answer=None, num_runs=3, error="out of memory")
    assert shown([RATE, ended(RATE, "never", (0.5,)), failed]) == [
        ("setting", "requests/s", "decided by", "seeds", "runs"),
        ("fcfs", "12.3 [11.9 to 12.8]", "", "5", "40"),
        ("fcfs", "never holds", "", "5", "40"),
        ("edf", "failed", "", "", "3"),
    ]


def test_a_table_of_replicas() -> None:
    unbounded = replace(REPLICAS, answer=Answer("found", (3.0,), Interval(3.0, math.inf), 5))
    header, *rows = shown([MIX, unbounded])
    assert header[1] == "replicas"
    assert [row[1] for row in rows] == ["2 small + 1 large [5.50 to 7.25]", "3 replicas [3.00 or more]"]


def test_a_table_as_csv_has_raw_numbers_and_no_words_in_their_place() -> None:
    failed = replace(RATE, label="edf", answer=None, num_runs=3, error="out of memory")
    text = csv_table(answer_table([RATE, ended(RATE, "never", (0.5,)), failed], "p99(ttft) <= 1"))
    first, never, last = csv.DictReader(text.splitlines())
    assert RATE.answer is not None
    assert RATE.answer.interval is not None
    assert float(first["rate"]) == RATE.answer.setting[0]
    assert (float(first["low"]), float(first["high"])) == (RATE.answer.interval.low, RATE.answer.interval.high)
    assert (first["bound"], first["confidence"], first["num_seeds"], first["num_runs"]) == ("exact", "0.95", "5", "40")
    assert (never["rate"], never["bound"]) == ("", "never")
    assert (last["rate"], last["bound"], last["num_runs"]) == ("", "failed", "3")
    (mix,) = csv.DictReader(csv_table(answer_table([MIX], "p99(ttft) <= 1")).splitlines())
    assert (mix["replicas"], float(mix["cost"])) == ("2 small + 1 large", MIX.cost((2.0, 1.0)))


# Files


def written(
    answers: list[CapacityAnswer], folder: Path, *formats: str, slo: str = f"{METRIC} <= 1"
) -> tuple[list[str], list[dict[str, str]]]:
    asked = CapacityConfig(slo=slo)
    paths = write_capacity_files(answers, asked, folder, formats)
    assert all(path.stat().st_size for path in paths)
    with (folder / "capacity.csv").open() as file:
        return [path.name for path in paths], list(csv.DictReader(file))


def test_the_numbers_of_a_curve_have_a_row_for_each_run(tmp_path: Path) -> None:
    names, rows = written([RATE, replace(RATE, label="edf", curve=RATE.curve[:1])], tmp_path)
    assert names == ["capacity.csv"]
    assert [(row["setting"], row["workload.rate"], row["seed"]) for row in rows] == [
        *(("fcfs", rate, seed) for rate in ("6.0", "12.0", "20.0") for seed in "01"),
        *(("edf", "6.0", seed) for seed in "01"),
    ]
    assert [row[METRIC] for row in rows[:4]] == ["0.2", "0.4", "0.9", ""]
    assert float(rows[0]["slack"]) == pytest.approx(-math.log(0.2))


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
    assert f"{METRIC}, s" in drawn
    of_rates = tmp_path / "of rates"
    of_rates.mkdir()
    points = [replace(one, values={"goodput": one.values[METRIC]}) for one in RATE.curve]
    written([replace(RATE, curve=points)], of_rates, "svg", slo="goodput >= 1")
    assert "goodput, requests/s" in (of_rates / "capacity.svg").read_text()
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


# Sentences about seeds and conditions


def exact(*rates: float) -> tuple[SeedCapacity, ...]:
    return tuple(SeedCapacity(rate) for rate in rates)


def found_rate(
    label: str, *conditions: ConditionCapacity, decides: int = 0, stop: str = "max_replications"
) -> CapacityAnswer:
    own = conditions[decides]
    answer = Answer(
        "found", (own.rate,), own.interval, len(own.by_seed), own.confidence, own.bound, conditions, decides, stop,  # type: ignore[arg-type]
    )  # fmt: skip
    seeds = tuple(range(len(own.by_seed)))
    return replace(RATE, label=label, answer=answer, seeds=seeds, precision_fraction=0.05, curve=())


def seeds_of(text: str, *seeds: SeedCapacity) -> ConditionCapacity:
    return condition_capacity(text, seeds, may_go_on=False)


TTFT = seeds_of("p99(ttft) <= 1", *exact(4.73, 5.09, 5.13, 6.65, 5.56, 6.79))
SHARE = seeds_of("attainment >= 0.9", *exact(6.5, 5.1, 5.4, 6.8, 6.0, 7.2))


def test_a_sentence_says_which_condition_decides_and_that_the_interval_is_too_wide() -> None:
    assert found_rate("vllm", TTFT, SHARE).sentence == (
        "vllm: 5.61 requests/s (95 % interval 4.79 to 6.56; 6 seeds, 40 runs); p99(ttft) <= 1 decides: attainment >= 0.9 holds to 6.12 (5.32 to 7.05)"
        "; ±16 %, not within the 5 % of precision_fraction: stopped at max_replications (6)"
    )


def test_a_sentence_says_that_the_interval_is_as_short_as_wanted() -> None:
    near = seeds_of("p99(ttft) <= 1", *exact(5.0, 5.02, 4.98, 5.01, 4.99))
    assert found_rate("vllm", near, stop="precision").sentence.endswith(
        "; ±0.39 %, within the 5 % of precision_fraction"
    )


def test_a_sentence_of_few_seeds_does_not_speak_of_95_percent() -> None:
    few = seeds_of("p99(ttft) <= 1", *exact(5.0, 5.01, 4.99))
    sentence = found_rate("vllm", few).sentence
    assert "(the seeds' range 4.99 to 5.01 is an interval of 75 %, one of 95 % takes 5 seeds; 3 seeds" in sentence
    assert sentence.endswith(
        "; the 5 % of precision_fraction are of an interval of 95 %: stopped at max_replications (3)"
    )
    one = seeds_of("p99(ttft) <= 1", *exact(5.0))
    assert found_rate("vllm", one, stop="one seed").sentence == "vllm: 5.00 requests/s; one seed: no interval"


@pytest.mark.parametrize(
    ("seed", "begins", "ends"),
    [
        (
            SeedCapacity(80.0, "above"),
            "at least 8.12 requests/s (95 % interval 4.73 or more",
            "1 of 6 seeds hold even at 80 requests/s (capacity.rate.max)",
        ),
        (
            SeedCapacity(0.5, "below"),
            "at most 3.48 requests/s (95 % interval 5.56 or less",
            "1 of 6 seeds fail even at 0.5 requests/s (capacity.rate.min)",
        ),
    ],
)
def test_a_seed_outside_the_range_is_no_exact_capacity(seed: SeedCapacity, begins: str, ends: str) -> None:
    one = found_rate("vllm", seeds_of("p99(ttft) <= 1", seed, *exact(4.73, 5.09, 5.13, 5.56, 5.2)), stop="range")
    assert one.sentence.startswith(f"vllm: {begins}; 6 seeds, ")
    assert one.sentence.endswith(f"; precision_fraction is not reached, {ends}")
    assert one.by_seed is None


# Differences


def test_settings_are_compared_by_common_seeds_and_ranked_only_where_they_are_told_apart() -> None:
    base = [4.73, 5.09, 5.13, 6.65, 5.56, 6.79]
    slow = found_rate("slow", seeds_of("a", *exact(*base)))
    same = found_rate(
        "same",
        seeds_of("a", *exact(*(rate * f for rate, f in zip(base, (1.03, 0.98, 1.0, 1.02, 0.97, 1.03), strict=True)))),
    )
    fast = found_rate(
        "fast",
        seeds_of("a", *exact(*(rate * f for rate, f in zip(base, (1.1, 1.12, 1.08, 1.11, 1.09, 1.1), strict=True)))),
    )
    pairs = {frozenset((one.first, one.second)): one for one in capacity_differences([slow, same, fast])}
    apart = pairs[frozenset(("fast", "slow"))]
    assert (apart.first, apart.is_paired, apart.num_seeds) == ("fast", True, 6)
    assert apart.fraction == pytest.approx(0.1, abs=0.001)
    logs = [math.log(f) for f in (1.1, 1.12, 1.08, 1.11, 1.09, 1.1)]
    assert apart.p_value == pytest.approx(float(stats.ttest_1samp(logs, 0.0).pvalue), rel=1e-6)
    ends = stats.t.interval(0.95, 5, loc=sum(logs) / 6, scale=stats.sem(logs))
    assert (apart.interval.low, apart.interval.high) == pytest.approx(tuple(math.expm1(end) for end in ends))
    assert not pairs[frozenset(("same", "slow"))].is_significant
    assert all(one.corrected_p >= one.p_value for one in pairs.values())
    (row,) = [
        row for row in difference_table([slow, same, fast]).rows if {row.head, row.cells[0].text} == {"fast", "slow"}
    ]
    assert (row.head, row.cells[1].plain) == ("fast", "+10.0 %* [+8.5 % to +11.5 %]")
    lines = difference_lines([slow, same, fast])
    assert lines[-1] == "Highest, told apart from all others: fast"
    assert any(
        line.startswith("fast takes more than slow: +10.0 % (95 % interval +8.5 % to +11.5 %; p = ") for line in lines
    )
    assert any(line.startswith("same and slow are not told apart: ") for line in lines)
    assert difference_lines([slow, same])[-1] == "The highest is not told apart from the next: same, slow"
    assert difference_lines([slow]) == []


def test_a_setting_without_all_its_seeds_capacities_is_not_compared() -> None:
    rates = (4.73, 5.09, 5.13, 5.56, 5.2)
    slow, fast = (
        found_rate("slow", seeds_of("a", *exact(*rates))),
        found_rate("fast", seeds_of("a", *exact(*(2 * one + place / 50 for place, one in enumerate(rates))))),
    )
    open_end = found_rate("open", seeds_of("a", SeedCapacity(80.0, "above"), *exact(*rates[1:])), stop="range")
    said = "Not compared, for lack of several seeds, each with a capacity: open"
    assert difference_lines([slow, fast, open_end])[-1] == said
    single = found_rate("open", seeds_of("a", *exact(100.0)))
    assert difference_lines([slow, fast, single])[-1] == said


def test_answers_seeds_and_differences_are_files_of_numbers(tmp_path: Path) -> None:
    curve = (point((4.0,), *[0.9] * 6), point((8.0,), *[2.0] * 6))
    answers = [replace(found_rate(label, TTFT), curve=curve) for label in ("fcfs", "edf")]
    names, _ = written(answers, tmp_path)
    assert names == ["capacity.csv", "capacity-answers.csv", "capacity-seeds.csv", "capacity-differences.csv"]
    tables = {name: list(csv.DictReader((tmp_path / name).read_text().splitlines())) for name in names[1:]}
    whole, own = tables["capacity-answers.csv"][:2]
    assert (whole["condition"], own["condition"], own["decides"]) == ("slo", TTFT.text, "true")
    assert TTFT.interval is not None
    assert float(whole["rate"]) == TTFT.rate
    assert (float(own["low"]), float(own["high"])) == (TTFT.interval.low, TTFT.interval.high)
    assert [float(row["rate"]) for row in tables["capacity-seeds.csv"]] == [one.rate for one in TTFT.by_seed] * 2
    (pair,) = tables["capacity-differences.csv"]
    assert (float(pair["fraction"]), float(pair["p_value"]), float(pair["corrected_p"])) == (0, 1, 1)


def test_the_line_of_a_figure_crosses_the_limit_at_the_answer() -> None:
    """What the curve, the ring on the limit and the vertical line say is one thing."""
    noise = (0.2, -0.15, 0.05, -0.2, 0.1)
    answer = drive(
        search_rate(question(max_replications=5)), lambda one, seed: 2 * (math.log(5 / one[0]) + noise[seed])
    ).answer
    own = answer.conditions[0]
    rates = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0]
    by_seed = [[(rate, 2 * (math.log(5 / rate) + one)) for rate in rates] for one in noise]
    curve = typical_curve(by_seed, own)
    assert (answer.setting[0], 0.0) in curve
    assert [rate for rate, _ in curve] == sorted(rate for rate, _ in curve)
    assert curve[0][0] < 2 < 10 < curve[-1][0]
    for rate, slack in curve:
        assert slack == pytest.approx(2 * math.log(answer.setting[0] / rate), abs=1e-3)


# Searches on arbitrary systems


RATES = st.floats(0.02, 5_000)


@settings(max_examples=150)
@given(capacity=RATES, start=RATES, steepness=st.floats(0.05, 50.0), cliff=st.floats(0.0, 5.0))
def test_a_rate_is_found_from_anywhere_however_suddenly_the_slo_fails(
    capacity: float, start: float, steepness: float, cliff: float
) -> None:
    """The slack falls with the logarithm of the rate, and by a jump at the capacity."""
    asked = question(0.01, 10_000, start, 0.02, 3, 12)

    def slack(setting: Setting, seed: int) -> float:
        distance = math.log(capacity / setting[0])
        return steepness * distance + math.copysign(cliff, distance)

    found = drive(search_rate(asked), slack)
    answer = found.answer
    assert answer.outcome == "found"
    assert answer.setting[0] == pytest.approx(capacity, rel=0.021)
    assert answer.interval is not None
    assert answer.interval.low <= answer.setting[0] <= answer.interval.high
    assert found.num_runs < 200


@settings(max_examples=60)
@given(
    start=RATES,
    noise=st.lists(st.floats(-5, 5), min_size=40, max_size=40),
    high=st.floats(0.05, 10_000),
)
def test_a_search_comes_to_an_end_whatever_it_is_told(start: float, noise: list[float], high: float) -> None:
    """Slacks that have nothing to do with the rate: an answer all the same, within the range, in bounded time."""
    asked = question(0.01, high, min(start, high), 0.05, 3, 6)
    found = drive(search_rate(asked), lambda setting, seed: noise[(hash(setting) + 7 * seed) % len(noise)])
    answer = found.answer
    assert 0.01 <= answer.setting[0] <= high * 1.0001
    assert found.num_runs < 600
    if answer.outcome == "found":
        assert answer.interval is not None
        assert answer.interval.low <= answer.interval.high


@pytest.mark.parametrize(("slack", "outcome", "edge"), [(-1.0, "never", 0.012346), (1.0, "always", 123.4321)])
def test_ends_of_the_range_with_many_digits_are_reached(slack: float, outcome: str, edge: float) -> None:
    asked = question(0.012346, 123.4321, 2.0, 0.02, 3, 6)
    found = drive(search_rate(asked), lambda setting, seed: slack)
    answer = found.answer
    assert (answer.outcome, answer.setting) == (outcome, (edge,))


def test_a_precision_finer_than_four_digits() -> None:
    asked = question(0.01, 10_000, 2.0, 1e-5, 3, 3)
    found = drive(search_rate(asked), lambda setting, seed: math.log(7.123456 / setting[0]) + 1e-4 * (seed - 1))
    answer = found.answer
    assert answer.setting[0] == pytest.approx(7.123456, rel=2e-4)


@given(need=st.integers(1, 12), most=st.integers(1, 12))
def test_the_fewest_replicas_are_exact_without_noise(need: int, most: int) -> None:
    found = drive(search_replicas(ONE, [range(1, most + 1)], [1.0], 3), lambda one, seed: one[0] - need)
    answer = found.answer
    if need > most:
        assert (answer.outcome, answer.setting) == ("never", (float(most),))
    else:
        assert answer.outcome == ("always" if need == 1 else "found")
        assert answer.setting == (float(need),)
        assert answer.interval is not None
        assert (answer.interval.low, answer.interval.high) == (need, need)
