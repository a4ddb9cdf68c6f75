"""A calibration: corrections of a latency model, which were fitted to a measured run, and its errors on other data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vajra_py.contract.facts import is_number
from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.hardware.catalog import read_json_file
from vajra_py.latency.operators.bundle_files import Bundle

CALIBRATION_KIND = "vajra-calibration"
CALIBRATION_VERSION = 1
HOST_FIGURES = ("step_base_s", "step_per_request_s", "exposed_s", "arrival_s", "first_token_s")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted values for one model on one type of GPU, at one tensor-parallel degree."""

    model: str
    hardware: str
    tensor_parallel: int
    host: Mapping[str, float]
    """Host overhead in seconds, by field of `HostOverhead`."""
    scales: Mapping[str, float]
    """Factors by which the times of parts of a step are multiplied, by name in `profile_bundle.SCALES`."""
    fitted_on: str
    """Description of the measurements that the values were fitted to."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error (with sign) of each metric's mean over held-out requests."""
    residuals: Mapping[str, float] = field(default_factory=dict)
    """Quantiles of the relative residuals of the fitted requests, by metric and percentile (such as `tpot_p10`)."""

    def check_fits(self, bundle: Bundle) -> None:
        """Check that the bundle has the model, GPU and tensor-parallel degree of the calibration.

        Raises:
            ConfigError: one of them differs.
        """
        mine = (self.model, self.hardware, self.tensor_parallel)
        theirs = (bundle.model, bundle.hardware, bundle.tensor_parallel)
        if mine != theirs:
            described = "{} on {}, tensor_parallel {}"
            message = f"was fitted for {described.format(*mine)}, and the bundle is of {described.format(*theirs)}"
            raise ConfigError(Problem("calibration", message, "`vajra calibrate` makes one for it"))

    def write(self, path: Path) -> None:
        """Write the calibration as JSON."""
        data = {"kind": CALIBRATION_KIND, "version": CALIBRATION_VERSION, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def read_calibration(path: str | Path) -> Calibration:
    """Return the calibration in a file.

    Raises:
        ConfigError: the file is missing, of another kind or version, or has impossible values.
    """
    where = str(path)
    data = read_json_file(Path(path))
    if not isinstance(data, dict) or data.get("kind") != CALIBRATION_KIND:
        raise ConfigError(Problem(where, "is not a calibration", "`vajra calibrate` writes one"))
    if data.get("version") != CALIBRATION_VERSION:
        message = f"is of another version ({data.get('version')!r})"
        raise ConfigError(Problem(where, message, f"Allowed: {CALIBRATION_VERSION}"))
    try:
        host = {str(name): _figure(value) for name, value in data["host"].items()}
        scales = {str(name): _figure(value) for name, value in data["scales"].items()}
        unknown = [name for name in host if name not in HOST_FIGURES]
        if unknown:
            raise ValueError(f"unknown host figures: {', '.join(unknown)}")
        if any(value == 0 for value in scales.values()):
            raise ValueError("a scale is 0")
        return Calibration(
            model=str(data["model"]),
            hardware=str(data["hardware"]),
            tensor_parallel=int(data["tensor_parallel"]),
            host=host,
            scales=scales,
            fitted_on=str(data["fitted_on"]),
            errors={str(name): float(value) for name, value in data.get("errors", {}).items()},
            residuals={str(name): float(value) for name, value in data.get("residuals", {}).items()},
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(Problem(where, f"is broken ({reason})", "`vajra calibrate` writes it anew")) from error


def _figure(value: Any) -> float:
    if not is_number(value) or value < 0:
        raise ValueError(f"not a number of 0 or more ({value!r})")
    return float(value)
