"""Measure how good predicted output lengths have to be, and write a curve for every policy that asks for them to docs/policy-library.md.

python benchmarks/predictors.py [--policy srpt] [--seeds 3] [--workers 2] [--folder runs/predictors]

Each policy serves the workload of its claim, on the same seeds under each predictor. Simulations that are done are kept, as those of
benchmarks/claims.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from claims_adapters import waits
from claims_blend import ORDERS, makespan
from claims_experience import in_time
from claims_offline import divided
from claims_parts import ROOT, Cell, Cells, Knows, lengths_of, options_of, served, time_in_system
from claims_programs import pampered
from claims_routing import routed
from claims_size import SLOTS, heavy_tailed
from claims_slo import admitted
from claims_slo_targets import shared

from vajra_py.contract import LengthEstimate
from vajra_py.contract.latency import OutputLengthPredictor
from vajra_py.latency.services.output_length import ConstantLengths, HistoryLengths
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import RequestSpec

PAGE = ROOT / "docs" / "policy-library.md"
FIRST, LAST = "<!-- curves: written by benchmarks/predictors.py -->", "<!-- end of curves -->"


def _constant(specs: Sequence[RequestSpec]) -> OutputLengthPredictor:
    mean = fmean(spec.num_output_tokens for spec in specs)
    return ConstantLengths(LengthEstimate(mean, mean, mean))


def _history(specs: Sequence[RequestSpec]) -> OutputLengthPredictor:
    return HistoryLengths(1000, by_tenant=False)


def predictors(seed: int) -> Mapping[str, Knows]:
    """Predictors by name: the truth, the truth with a log-normal error, the past, the mean."""
    noisy = {f"sigma {sigma:g}": partial(lengths_of, sigma=sigma, seed=seed) for sigma in (0.5, 1.0, 2.0)}
    return {"oracle": lengths_of, **noisy, "history": _history, "constant": _constant}


NAMES = tuple(predictors(0))


def in_system(prioritizer: PolicySource, batcher: PolicySource, seed: int, knows: Knows) -> Cell:
    """Mean time in system of heavy-tailed outputs at nine tenths of full load."""
    specs = heavy_tailed(seed, num_requests=400)
    options = options_of(num_blocks=20_000, max_batch_size=SLOTS, output_lengths=knows(specs))
    return {"mean": fmean(map(time_in_system, served(prioritizer, batcher, specs, options)))}


@dataclass(frozen=True, slots=True)
class Curve:
    """Figure of a policy, and the simulation that gives it."""

    what: str
    metric: str
    run: Callable[..., Cell]
    """Called with the seed and, by name, what is known."""


IN_SYSTEM = "mean time in system, s"
CURVES: Mapping[str, Curve] = {
    "sjf": Curve(IN_SYSTEM, "mean", partial(in_system, "sjf", "fixed_chunk")),
    "srpt": Curve(IN_SYSTEM, "mean", partial(in_system, "srpt", "preemptive")),
    "trail": Curve(IN_SYSTEM, "mean", partial(in_system, "trail", "preemptive")),
    "ltr": Curve(IN_SYSTEM, "mean", partial(in_system, "ltr", "preemptive")),
    "hrrn": Curve(IN_SYSTEM, "mean", partial(in_system, "hrrn", "fixed_chunk")),
    "jitserve": Curve("share of tokens in time", "goodput", partial(in_time, "jitserve")),
    "justitia": Curve("mean completion time of agents, s", "mean", partial(pampered, "justitia")),
    "equinox": Curve("relative difference of tenants' device time", "gap", partial(shared, "equinox")),
    "past_future": Curve("evictions a request, `lengths: predicted`", "evictions", partial(admitted, "predicted")),
    "chameleon": Curve("P99 TTFT of short requests, s", "short", partial(waits, "chameleon")),
    "dynaserve": Curve("mean time in system, s", "mean", partial(divided, "dynaserve")),
    "preble_e2": Curve("P99 TTFT, s", "ttft_p99", partial(routed, "preble_e2", 20.0)),
    "blendserve": Curve("time of the whole batch, s", "s", partial(makespan, ORDERS["blendserve"], overlaps=True)),
}
"""Figure of the claim of each policy."""


def _cell(curve: Curve, name: str, seed: int) -> Cell:
    return curve.run(seed=seed, knows=predictors(seed)[name])


def curve_of(policy: str, folder: Path, num_seeds: int) -> list[float]:
    """Means over the seeds, one for each predictor."""
    cells, curve = Cells(folder / policy), CURVES[policy]
    columns = [cells.column(name, curve.metric, partial(_cell, curve, name), range(num_seeds)) for name in NAMES]
    return [fmean(column) for column in columns]


def table(curves: Mapping[str, Sequence[float]]) -> str:
    """The curves as a table in Markdown."""
    head = " | ".join(name.replace("sigma", "σ") for name in NAMES)
    rows = [f"| policy | metric | {head} |", "|---|---|" + "--:|" * len(NAMES)]
    for policy, means in curves.items():
        figures = " | ".join(f"{mean:.3g}" for mean in means)
        rows.append(f"| [`{policy}`](reference/policies.md#{policy}) | {CURVES[policy].what} | {figures} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", choices=list(CURVES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "predictors")
    options = parser.parse_args(arguments)
    chosen = [options.policy] if options.policy else list(CURVES)
    with ProcessPoolExecutor(options.workers) as pool:
        pending = {one: pool.submit(curve_of, one, options.folder, options.seeds) for one in chosen}
        curves = {}
        for policy, future in pending.items():
            curves[policy] = future.result()
            print(
                policy,
                ", ".join(f"{name} {mean:.3g}" for name, mean in zip(NAMES, curves[policy], strict=True)),
                flush=True,
            )
    if not options.policy:
        text = PAGE.read_text(encoding="utf-8")
        before, mark, rest = text.partition(FIRST)
        assert mark, f"{PAGE.name} has no line {FIRST}"
        PAGE.write_text(f"{before}{FIRST}\n\n{table(curves)}\n\n{LAST}{rest.partition(LAST)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
