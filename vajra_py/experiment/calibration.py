"""Fit what operator tables cannot know, host overhead and a few scale factors, to a measured run.

Every trial simulates the run's requests. Residuals are the relative errors of each fitted request's TTFT and TPOT; each figure is held
to its prior, so that one that the run says nothing about stays where it was. What the fit did not see judges it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.accuracy import LATENCIES, requests_of
from vajra_py.experiment.measured_run import MeasuredRequests, MeasuredRun
from vajra_py.experiment.measured_simulation import simulate_measured
from vajra_py.latency import Calibration, ProfileBundleConfig
from vajra_py.metrics.run_data import RunData

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, float], None]
"""Called after each simulation with (simulations so far, sum of squared residuals)."""

FEWEST_REQUESTS = 20
REQUEST_NOISE = 0.03
"""Relative error of one request's latency that is nobody's fault: which step of the engine it just missed."""
TTFT_GRACE_S = 0.2
"""TTFT errors are relative to the TTFT and this, so that a short one does not count for more than it says."""
MOST_TRIALS = 12
"""Steps of the optimiser; each costs one simulation for each figure."""
PROBE = 0.2
"""Prior widths by which a figure is moved to find its influence: a simulation answers in steps, not smoothly."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One fitted figure: a normal prior, cut at `low`."""

    name: str
    prior: float
    width: float
    low: float
    is_scale: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """A calibration, and how it was come by."""

    calibration: Calibration
    figures: tuple[Figure, ...]
    values: tuple[float, ...]
    num_simulations: int
    held_out: Mapping[str, float]
    """Relative errors of the means of the requests that the fit did not see."""
    before: Mapping[str, float]
    """The same with every figure at its prior."""


def figures_of(run: MeasuredRun, latency: Mapping[str, Any]) -> tuple[Figure, ...]:
    """What is fitted: scales of the parts that the run's deployment has, and its engine's kind of overhead."""
    config = ProfileBundleConfig.model_validate(latency)
    host = config.build().host
    scales = [("dense", 0.05), ("decode_attention", 0.1), ("mixed_attention", 0.1)]
    if config.tensor_parallel > 1 or config.data_parallel > 1:
        scales.append(("all_reduce", 0.3))
    if config.expert_parallel or config.data_parallel > 1:
        scales.append(("experts", 0.1))
    step = ("exposed_s", host.exposed_s) if host.asynchronous else ("step_base_s", host.step_base_s)
    figures = [Figure(name, 1.0, width, 0.3, is_scale=True) for name, width in scales]
    figures.append(Figure(step[0], step[1], 1e-3, 0.0, is_scale=False))
    if not host.asynchronous:
        figures.append(Figure("step_per_request_s", host.step_per_request_s, 10e-6, 0.0, is_scale=False))
    figures.append(Figure("arrival_s", host.arrival_s, 5e-3, 0.0, is_scale=False))
    return tuple(figures)


def calibrate(
    run: MeasuredRun, latency: Mapping[str, Any], fit_fraction: float = 1 / 3, progress: Progress | None = None
) -> Fit:
    """Fit a profile bundle's figures to the run's first requests and judge them by the rest.

    `latency` is what stands under `latency:` for the run (`bundle_latency`); `fit_fraction` the part of the requests that is fitted.

    Raises:
        ConfigError: too few requests to fit or to judge, or a latency model that is not a profile bundle.
    """
    if latency.get("type") != "profile_bundle" or latency.get("calibration"):
        message = "only a profile bundle without a calibration is fitted"
        raise ConfigError(Problem("latency", message, "Allowed: type: profile_bundle"))
    number = len(run.requests.request_id)
    num_fitted = round(fit_fraction * number)
    if num_fitted < FEWEST_REQUESTS or number - num_fitted < FEWEST_REQUESTS:
        message = f"{num_fitted} of {number} requests are fitted, which leaves {number - num_fitted} to judge by"
        raise ConfigError(Problem("--fit-fraction", message, f"Allowed: at least {FEWEST_REQUESTS} of each"))
    trials = _Trials(run, latency, figures_of(run, latency), num_fitted, progress)
    try:
        values = trials.fitted()
        held_out, before = trials.held_out(values), trials.held_out(trials.priors)
    finally:
        trials.close()
    config = ProfileBundleConfig.model_validate(latency)
    bundle = config.build().bundle
    chosen = dict(zip((one.name for one in trials.figures), values, strict=True))
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
    return Fit(calibration, trials.figures, tuple(values), trials.count, held_out, before)


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
        self._progress = progress
        self._folder = tempfile.TemporaryDirectory(prefix="vajra-calibrate-")
        self._known: dict[tuple[float, ...], MeasuredRequests] = {}

    @property
    def priors(self) -> Floats:
        """Every figure as it was before."""
        return np.array([one.prior for one in self.figures])

    def close(self) -> None:
        """Remove what was simulated."""
        self._folder.cleanup()

    def fitted(self) -> Floats:
        """The figures of least squared residuals."""
        from scipy.optimize import least_squares

        widths = np.array([one.width for one in self.figures])
        lows = np.array([one.low for one in self.figures])
        # In units of the priors' widths, so that one step size fits all.
        found = least_squares(
            lambda units: self._objective(self.priors + units * widths),
            np.zeros(len(widths)),
            bounds=((lows - self.priors) / widths - 1e-9, np.full(len(widths), np.inf)),
            jac=lambda units: self._slopes(units, widths),
            loss="soft_l1",
            max_nfev=MOST_TRIALS,
            xtol=1e-3,
            ftol=1e-4,
        )
        values: Floats = np.maximum(self.priors + found.x * widths, lows)
        return values

    def held_out(self, values: Floats) -> dict[str, float]:
        """Relative errors of means over the requests that were not fitted."""
        simulated, measured = self._simulated(values), self._run.requests
        errors = {}
        for name in LATENCIES:
            one, other = (getattr(requests, f"{name}_s")[self._num_fitted :] for requests in (simulated, measured))
            errors[name] = float(np.nanmean(one) / np.nanmean(other) - 1.0)
        return errors

    def residuals_of(self, values: Floats) -> dict[str, Floats]:
        """Relative errors of each fitted request."""
        simulated = self._simulated(values).first(self._num_fitted)
        measured = self._run.requests.first(self._num_fitted)
        tpot = simulated.tpot_s / measured.tpot_s - 1.0
        ttft = (simulated.ttft_s - measured.ttft_s) / (measured.ttft_s + TTFT_GRACE_S)
        return {"tpot": tpot[np.isfinite(tpot)], "ttft": ttft}

    def _objective(self, values: Floats) -> Floats:
        parts = self.residuals_of(values)
        # Requests that run side by side err together: all of them count as much as a few.
        weight = 1.0 / (REQUEST_NOISE * np.sqrt(max(map(len, parts.values())) / FEWEST_REQUESTS))
        widths = np.array([one.width for one in self.figures])
        residuals: Floats = np.concatenate(
            [*(weight * part for part in parts.values()), (values - self.priors) / widths]
        )
        if self._progress is not None:
            self._progress(self.count, float((residuals**2).sum()))
        return residuals

    def _slopes(self, units: Floats, widths: Floats) -> Floats:
        """The residuals' derivatives, by one simulation a figure."""
        here = self._objective(self.priors + units * widths)
        columns = []
        for index in range(len(units)):
            moved = units.copy()
            moved[index] += PROBE
            columns.append((self._objective(self.priors + moved * widths) - here) / PROBE)
        slopes: Floats = np.array(columns).T
        return slopes

    def _simulated(self, values: Floats) -> MeasuredRequests:
        key = tuple(float(value) for value in values)
        found = self._known.get(key)
        if found is None:
            self.count += 1
            found = self._known[key] = requests_of(
                self._run_of(dict(zip((one.name for one in self.figures), key, strict=True)))
            )
        return found

    def _run_of(self, chosen: Mapping[str, float]) -> RunData:
        folder = Path(self._folder.name)
        bundle = ProfileBundleConfig.model_validate(self._latency).build().bundle
        host = {one.name: chosen[one.name] for one in self.figures if not one.is_scale}
        scales = {one.name: chosen[one.name] for one in self.figures if one.is_scale}
        trial = Calibration(bundle.model, bundle.hardware, bundle.tensor_parallel, host, scales, "a trial")
        file = folder / "trial.json"
        trial.write(file)
        return simulate_measured(self._run, {**self._latency, "calibration": str(file)}, folder)
