"""Compare a simulation with the measured run that it reproduces: errors of latencies by request, and of the load by
second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vajra_py.errors import RunError
from vajra_py.experiment.measured.run import MeasuredRequests, MeasuredRun
from vajra_py.metrics.comparison.table_model import Cell, Row, Table
from vajra_py.metrics.definitions import quantiles
from vajra_py.metrics.runs.run_data import RunData

Floats = npt.NDArray[np.float64]

MEAN_BOUND = 0.08
"""Largest relative error with which a validation passes, for the throughput and the means of TPOT, E2E and TBT."""
TTFT_BOUND = 0.15
FEWEST_ROWS = 5
"""Minimum number of log rows after the last request was first scheduled. If there are at least this many, only they are
used to match the log's clock; otherwise, all rows are used.
"""
QUANTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class MetricError:
    """Error of one metric: measured and simulated value."""

    name: str
    measured: float
    simulated: float
    bound: float | None = None
    """Largest relative error that passes; None for no limit."""

    @property
    def relative(self) -> float:
        """Relative error: simulated / measured - 1."""
        if self.measured == self.simulated:
            return 0.0
        return self.simulated / self.measured - 1.0 if self.measured else float("inf")

    @property
    def passes(self) -> bool:
        """True if the relative error is within the bound."""
        return self.bound is None or abs(self.relative) <= self.bound


@dataclass(frozen=True, slots=True)
class SeriesError:
    """Error of a quantity over time: mean absolute difference over the points in time, divided by the measured mean."""

    name: str
    seconds: Floats
    measured: Floats
    simulated: Floats

    @property
    def relative(self) -> float:
        """Relative error; 0 if both series are zero throughout, infinite if only the measured mean is zero."""
        mean = float(self.measured.mean())
        difference = float(np.abs(self.measured - self.simulated).mean())
        return difference / mean if mean else (0.0 if not difference else float("inf"))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Comparison of a simulation with the run that it reproduces."""

    name: str
    measured: MeasuredRequests
    simulated: MeasuredRequests
    errors: tuple[MetricError, ...]
    series: tuple[SeriesError, ...]
    trust: str
    """Origin of the step times."""

    @property
    def passes(self) -> bool:
        """True if every error is within its bound."""
        return all(one.passes for one in self.errors)

    def table(self) -> Table:
        """Return a table with a row per metric: measured value, simulated value, error, and the bound if the error
        exceeds it.
        """
        rows = [
            Row(
                one.name,
                (
                    Cell(f"{one.measured:.5g}", value=one.measured),
                    Cell(f"{one.simulated:.5g}", value=one.simulated),
                    Cell(f"{one.relative:+.1%}", "" if one.passes else f"beyond {one.bound:.0%}", value=one.relative),
                ),
            )
            for one in self.errors
        ]
        for series in self.series:
            means = float(series.measured.mean()), float(series.simulated.mean())
            cells = [Cell(f"{mean:.4g}", value=mean) for mean in means]
            rows.append(
                Row(f"{series.name}, by second", (*cells, Cell(f"{series.relative:.1%}", value=series.relative)))
            )
        return Table("metric", ("measured", "simulated", "error"), tuple(rows))


def compare_with_measured(run: MeasuredRun, simulated: RunData) -> Accuracy:
    """Return the errors of a simulation of a measured run.

    Raises:
        RunError: The simulation did not finish, or served other requests.
    """
    served = requests_of(simulated)
    if set(served.request_id) != set(run.requests.request_id):
        raise RunError(f"{simulated.path}: did not serve the requests of {run.path}. Simulate the run's own workload.")
    served = served.in_order(run.requests.request_id)
    trust = str(simulated.summary.value("step_times.sentence") or "unknown")
    return Accuracy(
        run.path.name,
        run.requests,
        served,
        (*latency_errors(run.requests, served), *gap_errors(run.requests, simulated)),
        tuple(series_errors(run, served, simulated)),
        trust,
    )


def requests_of(simulated: RunData) -> MeasuredRequests:
    """Return a simulated run's requests in the form of measured ones.

    Raises:
        RunError: A request did not receive its complete answer.
    """
    table = simulated.requests(
        "request_id",
        "num_prompt_tokens",
        "num_output_tokens",
        "arrived_at",
        "admitted_at",
        "first_token_at",
        "ended_at",
    )
    columns = {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}
    order = np.argsort(columns["arrived_at"], kind="stable")
    ended = columns["ended_at"].astype(np.float64)
    if not np.isfinite(ended).all() or not np.isfinite(columns["first_token_at"].astype(np.float64)).all():
        raise RunError(f"{simulated.path}: not every request was served. Simulate the run to its end.")
    return MeasuredRequests(
        request_id=tuple(columns["request_id"][order]),
        num_prompt_tokens=columns["num_prompt_tokens"][order].astype(np.int64),
        num_output_tokens=columns["num_output_tokens"][order].astype(np.int64),
        arrived_at=columns["arrived_at"][order].astype(np.float64),
        first_token_at=columns["first_token_at"][order].astype(np.float64),
        last_token_at=ended[order],
        scheduled_at=columns["admitted_at"][order].astype(np.float64),
    )


def latency_errors(measured: MeasuredRequests, simulated: MeasuredRequests) -> Iterator[MetricError]:
    """Yield the errors of mean and quantiles of TTFT, TPOT and E2E in milliseconds, and the error of the output
    throughput.
    """
    for name in LATENCIES:
        bound = TTFT_BOUND if name == "ttft" else MEAN_BOUND
        one, other = (1e3 * getattr(requests, f"{name}_s") for requests in (measured, simulated))
        one, other = one[np.isfinite(one)], other[np.isfinite(other)]
        if len(one) and len(other):
            yield MetricError(f"{name}_mean_ms", float(one.mean()), float(other.mean()), bound)
            for label, percent in QUANTILES.items():
                yield MetricError(
                    f"{name}_{label}_ms", float(np.percentile(one, percent)), float(np.percentile(other, percent))
                )
    rate, other_rate = (
        float(requests.num_output_tokens.sum() / (requests.last_token_at.max() - requests.arrived_at.min()))
        for requests in (measured, simulated)
    )
    yield MetricError("output_tokens_per_s", rate, other_rate, MEAN_BOUND)


def gap_errors(measured: MeasuredRequests, simulated: RunData) -> Iterator[MetricError]:
    """Yield the errors of mean and quantiles of the gaps between tokens of all requests, in milliseconds; nothing if
    gaps were not measured.
    """
    gaps = measured.tbt_s
    if gaps is None or not len(gaps):
        return
    mine = {"mean": float(gaps.mean())}
    mine |= dict(zip(QUANTILES, quantiles(gaps, [percent / 100 for percent in QUANTILES.values()]), strict=True))
    for name, value in mine.items():
        other = simulated.summary.value(f"overall.tbt_s.{name}")
        if other is not None:
            bound = MEAN_BOUND if name == "mean" else None
            yield MetricError(f"tbt_{name}_ms", 1e3 * value, 1e3 * float(other), bound)


def series_errors(run: MeasuredRun, simulated: MeasuredRequests, data: RunData) -> Iterator[SeriesError]:
    """Yield the errors of running and waiting requests by second, from the first arrival to the last end in either run;
    nothing without scheduling times.

    If the run has a log, yield also the errors of the generated tokens per second by the log's intervals and, if the
    log has it, of the KV use by second.
    """
    measured = run.requests
    end = float(max(measured.last_token_at.max(), simulated.last_token_at.max()))
    seconds = np.arange(0.5, end + 1.0)
    if measured.scheduled_at is None or simulated.scheduled_at is None:
        return
    for name, start, stop in (("running", "scheduled_at", "last_token_at"), ("waiting", "arrived_at", "scheduled_at")):
        yield SeriesError(
            name,
            seconds,
            _present(getattr(measured, start), getattr(measured, stop), seconds),
            _present(getattr(simulated, start), getattr(simulated, stop), seconds),
        )
    log = run.series
    if log is None or len(log["t"]) < 2:
        return
    at = log["t"] - _log_shift(run, log)
    edges = np.concatenate([[at[0] - float(np.median(np.diff(at)))], at])
    generated = _simulated_tokens(data, simulated, edges) / np.diff(edges)
    yield SeriesError("gen_throughput", (edges[:-1] + edges[1:]) / 2, log["gen_throughput"], generated)
    if log.get("kv_cache_pct", np.zeros(1)).any():
        steps = data.steps("formed_at", "used_fraction")
        formed, used = (steps.column(name).to_numpy() for name in steps.column_names)
        order = np.argsort(formed, kind="stable")
        simulated_use = np.interp(seconds, formed[order], 100.0 * used[order], right=0.0)
        yield SeriesError("kv_use_pct", seconds, np.interp(seconds, at, log["kv_cache_pct"], right=0.0), simulated_use)


def _present(start: Floats, stop: Floats, at: Floats) -> Floats:
    """Return the number of requests that have started and not stopped at each time."""
    begun = np.searchsorted(np.sort(start), at, side="right")
    ended = np.searchsorted(np.sort(stop), at, side="right")
    return (begun - ended).astype(np.float64)


def _log_shift(run: MeasuredRun, log: Mapping[str, Floats]) -> float:
    """Return the seconds by which the log's clock is ahead of the requests' clock: the shift with which the number of
    running requests in the log agrees best with the number that follows from the requests' times.

    Log and client observe a request's end at the same time, but the log counts a request as running only once its first
    step has been launched. Therefore, rows logged after all requests had been scheduled are preferred, if there are
    enough of them.
    """
    requests = run.requests
    assert requests.scheduled_at is not None  # `series_errors` returns earlier without scheduling times
    at, running = log["t"], log["running"]
    only_ends = (at > float(requests.scheduled_at.max()) + 2.0) & (at < float(requests.last_token_at.max()) + 2.0)
    if np.count_nonzero(only_ends) >= FEWEST_ROWS:
        at, running = at[only_ends], running[only_ends]
    shifts = np.arange(-2.0, 2.0, 0.02)
    gaps = [
        float(np.abs(_present(requests.scheduled_at, requests.last_token_at, at - shift) - running).sum())
        for shift in shifts
    ]
    return float(np.mean(shifts[np.array(gaps) <= min(gaps)]))


def _simulated_tokens(data: RunData, requests: MeasuredRequests, edges: Floats) -> Floats:
    """Return the number of generated tokens in each interval as an engine counts them: decode tokens at the end of
    their step, and first tokens at their own time.
    """
    table = data.steps("formed_at", "duration_s", "num_decodes")
    formed, duration, decodes = (table.column(name).to_numpy() for name in table.column_names)
    at = np.concatenate([formed + duration, requests.first_token_at])
    tokens = np.concatenate([decodes.astype(np.float64), np.ones(len(requests.first_token_at))])
    order = np.argsort(at, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(tokens[order])])
    counted: Floats = np.diff(total[np.searchsorted(at[order], edges, side="right")])
    return counted
