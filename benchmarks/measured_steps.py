"""Compare the decode steps of a measured run with what a latency model predicts for them, by number of decodes.

python benchmarks/measured_steps.py RUN PROFILE [--most-steps 4]

All first and last tokens of one step have one timestamp, and between two such times without a prompt under way every running request gets one
token a step. How many steps lie between is the quotient of the time and the prediction, rounded, which is sure for few steps only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vajra_py.contract import BatchFeatures
from vajra_py.experiment.measured.run import MeasuredRequests, read_measured_run
from vajra_py.experiment.measured.simulation import bundle_latency, measured_config
from vajra_py.latency import ProfileBundleModel

WIDTH = 8
"""Numbers of decodes in one row: those of one CUDA graph."""


class Stretch(NamedTuple):
    """Some equal steps of a run."""

    num_decodes: int
    num_steps: int
    measured_s: float
    """Mean duration of a step."""
    predicted_s: float
    longest_over_mean: float
    """The longest context over the mean one."""


def stretches(requests: MeasuredRequests, model: ProfileBundleModel, most_steps: int) -> Iterator[Stretch]:
    """Decode steps between two times at which tokens are known to have come back."""
    first, last, scheduled = requests.first_token_at, requests.last_token_at, requests.scheduled_at
    if scheduled is None:
        raise SystemExit("the run does not say when requests were scheduled")
    events = np.unique(np.concatenate([first, last]))
    for begun, ended in pairwise(events.tolist()):
        running = (first <= begun) & (last > begun)
        if not running.any() or ((scheduled < ended) & (first > begun)).any():
            continue
        done = (begun - first) / np.maximum(last - first, 1e-9)
        contexts = (requests.num_prompt_tokens + 1 + done * (requests.num_output_tokens - 1))[running]
        count, total = len(contexts), int(contexts.sum())
        one_s = model.batch_time_s(BatchFeatures(count, total))
        steps = round((ended - begun) / one_s)
        if 1 <= steps <= most_steps:
            times = [model.batch_time_s(BatchFeatures(count, total + count * step)) for step in range(steps)]
            longest = float(contexts.max() / contexts.mean())
            yield Stretch(count, steps, (ended - begun) / steps, float(np.mean(times)), longest)


def main() -> None:
    """Print a row for each size of CUDA graph."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--most-steps", type=int, default=4)
    options = parser.parse_args()
    run = read_measured_run(options.run)
    model = measured_config(bundle_latency(run, options.profile)).build()
    found = list(stretches(run.requests, model, options.most_steps))
    print(f"{'decodes':>9}{'steps':>7}{'measured, ms':>14}{'predicted':>11}{'error':>8}{'longest context':>18}")
    for top in range(WIDTH, max(one.num_decodes for one in found) + WIDTH, WIDTH):
        rows = [one for one in found if top - WIDTH < one.num_decodes <= top]
        if rows:
            weights = [one.num_steps for one in rows]
            measured, predicted, longest = (
                float(np.average([getattr(one, name) for one in rows], weights=weights))
                for name in ("measured_s", "predicted_s", "longest_over_mean")
            )
            size = f"{top - WIDTH + 1} to {top}"
            error = predicted / measured - 1.0
            print(
                f"{size:>9}{sum(weights):>7}{1e3 * measured:>14.2f}{1e3 * predicted:>11.2f}{error:>+8.1%}{longest:>17.1f}x"
            )


if __name__ == "__main__":
    main()
