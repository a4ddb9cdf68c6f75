"""Errors of step times that were fitted to none of the runs they are compared with.

python benchmarks/accuracy.py FOLDER [--output FOLDER]

FOLDER holds measured runs (`runs/NAME`) and profile bundles (`profiles/HARDWARE/MODEL/VARIANT`). Every run is simulated with the bundle of its own
model and card and with the defaults of today, which hold no figure of any run: each run is one left out. Prints a table of errors with one column a
run, and ends with exit code 1 when a mean is further off than is aimed at.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vajra_py.errors import VajraError
from vajra_py.experiment.measured.accuracy import LATENCIES, QUANTILES, Accuracy, compare_with_measured
from vajra_py.experiment.measured.run import MeasuredRun, read_measured_run
from vajra_py.experiment.measured.simulation import bundle_latency, simulate_measured
from vajra_py.latency import read_bundle

AIMS = {"ttft": 0.08, "tpot": 0.03, "e2e": 0.03}
"""Target for the error of a mean without calibration."""


def runs_in(folder: Path) -> Iterator[MeasuredRun]:
    """Return the measured runs below a folder, by name."""
    for meta in sorted((folder / "runs").glob("*/meta.json")):
        yield read_measured_run(meta.parent)


def bundle_of(run: MeasuredRun, folder: Path) -> Path | None:
    """The bundle of the run's model on the card that its name begins with; None where there is none.

    A run states which model it served, but not always on which card.
    """
    found = []
    for meta in sorted((folder / "profiles").glob("**/meta.yaml")):
        try:
            bundle = read_bundle(meta.parent, run.settings.tensor_parallel)
        except VajraError:
            continue
        is_card = run.path.name.lower().replace("-", "").startswith(bundle.hardware.lower().replace("-", ""))
        if is_card and bundle.model.split("/")[-1].lower() == run.settings.model.split("/")[-1].lower():
            found.append(meta.parent)
    return found[0] if len(found) == 1 else None


def accuracies(folder: Path, output: Path) -> Iterator[Accuracy]:
    """Compare each run with its simulation; a run without a bundle of its own is printed and skipped."""
    for run in runs_in(folder):
        bundle = bundle_of(run, folder)
        if bundle is None:
            sys.stderr.write(f"{run.path.name}: no bundle of {run.settings.model} for its card, or several\n")
            continue
        data = simulate_measured(run, bundle_latency(run, bundle), output / run.path.name)
        yield compare_with_measured(run, data)


def table(found: Sequence[Accuracy]) -> Iterator[str]:
    """Markdown: a row for each metric, measured and error of each run."""
    yield "| | " + " | ".join(f"{one.name}, measured | error" for one in found) + " |"
    yield "|---" * (1 + 2 * len(found)) + "|"
    for name in (f"{latency}_{part}_ms" for latency in LATENCIES for part in ("mean", *QUANTILES)):
        errors = [next(error for error in one.errors if error.name == name) for one in found]
        cells = [
            f"{one.measured:,.{0 if one.measured >= 1e3 else 1}f} | {100 * one.relative:+.1f} %".replace("-", "−")
            for one in errors
        ]
        yield f"| `{name}` | " + " | ".join(cells) + " |"


def beyond(found: Sequence[Accuracy]) -> Iterator[str]:
    """Yield the means with an error beyond the aim."""
    for one in found:
        for error in one.errors:
            aim = AIMS.get(error.name.removesuffix("_mean_ms"))
            if aim is not None and abs(error.relative) > aim:
                yield f"{one.name} {error.name}: {error.relative:+.1%}, and {aim:.0%} is aimed at"


def main() -> int:
    """Compare all runs and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder with runs/ and profiles/.")
    parser.add_argument("--output", type=Path, help="Keep the simulations here.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = list(accuracies(options.folder, options.output or Path(place)))
    if not found:
        sys.stderr.write(f"{options.folder}: no measured run with a bundle of its card below runs/ and profiles/\n")
        return 2
    for line in table(found):
        print(line)
    missed = list(beyond(found))
    for line in missed:
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
