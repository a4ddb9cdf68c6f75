"""Arrivals, lengths and sessions that are drawn, against theory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from vajra_py.errors import WorkloadError
from vajra_py.workload import (
    ArrivalProcess,
    AtOnce,
    ClosedLoop,
    Constant,
    CoxGamma,
    Distribution,
    FixedInterval,
    Gamma,
    Geometric,
    Lengths,
    Lognormal,
    LognormalMixture,
    LognormalPart,
    OnOff,
    Piece,
    PiecewiseConstant,
    Poisson,
    QuantileGaps,
    QuantileTable,
    RngFor,
    Sessions,
    SystemPrompts,
    Uniform,
    Weibull,
    Workload,
    arrival_times,
    closed_loop_workload,
    named_streams,
    sessions_workload,
    synthetic_workload,
)

Floats = npt.NDArray[np.float64]


def times(process: ArrivalProcess, number: int | None, *, duration_s: float | None = None, seed: int = 3) -> Floats:
    streams = named_streams(seed)
    return arrival_times(
        process, streams("arrivals"), streams("arrival_rates"), num_requests=number, duration_s=duration_s
    )


def dispersion(arrived_at: Floats, window_s: float) -> float:
    """Variance over mean of the counts per window; 1 for Poisson."""
    counts = np.bincount((arrived_at / window_s).astype(int))[:-1]
    return float(counts.var() / counts.mean())


PROCESSES: list[ArrivalProcess] = [
    Poisson(rate=4),
    Gamma(rate=4, cv=2.5),
    Gamma(rate=4, cv=0.5),
    Weibull(rate=4, shape=0.7),
    QuantileGaps(rate=4, probabilities=(0, 0.5, 0.9, 1), gaps_s=(0.01, 0.1, 0.3, 5)),
    FixedInterval(rate=4),
    OnOff(rate=4, mean_on_s=2, mean_off_s=6),
    OnOff(rate=4, mean_on_s=2, mean_off_s=2, off_rate_fraction=0.2),
    PiecewiseConstant(pieces=(Piece(duration_s=10, rate=6), Piece(duration_s=5, rate=0)), repeat=True),
    CoxGamma(rate=4, shape=20, window_s=10),
]


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.type)
def test_arrivals_ascend_at_their_rate(process: ArrivalProcess) -> None:
    arrived_at = times(process, 40_000)
    assert len(arrived_at) == 40_000
    assert arrived_at[0] >= 0
    assert bool(np.all(np.diff(arrived_at) >= 0))
    assert len(arrived_at) / arrived_at[-1] == pytest.approx(4, rel=0.06)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.type)
def test_more_requests_or_a_duration_do_not_move_the_first_ones(process: ArrivalProcess) -> None:
    many = times(process, 9000)
    np.testing.assert_array_equal(times(process, 100), many[:100])
    bounded = times(process, None, duration_s=100.0)
    np.testing.assert_array_equal(bounded, many[many < 100.0])
    np.testing.assert_array_equal(times(process, 50, duration_s=1000.0), many[:50])


@pytest.mark.parametrize(
    ("process", "law"),
    [
        (Poisson(rate=4), stats.expon(scale=0.25)),
        (Gamma(rate=4, cv=2), stats.gamma(0.25, scale=1.0)),
        (Weibull(rate=4, shape=0.7), stats.weibull_min(0.7, scale=0.25 / math.gamma(1 + 1 / 0.7))),
        (CoxGamma(rate=4, shape=1e6), stats.expon(scale=0.25)),
        (OnOff(rate=4, mean_on_s=1, mean_off_s=1, off_rate_fraction=1.0), stats.expon(scale=0.25)),
        (PiecewiseConstant(pieces=(Piece(duration_s=3, rate=4),), repeat=True), stats.expon(scale=0.25)),
    ],
    ids=["poisson", "gamma", "weibull", "cox", "on_off", "piecewise"],
)
def test_gaps_have_their_distribution(process: ArrivalProcess, law: stats.rv_continuous) -> None:
    gaps = np.diff(times(process, 20_000), prepend=0.0)
    assert stats.kstest(gaps, law.cdf).pvalue > 1e-3


def test_gamma_gaps_have_their_variation() -> None:
    for cv in (0.4, 1.0, 3.0):
        gaps = np.diff(times(Gamma(rate=2, cv=cv), 60_000))
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_bursts_are_as_long_as_asked() -> None:
    process = OnOff(rate=20, mean_on_s=5, mean_off_s=15)
    arrived_at = times(process, 200_000)
    gaps = np.diff(arrived_at)
    silences = gaps[gaps > 0.5]  # within an on time, 80 requests/s leave no gap that long
    assert arrived_at[-1] / len(silences) == pytest.approx(20, rel=0.1)
    assert silences.mean() == pytest.approx(15, rel=0.1)
    assert dispersion(arrived_at, 1.0) > 10 * dispersion(times(Poisson(rate=20), 200_000), 1.0)


def test_piecewise_rates_are_met_piece_by_piece() -> None:
    pieces = (Piece(duration_s=100, rate=50), Piece(duration_s=50, rate=0), Piece(duration_s=100, rate=10))
    process = PiecewiseConstant(pieces=pieces)
    arrived_at = times(process, None)
    counts = [
        int(((arrived_at >= low) & (arrived_at < high)).sum()) for low, high in ((0, 100), (100, 150), (150, 250))
    ]
    assert counts[0] == pytest.approx(5000, abs=300)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(1000, abs=130)
    assert sum(counts) == len(arrived_at)
    assert process.rate == pytest.approx(6000 / 250)
    with pytest.raises(WorkloadError, match=r"the rates last for \d+ requests only \(9000 requested\)"):
        times(process, 9000)


def test_a_wandering_rate_is_overdispersed_between_windows_only() -> None:
    arrived_at = times(CoxGamma(rate=5, shape=22, window_s=60), 100_000)
    assert dispersion(arrived_at, 60.0) == pytest.approx(1 + 300 / 22, rel=0.25)
    assert dispersion(arrived_at, 0.1) == pytest.approx(1.0, abs=0.1)


def test_even_arrivals_and_a_batch() -> None:
    assert times(FixedInterval(rate=4), 4).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert times(AtOnce(), 3).tolist() == [0.0, 0.0, 0.0]


def test_arrivals_without_an_end_or_without_any_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"poisson arrivals have no end\. num_requests or duration_s"):
        times(Poisson(rate=1), None)
    with pytest.raises(WorkloadError, match="at_once arrivals have no end"):
        times(AtOnce(), None, duration_s=1.0)
    with pytest.raises(WorkloadError, match="no request arrives"):
        times(Poisson(rate=1e-9), None, duration_s=1.0)


# --- Lengths ----------------------------------------------------------------------------------------------------------

TABLE = QuantileTable(probabilities=(0, 0.25, 0.5, 1), values=(1, 10, 100, 1000))


@pytest.mark.parametrize(
    ("distribution", "mean", "median"),
    [
        (Constant(value=7), 7, 7),
        (Uniform(min=10, max=20), 15, 15),
        (Lognormal(mu=6, sigma=0.5), math.exp(6.125), math.exp(6)),
        (Lognormal(mu=6, sigma=0.5, max=403), None, 403),
        (
            LognormalMixture(
                parts=(LognormalPart(weight=1, mu=4, sigma=0.1), LognormalPart(weight=3, mu=7, sigma=0.2))
            ),
            0.25 * math.exp(4.005) + 0.75 * math.exp(7.02),
            math.exp(7 + 0.2 * stats.norm.ppf(1 / 3)),
        ),
        (Geometric(p=0.2), 5, 4),
        (TABLE, 0.25 * 9 / math.log(10) + 0.25 * 90 / math.log(10) + 0.5 * 900 / math.log(10), 100),
        (TABLE.model_copy(update={"interpolation": "linear"}), 0.25 * 5.5 + 0.25 * 55 + 0.5 * 550, 100),
    ],
)
def test_lengths_have_their_mean_and_median(distribution: Distribution, mean: float | None, median: float) -> None:
    lengths = Lengths(prompt_tokens=distribution, output_tokens=Constant(value=1))
    drawn, _ = lengths.draw(np.random.default_rng(5), 100_000)
    assert drawn.min() >= 1
    assert np.median(drawn) == pytest.approx(median, rel=0.02)
    if mean is not None:
        assert drawn.mean() == pytest.approx(mean, rel=0.02)


def test_a_uniform_length_takes_each_whole_number_alike() -> None:
    lengths = Lengths(prompt_tokens=Uniform(min=3, max=6), output_tokens=Constant(value=1))
    drawn, _ = lengths.draw(np.random.default_rng(5), 40_000)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6]
    assert counts.min() > 9_600


def test_values_below_one_of_a_logarithmic_table_count_as_one() -> None:
    table = QuantileTable(probabilities=(0, 0.5, 1), values=(0, 0, 100))
    drawn, _ = Lengths(prompt_tokens=table, output_tokens=table).draw(np.random.default_rng(5), 1000)
    assert (drawn.min(), np.median(drawn)) == (1, 1)


@pytest.mark.parametrize("correlation", [-0.8, 0.0, 0.6, 1.0])
def test_the_copula_correlates_any_two_distributions(correlation: float) -> None:
    lengths = Lengths(prompt_tokens=Lognormal(mu=8, sigma=1), output_tokens=TABLE, correlation=correlation)
    prompts, outputs = lengths.draw(np.random.default_rng(5), 50_000)
    # Rank correlation of a Gaussian copula: 6 / pi * arcsin(rho / 2).
    expected = 6 / math.pi * math.asin(correlation / 2)
    assert stats.spearmanr(prompts, outputs).statistic == pytest.approx(expected, abs=0.02)
    alone, _ = Lengths(prompt_tokens=Lognormal(mu=8, sigma=1), output_tokens=Constant(value=1)).draw(
        np.random.default_rng(5), 50_000
    )
    np.testing.assert_array_equal(prompts, alone)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lognormal(mu=1, sigma=-1),
        lambda: Lognormal(mu=1, sigma=1, min=5, max=4),
        lambda: Uniform(min=5, max=4),
        lambda: Geometric(p=0),
        lambda: QuantileTable(probabilities=(0, 1), values=(1, 2, 3)),
        lambda: QuantileTable(probabilities=(0, 0.9), values=(1, 2)),
        lambda: QuantileTable(probabilities=(0, 1), values=(2, 1)),
        lambda: LognormalMixture(parts=()),
        lambda: Poisson(rate=0),
        lambda: Poisson(rate=math.inf),
        lambda: Gamma(rate=1, cv=0),
        lambda: PiecewiseConstant(pieces=(Piece(duration_s=1, rate=0),)),
        lambda: QuantileGaps(rate=1, probabilities=(0, 1), gaps_s=(2, 1)),
    ],
)
def test_parameters_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(ValidationError):
        make()  # type: ignore[operator]


# --- Workloads --------------------------------------------------------------------------------------------------------

SHORT = Lengths(prompt_tokens=Uniform(min=1, max=50), output_tokens=Uniform(min=1, max=50))


def test_the_same_seed_gives_the_same_workload_and_another_another() -> None:
    one, two, three = (
        list(synthetic_workload(Poisson(rate=1), SHORT, named_streams(seed), num_requests=50)) for seed in (1, 1, 2)
    )
    assert one == two
    assert one != three


def test_changing_the_arrivals_moves_no_length(streams: RngFor) -> None:
    one = synthetic_workload(Poisson(rate=1), SHORT, streams, num_requests=100)
    two = synthetic_workload(OnOff(rate=9, mean_on_s=1, mean_off_s=1), SHORT, streams, num_requests=100)
    assert [r.num_prompt_tokens for r in one] == [r.num_prompt_tokens for r in two]
    assert [r.arrived_at for r in one] != [r.arrived_at for r in two]


@given(st.integers(1, 7), st.integers(1, 40), st.floats(0, 10))
@settings(max_examples=40)
def test_users_take_turns(num_users: int, num_requests: int, ramp_up_s: float) -> None:
    loop = ClosedLoop(num_users=num_users, think_time_s=Uniform(min=1, max=3), ramp_up_s=ramp_up_s)
    requests = list(closed_loop_workload(loop, SHORT, named_streams(1), num_requests))
    assert len(requests) == num_requests
    first = [r for r in requests if r.follows is None]
    assert len(first) == min(num_users, num_requests)
    assert max(r.arrived_at for r in first) <= ramp_up_s
    by_id = {r.request_id: r for r in requests}
    for request in requests:
        if request.follows is not None:
            before = by_id[request.follows]
            assert before.session_id == request.session_id
            assert 1 <= request.think_time_s <= 3
            assert request.arrived_at == pytest.approx(before.arrived_at + request.think_time_s)
    followed = [r.follows for r in requests if r.follows is not None]
    assert len(set(followed)) == len(followed)


session_shapes = st.builds(
    Sessions,
    turns=st.builds(Geometric, p=st.floats(0.2, 1), max=st.just(8)),
    first_turn_tokens=st.just(Uniform(min=1, max=60)),
    first_turn_tokens_include_system=st.booleans(),
    turn_tokens=st.just(Uniform(min=1, max=60)),
    turn_tokens_include_output=st.booleans(),
    output_tokens=st.just(Uniform(min=1, max=30)),
    think_time_s=st.just(Lognormal(mu=1, sigma=1)),
    system_prompts=st.none()
    | st.builds(
        SystemPrompts, count=st.integers(1, 3), tokens=st.just(Uniform(min=5, max=20)), zipf_exponent=st.floats(0, 2)
    ),
    reset_fraction=st.sampled_from([0.0, 0.3]),
    max_context_tokens=st.none() | st.integers(61, 200),
    mode=st.sampled_from(["closed", "open"]),
)


@given(session_shapes, st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_a_turn_holds_the_history_of_its_session(shape: Sessions, num_sessions: int, seed: int) -> None:
    workload = sessions_workload(shape, Poisson(rate=1), named_streams(seed), num_sessions=num_sessions)
    arrived_at = [r.arrived_at for r in workload]
    assert arrived_at == sorted(arrived_at)
    by_session: dict[str, list[object]] = {}
    for request in workload:
        assert request.content is not None
        assert request.content.num_tokens == request.num_prompt_tokens
        if shape.max_context_tokens is not None:
            assert request.num_prompt_tokens <= shape.max_context_tokens
        turns = by_session.setdefault(request.session_id, [])
        before = turns[-1] if turns else None
        turns.append(request)
        if before is None:
            assert request.follows is None
            continue
        assert type(before) is type(request)
        assert before.content is not None
        assert request.follows == (before.request_id if shape.mode == "closed" else None)
        if ("out", before.request_id) in dict(request.content.segments):
            history = (*before.content.segments, (("out", before.request_id), before.num_output_tokens))
            assert request.content.segments[:-1] == history
        else:
            assert shape.reset_fraction > 0
            assert len(request.content.segments) <= 2
    systems = {
        r.content.segments[0]
        for r in workload
        if r.content is not None and r.content.segments[0][0][0] == "system"  # type: ignore[index]
    }
    assert len(systems) <= (shape.system_prompts.count if shape.system_prompts else 0)


def test_new_sessions_do_not_change_the_ones_before(streams: RngFor) -> None:
    shape = Sessions(
        turns=Geometric(p=0.3),
        first_turn_tokens=Uniform(min=1, max=60),
        turn_tokens=Uniform(min=1, max=60),
        output_tokens=Uniform(min=1, max=60),
    )

    def facts(workload: Workload, session: str) -> list[tuple[float, int, int]]:
        return [(r.arrived_at, r.num_prompt_tokens, r.num_output_tokens) for r in workload if r.session_id == session]

    few = sessions_workload(shape, Poisson(rate=1), streams, num_sessions=3)
    many = sessions_workload(shape, Poisson(rate=1), streams, num_sessions=30)
    for session in ("session-0", "session-1", "session-2"):
        assert facts(few, session) == facts(many, session)


def test_system_prompts_are_shared_between_sessions_by_zipf(streams: RngFor) -> None:
    shape = Sessions(
        turns=Constant(value=1),
        first_turn_tokens=Constant(value=10),
        turn_tokens=Constant(value=10),
        output_tokens=Constant(value=10),
        system_prompts=SystemPrompts(count=4, tokens=Constant(value=90), zipf_exponent=1.0),
    )
    workload = sessions_workload(shape, Poisson(rate=1), streams, num_sessions=4000)
    assert workload.statistics().prefix_share_fraction == pytest.approx(0.9 * (4000 - 4) / 4000)
    used = np.array([r.content.segments[0][0][1] for r in workload if r.content is not None])  # type: ignore[index]
    shares = np.bincount(used.astype(int)) / 4000
    assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.03)


def test_sessions_that_fit_nowhere_are_refused(streams: RngFor) -> None:
    shape = Sessions(
        turns=Constant(value=2),
        first_turn_tokens=Constant(value=100),
        turn_tokens=Constant(value=1),
        output_tokens=Constant(value=1),
        max_context_tokens=50,
    )
    with pytest.raises(WorkloadError, match=r"no prompt fits max_context_tokens \(50\)"):
        sessions_workload(shape, Poisson(rate=1), streams, num_sessions=2)
