"""Fit the figures that operator tables do not contain to a measured run: host overhead and a few scale factors.

The first and last tokens of the fitted requests mark ends of steps, and a simulation determines which steps lie between
two such ends. The contribution of each fitted figure to each step is known, so the measured times give a linear
least-squares problem, regularised by the figures' priors. The problem is solved several times, each time with the steps
of a simulation that uses the previous solution. Requests that were not fitted are used to judge the fit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.measured.accuracy import LATENCIES, requests_of
from vajra_py.experiment.measured.calibration_steps import Figure, StepCosts
from vajra_py.experiment.measured.run import MeasuredRequests, MeasuredRun
from vajra_py.experiment.measured.simulation import measured_config, simulate_measured
from vajra_py.latency import Calibration
from vajra_py.metrics.runs.run_data import RunData

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, float], None]
"""Called after each round of a fit with (simulations so far, sum of squared residuals with less weight on large
residuals).
"""

FEWEST_REQUESTS = 20
TPOT_NOISE, INTERVAL_NOISE = 0.01, 0.02
"""Assumed relative standard deviations of the two kinds of measured times: a request's TPOT, which is a mean over
hundreds of steps, and the interval between the ends of two steps that are known from tokens.
"""
MATCHED = 0.08
"""Largest relative difference between the measured and the simulated length of an interval that is used. If the lengths
differ more, the interval probably contains different steps in measurement and simulation.
"""
ROUNDS = 3
"""Number of rounds of a fit; each simulates with the figures of the previous round."""
TOKEN_GAP_S = 1e-3
"""Time between two tokens, in seconds, up to which they are assumed to come from the same step."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Calibration with the figures, errors and residuals of its fit."""

    calibration: Calibration
    figures: tuple[Figure, ...]
    values: tuple[float, ...]
    num_simulations: int
    held_out: Mapping[str, float]
    """Relative error of the mean of each latency metric over the requests that were not fitted."""
    before: Mapping[str, float]
    """Relative errors of the same means before the fit, with every figure at its prior."""

    def lines(self) -> Iterator[str]:
        """Yield lines of text with the figures, the errors on unfitted requests, and the residuals on fitted ones."""
        yield f"fitted on {self.calibration.fitted_on}, {self.num_simulations} simulations"
        yield f"{'figure':<20}{'prior':>12}{'fitted':>12}"
        for figure, value in zip(self.figures, self.values, strict=True):
            unit, factor = ("", 1.0) if figure.is_scale else (" us", 1e6)
            yield f"{figure.name:<20}{factor * figure.prior:>12.4g}{factor * value:>12.4g}{unit}"
        yield f"{'mean, not fitted':<20}{'before':>12}{'after':>12}"
        for name in LATENCIES:
            yield f"{name:<20}{self.before[name]:>+12.1%}{self.held_out[name]:>+12.1%}"
        yield f"{'residuals, fitted':<20}{'p10':>12}{'p50':>12}{'p90':>12}"
        for name in ("ttft", "tpot"):
            yield f"{name:<20}" + "".join(
                f"{self.calibration.residuals[f'{name}_p{one}']:>+12.1%}" for one in (10, 50, 90)
            )


def figures_of(run: MeasuredRun, latency: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Return the figures to fit: scale factors of the operators that the run's deployment uses, and the host overhead
    of its engine.
    """
    config = measured_config(latency)
    latency_model = config.build()
    host = latency_model.host
    scales = [("dense", 0.05), ("decode_attention", 0.1), ("mixed_attention", 0.1)]
    if config.tensor_parallel > 1 or config.data_parallel > 1:
        scales.append(("all_reduce", 0.3))
    if latency_model.model.experts is not None:
        scales.append(("experts", 0.1))
    step = ("exposed_s", host.exposed_s) if host.asynchronous else ("step_base_s", host.step_base_s)
    figures = [Figure(name, 1.0, width, 0.3, is_scale=True) for name, width in scales]
    figures.append(Figure(step[0], step[1], 1e-3, 0.0, is_scale=False))
    if not host.asynchronous:
        figures.append(Figure("step_per_request_s", host.step_per_request_s, 10e-6, 0.0, is_scale=False))
    return tuple(figures)


def calibrate(
    run: MeasuredRun, latency: Mapping[str, Any], fit_fraction: float = 1 / 3, progress: Progress | None = None
) -> Fit:
    """Fit a latency model's figures to the run's first requests and judge the fit by the other requests.

    `latency` is the section `latency:` for the run, from `bundle_latency` or `tables_latency`; `fit_fraction` is the
    fraction of the requests that is fitted.

    Raises:
        ConfigError: There are too few requests to fit or to judge, or the latency model is already calibrated or does
            not use measured operators.
    """
    if latency.get("calibration"):
        raise ConfigError(Problem("latency.calibration", "a calibrated model is not fitted again", "Leave it out"))
    number = len(run.requests.request_id)
    num_fitted = round(fit_fraction * number)
    if num_fitted < FEWEST_REQUESTS or number - num_fitted < FEWEST_REQUESTS:
        message = f"{num_fitted} of {number} requests are fitted, which leaves {number - num_fitted} for validation"
        raise ConfigError(Problem("--fit-fraction", message, f"Allowed: at least {FEWEST_REQUESTS} of each"))
    has_gaps = run.requests.num_output_tokens > 1
    if not has_gaps[:num_fitted].any() or not has_gaps[num_fitted:].any():
        message = "no fitted request, or no other request, has several output tokens, so it has no time between tokens"
        raise ConfigError(Problem("--fit-fraction", message, "Allowed: both kinds have some with 2 tokens or more"))
    trials = _Trials(run, latency, figures_of(run, latency), num_fitted, progress)
    try:
        values = trials.fitted()
        held_out, before = trials.held_out(values), trials.held_out(trials.priors)
    finally:
        trials.close()
    bundle = trials.bundle
    chosen = {one.name: float(value) for one, value in zip(trials.figures, values, strict=True)}
    residuals = trials.residuals_of(values)
    calibration = Calibration(
        model=bundle.model,
        hardware=bundle.hardware,
        tensor_parallel=bundle.tensor_parallel,
        host={one.name: chosen[one.name] for one in trials.figures if not one.is_scale},
        scales={one.name: chosen[one.name] for one in trials.figures if one.is_scale},
        fitted_on=f"{num_fitted} of {number} requests of {run.path.name}",
        errors={f"{name}_s": held_out[name] for name in LATENCIES},
        residuals={f"{name}_p{percent}": float(np.percentile(part, percent)) for name, part in residuals.items()
                   for percent in (10, 50, 90)},
    )  # fmt: skip
    return Fit(calibration, trials.figures, tuple(float(value) for value in values), trials.count, held_out, before)


class _Trials:
    """Simulations of one run under different figures."""

    def __init__(
        self,
        run: MeasuredRun,
        latency: Mapping[str, Any],
        figures: tuple[Figure, ...],
        num_fitted: int,
        progress: Progress | None,
    ) -> None:
        self.figures = figures
        self.count = 0
        self._run, self._latency, self._num_fitted = run, latency, num_fitted
        self._model = measured_config(latency).build()
        self.bundle = self._model.bundle
        self._progress = progress
        self._folder = tempfile.TemporaryDirectory(prefix="vajra-calibrate-")
        fitted = run.requests.first(num_fitted)
        # Concurrent requests share steps, so their errors are correlated. The number of independent errors is taken to
        # be the number of requests that would fit into the same time one after another.
        span = float(fitted.last_token_at.max() - fitted.arrived_at.min())
        self._stretches = max(1.0, span / float(fitted.e2e_s.mean()))
        self._known: dict[tuple[float, ...], MeasuredRequests] = {}

    @property
    def priors(self) -> Floats:
        """Prior value of each figure."""
        return np.array([one.prior for one in self.figures])

    def close(self) -> None:
        """Remove the simulated runs."""
        self._folder.cleanup()

    def fitted(self) -> Floats:
        """Return the values of the figures that minimise the squared residuals, with less weight on large residuals."""
        values = self.priors
        for _ in range(ROUNDS):
            values = self._solved(values)
        return values

    def _solved(self, values: Floats) -> Floats:
        """Return improved values, computed from the steps of a simulation with the given `values`."""
        from scipy.optimize import least_squares

        data, known = self._trial(values)
        steps = StepCosts(data, self._model, self.figures, values)
        measured, simulated = self._run.requests.first(self._num_fitted), known.first(self._num_fitted)
        spent = measured.last_token_at - measured.first_token_at
        several = np.flatnonzero(spent > 0)
        parts, rest = steps.between(simulated.first_token_at, simulated.last_token_at, several)
        weight = np.sqrt(self._stretches / len(several)) / TPOT_NOISE if len(several) else 0.0
        rows, wanted = [weight * parts / spent[several, None]], [weight * (1.0 - rest / spent[several])]
        if steps.num_replicas == 1:
            parts, rest, spent = self._intervals(steps, measured, simulated)
            rows.append(parts / spent[:, None] / INTERVAL_NOISE)
            wanted.append((1.0 - rest / spent) / INTERVAL_NOISE)
        matrix, target = np.concatenate(rows), np.concatenate(wanted)
        widths = np.array([one.width for one in self.figures])
        lows = np.array([one.low for one in self.figures])

        def residuals(units: Floats) -> Floats:
            found: Floats = np.concatenate([matrix @ (self.priors + units * widths) - target, units])
            return found

        start = np.maximum((values - self.priors) / widths, (lows - self.priors) / widths)
        bounds = ((lows - self.priors) / widths - 1e-9, np.full(len(widths), np.inf))
        solution = least_squares(residuals, start, bounds=bounds, loss="soft_l1")
        if self._progress is not None:
            self._progress(self.count, float(2.0 * solution.cost))
        better: Floats = np.maximum(self.priors + solution.x * widths, lows)
        return better

    def _intervals(
        self, steps: StepCosts, measured: MeasuredRequests, simulated: MeasuredRequests
    ) -> tuple[Floats, Floats, Floats]:
        """Return (seconds per unit of each figure, remaining seconds, measured seconds), with one row per interval.

        The first and last tokens of all requests, in order of time, divide the run into intervals. An interval is left
        out if it is very short (`TOKEN_GAP_S`), or its lengths in measurement and simulation differ (`MATCHED`).
        """
        at, there = (np.concatenate([one.first_token_at, one.last_token_at]) for one in (measured, simulated))
        order = np.argsort(at, kind="stable")
        at, there = at[order], there[order]
        spent, taken = np.diff(at), np.diff(there)
        matched = np.flatnonzero((spent > TOKEN_GAP_S) & (np.abs(taken - spent) < MATCHED * spent))
        parts, rest = steps.between(there[:-1], there[1:], matched)
        return parts, rest, spent[matched]

    def held_out(self, values: Floats) -> dict[str, float]:
        """Return the relative error of the mean of each latency metric over the requests that were not fitted."""
        simulated, measured = self._simulated(values), self._run.requests
        errors = {}
        for name in LATENCIES:
            one, other = (getattr(requests, f"{name}_s")[self._num_fitted :] for requests in (simulated, measured))
            errors[name] = float(np.nanmean(one) / np.nanmean(other) - 1.0)
        return errors

    def residuals_of(self, values: Floats) -> dict[str, Floats]:
        """Return the relative errors of TPOT and TTFT of each fitted request."""
        simulated = self._simulated(values).first(self._num_fitted)
        measured = self._run.requests.first(self._num_fitted)
        tpot = simulated.tpot_s / measured.tpot_s - 1.0
        ttft = simulated.ttft_s / measured.ttft_s - 1.0
        return {"tpot": tpot[np.isfinite(tpot)], "ttft": ttft}

    def _simulated(self, values: Floats) -> MeasuredRequests:
        key = tuple(float(value) for value in values)
        return self._known[key] if key in self._known else self._trial(values)[1]

    def _trial(self, values: Floats) -> tuple[RunData, MeasuredRequests]:
        self.count += 1
        data = self._run_of({one.name: float(value) for one, value in zip(self.figures, values, strict=True)})
        requests = self._known[tuple(float(value) for value in values)] = requests_of(data)
        return data, requests

    def _run_of(self, chosen: Mapping[str, float]) -> RunData:
        folder = Path(self._folder.name)
        bundle = self.bundle
        host = {one.name: chosen[one.name] for one in self.figures if not one.is_scale}
        scales = {one.name: chosen[one.name] for one in self.figures if one.is_scale}
        trial = Calibration(bundle.model, bundle.hardware, bundle.tensor_parallel, host, scales, "a trial")
        file = folder / "trial.json"
        trial.write(file)
        return simulate_measured(self._run, {**self._latency, "calibration": str(file)}, folder)
