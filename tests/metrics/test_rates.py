"""Rates: those of a steady system whatever its drain, of an overloaded one the pace at which it works, and none where there is nothing to take them over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.metrics.definitions import Floats, Window
from vajra_py.metrics.summary.rates import RateTime, rate_time, steady_window


def measured(
    arrived_at: Floats, completed_at: Floats, *, is_stable: bool, admitted_at: Floats | None = None
) -> tuple[RateTime, float]:
    """The time, and requests completed per second of it."""
    moments = np.concatenate((arrived_at, completed_at[~np.isnan(completed_at)]))
    window = Window(float(arrived_at.min()), float(moments.max()))
    found = rate_time(
        arrived_at, arrived_at if admitted_at is None else admitted_at, completed_at, window, is_stable=is_stable
    )
    count = int((~np.isnan(completed_at)).sum())
    return found, count / found.duration_s if found.duration_s else float("nan")


def queue(arrived_at: Floats, service_s: float) -> tuple[Floats, Floats]:
    """Admissions and completions of one server, first come first served."""
    admitted = np.empty_like(arrived_at)
    free = 0.0
    for i, at in enumerate(arrived_at):
        admitted[i] = max(free, at)
        free = admitted[i] + service_s
    return admitted, admitted + service_s


@given(st.floats(0.0, 1000.0))
def test_a_stable_run_delivers_what_was_offered_however_long_its_last_answer_is(extra_s: float) -> None:
    arrived_at = np.arange(101) * 0.5
    completed_at = arrived_at + 3.0
    completed_at[-1] += extra_s
    found, rate = measured(arrived_at, completed_at, is_stable=True)
    assert rate == pytest.approx(2.0)
    assert found.over == "arrivals"
    assert found.drain_s == pytest.approx(3.0 + extra_s)
    assert found.num_completed_in_drain == 6


@pytest.mark.parametrize("load", [1.05, 1.5, 4.0])
def test_an_overloaded_run_has_the_pace_of_its_server(load: float) -> None:
    arrived_at = np.arange(1000) / load
    admitted_at, completed_at = queue(arrived_at, 1.0)
    found, rate = measured(arrived_at, completed_at, is_stable=False, admitted_at=admitted_at)
    assert rate == pytest.approx(1.0, rel=0.01)
    assert found.over == "completions"


def test_one_long_answer_does_not_change_the_pace_of_an_overloaded_run() -> None:
    arrived_at = np.arange(1000) / 2
    admitted_at, completed_at = queue(arrived_at, 1.0)
    before = measured(arrived_at, completed_at, is_stable=False, admitted_at=admitted_at)[1]
    completed_at[-1] += 500.0
    assert measured(arrived_at, completed_at, is_stable=False, admitted_at=admitted_at)[1] == before


def test_a_run_that_is_cut_off_has_the_pace_of_what_it_completed() -> None:
    arrived_at = np.arange(1000) / 2
    admitted_at, completed_at = queue(arrived_at, 1.0)
    completed_at[completed_at > 500] = np.nan
    assert measured(arrived_at, completed_at, is_stable=False, admitted_at=admitted_at)[1] == pytest.approx(
        1.0, rel=0.01
    )


def test_a_batch_that_comes_at_once_is_timed_from_its_first_admission() -> None:
    at_once = np.zeros(64)
    one_wave = measured(at_once, np.full(64, 8.0), is_stable=True)
    assert one_wave[1] == pytest.approx(8.0)
    waves = np.repeat(np.arange(1.0, 33.0), 2)  # two every second
    assert measured(at_once, waves, is_stable=True)[1] == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize("clients", [1, 16, 64])
def test_a_closed_loop_delivers_what_its_clients_get(clients: int) -> None:
    """Each client sends a request a second after its last one, answered at once when the next is sent: `clients` a second, however few seconds there are."""
    arrived_at = np.repeat(np.arange(5.0), clients)
    _, rate = measured(arrived_at, arrived_at + 1.0, is_stable=True)
    assert rate == pytest.approx(clients)


def test_a_run_too_short_to_show_its_pace_does_not_claim_the_offered_load() -> None:
    arrived_at = np.arange(5) * 0.01  # 100 requests per second, all finished seconds later
    _, rate = measured(arrived_at, np.array([2.0, 2.5, 3.0, 3.5, 4.0]), is_stable=True)
    assert rate == pytest.approx(5 / 4.0)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_completed_requests_have_no_rate(count: int) -> None:
    arrived_at = np.arange(4.0)
    completed_at = np.full(4, np.nan)
    completed_at[:count] = 9.0
    assert measured(arrived_at, completed_at, is_stable=True)[0].duration_s is None


def test_time_in_which_requests_arrive_is_what_utilisation_is_measured_over() -> None:
    window = Window(1.0, 9.0)
    assert steady_window(window, {"last_arrival_at": 4.0}) == Window(1.0, 4.0)
    assert steady_window(window, {"last_arrival_at": 1.0}) == window
    assert steady_window(window, {"last_arrival_at": None}) == window


@given(st.integers(2, 200), st.floats(0.01, 50.0), st.integers(0, 2**32 - 1), st.booleans())
def test_a_rate_never_exceeds_what_was_offered_nor_falls_below_the_whole_run(
    count: int, service_s: float, seed: int, is_stable: bool
) -> None:
    arrived_at = np.sort(np.random.default_rng(seed).uniform(0, 100, count))
    admitted_at, completed_at = queue(arrived_at, service_s)
    found, rate = measured(arrived_at, completed_at, is_stable=is_stable, admitted_at=admitted_at)
    offered = (count - 1) / float(np.ptp(arrived_at))
    whole = (count - 1) / float(completed_at.max() - arrived_at.min())  # the last interval has no request after it
    assert rate <= offered * (1 + 1e-9)
    assert rate >= whole * (1 - 1e-9)
    assert found.drain_s == pytest.approx(completed_at.max() - arrived_at.max())
