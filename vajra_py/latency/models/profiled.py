"""Step time from a profile, which `vajra profile` measures or `fitting` fits to a table of measured steps.

The time of a step is a sum: a base time; piecewise-linear times for its tokens (matrix products are cheaper per token
in larger batches), for the context of its decodes, and for the query-key pairs of its prompts' attention; times per
decode, chunk, token of chunks' context and byte swapped; and the engine's time for forming the step. Each part is
non-decreasing, except over the first few tokens: two rows may take longer than four, since libraries use different
algorithms.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from vajra_py.contract.facts import is_number
from vajra_py.contract.latency import BatchFeatures, ModelDescription
from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.hardware.catalog import read_json_file
from vajra_py.latency.models.variation import Variation

PROFILE_VERSION = 1
PROFILE_KIND = "vajra-profile"
CURVES = ("num_tokens", "decode_context_tokens", "prefill_attention_pairs")
"""Features whose time is a piecewise-linear curve."""
COEFFICIENTS = ("num_decodes", "num_prefills", "prefill_context_tokens", "swap_bytes")
"""Features with a constant time per unit."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise-linear function with `values` at `knots` (ascending from 0), extrapolated linearly."""

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, x: float) -> float:
        """Return the value at `x` >= 0."""
        index = min(bisect_right(self.knots, x), len(self.knots) - 1) - 1
        return self.values[index] + self._slope(index) * (x - self.knots[index])

    def at_each(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the value at each element of `x`, bit for bit equal to the results of `at`."""
        indices = np.minimum(np.searchsorted(self.knots, x, side="right"), len(self.knots) - 1) - 1
        slopes = np.array([self._slope(index) for index in range(len(self.knots) - 1)])
        values, knots = np.array(self.values), np.array(self.knots)
        result: npt.NDArray[np.float64] = values[indices] + slopes[indices] * (x - knots[indices])
        return result

    def _slope(self, index: int) -> float:
        rise = self.values[index + 1] - self.values[index]
        return rise / (self.knots[index + 1] - self.knots[index])


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds of a step as a function of its features; the module describes the terms."""

    base_s: float
    curves: Mapping[str, Curve]
    coefficients: Mapping[str, float]

    def time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of one step."""
        return self._fixed_s(features) + self.curves["decode_context_tokens"].at(float(features.decode_context_tokens))

    def decode_times_s(self, num_decodes: int, contexts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the seconds of a step of `num_decodes` decodes for each element of `contexts`, which is a sum of the
        decodes' contexts.
        """
        fixed = self._fixed_s(BatchFeatures(num_decodes=num_decodes))
        return fixed + self.curves["decode_context_tokens"].at_each(contexts)

    def _fixed_s(self, features: BatchFeatures) -> float:
        """Return the seconds that do not depend on the decodes' context."""
        curves, per = self.curves, self.coefficients
        seconds = self.base_s + curves["num_tokens"].at(float(features.num_tokens))
        seconds += curves["prefill_attention_pairs"].at(float(features.prefill_attention_pairs))
        for name in COEFFICIENTS:
            seconds += per[name] * getattr(features, name)
        return seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a model measured on a device.

    Attributes:
        fit: seconds of a step, including the time to form it.
        facts: measured configuration: model, device, sizes (`max_model_len`, `kv_bytes_per_token`, `block_size`, …),
            versions.
        errors: relative errors of the fit on held-out shapes, by kind of step.
        num_shapes: number of measured shapes.
        variation: variation of equal steps; None if it is unknown, because each batch was measured only a few times.
    """

    fit: StepFit
    facts: Mapping[str, Any]
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_shapes: int = 0
    variation: Variation | None = None

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        fit = self.fit
        data = {
            "kind": PROFILE_KIND,
            "version": PROFILE_VERSION,
            "facts": dict(self.facts),
            "num_shapes": self.num_shapes,
            "errors": {name: dict(one) for name, one in self.errors.items()},
            "base_s": fit.base_s,
            "curves": {name: {"knots": list(c.knots), "values": list(c.values)} for name, c in fit.curves.items()},
            "coefficients": dict(fit.coefficients),
        }
        if self.variation is not None:
            data["variation"] = {name: list(factors) for name, factors in structs.asdict(self.variation).items()}
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(path)


def read_profile(path: str | Path) -> Profile:
    """Return the profile in a file.

    Raises:
        ConfigError: the file is missing, broken, of another kind, or of another version.
    """
    data = read_json_file(Path(path))
    where = str(path)
    if not isinstance(data, dict) or data.get("kind") != PROFILE_KIND:
        raise ConfigError(Problem(where, "is not a profile", "`vajra profile --model DIR` writes one"))
    if data.get("version") != PROFILE_VERSION:
        found = data.get("version")
        raise ConfigError(Problem(where, f"is of another version ({found!r})", f"Allowed: {PROFILE_VERSION}"))
    try:
        curves = {name: _curve(data["curves"][name]) for name in CURVES}
        coefficients = {name: _number(data["coefficients"][name]) for name in COEFFICIENTS}
        fit = StepFit(_number(data["base_s"]), curves, coefficients)
        variation = _variation(data["variation"]) if "variation" in data else None
        errors = {
            name: {key: float(value) for key, value in one.items()} for name, one in data.get("errors", {}).items()
        }
        return Profile(fit, dict(data["facts"]), errors, int(data.get("num_shapes", 0)), variation)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        message = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(Problem(where, f"is broken ({message})", "`vajra profile` writes it anew")) from error


def _curve(data: Mapping[str, Sequence[float]]) -> Curve:
    knots, values = tuple(map(_number, data["knots"])), tuple(map(_number, data["values"]))
    if len(knots) < 2 or len(knots) != len(values) or knots[0] != 0.0 or sorted(set(knots)) != list(knots):
        raise ValueError("a curve's knots do not ascend from 0, or are not one for each value")
    return Curve(knots, values)


def _variation(data: Mapping[str, Sequence[float]]) -> Variation:
    return Variation(*(tuple(map(_number, data[name])) for name in ("decodes", "prompts")))


def _number(value: Any) -> float:
    if not is_number(value) or value < 0:
        raise ValueError(f"not a number of 0 or more ({value!r})")
    return float(value)


class ProfiledModel:
    """A `LatencyModel` from a profile.

    Attributes:
        variation: variation of equal steps in simulations (see `VariesSteps`); predictions for policies are the mean.
    """

    num_stages = 1

    def __init__(self, profile: Profile, *, varies: bool = True) -> None:
        self.profile = profile
        self.variation = profile.variation if varies else None
        self._fit = profile.fit

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the step; there is one stage."""
        return self._fit.time_s(features)

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the step."""
        return self._fit.time_s(features)

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of each step of a run of decodes; see `PredictsDecodeRuns`."""
        contexts = (first_context_tokens + num_decodes * np.arange(num_steps)).astype(np.float64)
        return self._fit.decode_times_s(num_decodes, contexts)

    def describe(self) -> ModelDescription:
        """Describe the measurements and the error of the fit; see `DescribesModel`."""
        facts = self.profile.facts
        model, device = facts.get("model", "a model"), facts.get("device", "a device")
        source = facts.get("source", f"whole steps of {model} on {device}, by `vajra profile`")
        known = [abs(one["mean"]) for one in self.profile.errors.values() if "mean" in one]
        return ModelDescription("measured", source, {"step": max(known)} if known else {})
