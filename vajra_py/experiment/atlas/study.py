"""Runs of an atlas: every policy under every load of every workload, with the same seeds.

A workload is an experiment file whose sweep defines its loads. It is run as a sweep over policies and loads in its own
folder, so that finished runs are kept when policies are added, and `vajra compare` can read the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from vajra_py.config import ExperimentConfig, SweepPoint, expand_sweep, load_config
from vajra_py.errors import ConfigError, Problem, RunError, did_you_mean
from vajra_py.experiment.atlas.entries import Entry
from vajra_py.experiment.runs.check import problems_of_parts
from vajra_py.experiment.runs.point_status import PointStatus
from vajra_py.experiment.runs.pool import MakePool
from vajra_py.experiment.runs.sweep import SweepProgress, sweep
from vajra_py.metrics.comparison.comparison import compare
from vajra_py.metrics.comparison.metrics import named_metrics
from vajra_py.metrics.comparison.policy_map import PRIMARY, WorkloadComparison
from vajra_py.metrics.report.atlas import FIGURES
from vajra_py.metrics.runs.replications import group_replications
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry

WORKLOADS: Mapping[str, Path] = {
    name: Path(__file__).with_name(f"{name}.yaml") for name in ("chats", "documents", "agents")
}
"""Files of the built-in workloads, by name."""

REPLICATIONS = 8
OUT = "runs/atlas"

PoolOf = Callable[[ExperimentConfig], MakePool]
"""Function that returns the factory of the worker pool for the runs of an experiment."""


@dataclass(frozen=True, slots=True)
class Request:
    """Requested policies, workloads and metrics of an atlas."""

    baseline: Entry
    entries: Sequence[Entry]
    workloads: Sequence[str] = tuple(WORKLOADS)
    """Names of built-in workloads or paths of experiment files."""
    replications: int = REPLICATIONS
    metrics: Sequence[str] = ()
    """Keys of the primary metrics; if empty, the keys in `PRIMARY` are used."""
    overrides: Sequence[str] = ()
    """Overrides `a.b=c` for every workload's file."""
    out: Path = Path(OUT)

    @property
    def rows(self) -> Sequence[Entry]:
        """All entries, the baseline first."""
        return [self.baseline, *self.entries]


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of one workload."""

    name: str
    config: ExperimentConfig
    loads: Sequence[str]
    places: Mapping[str, tuple[str, str]]
    """(Name of the entry, name of the load) of each run, by the run's label."""


@dataclass(frozen=True, slots=True)
class AtlasResult:
    """Outcome of an atlas."""

    workloads: Sequence[WorkloadComparison]
    failures: Sequence[tuple[str, str]]
    """(Run, reason) of each failed run."""
    num_runs: int


def plans_of(asked: Request, registry: Registry) -> list[Plan]:
    """Return the plan of each workload; every policy is built once per workload to find errors before any run.

    Raises:
        ConfigError: A workload, an override or a combination of policies is invalid.
        RunError: A metric is unknown.
    """
    named_metrics(asked.metrics)
    plans = [_plan(asked, name, registry) for name in asked.workloads]
    names = [plan.name for plan in plans]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(Problem("--workload", f"two have one name ({twice!r})", "Each workload once"))
    problems = dict.fromkeys(problem for plan in plans for problem in _problems(plan, registry))
    if problems:
        raise ConfigError(problems)
    return plans


@dataclass(frozen=True, slots=True)
class Execution:
    """Options of the runs of an atlas."""

    workers: int | None = None
    """Number of concurrent runs; None for the default of `sweep`."""
    overwrite: bool = False
    """True if finished runs are repeated and their results overwritten."""
    progress: SweepProgress | None = None
    pool_of: PoolOf | None = None
    """See `PoolOf`; None to execute the runs on this machine."""


def run_atlas(
    asked: Request, plans: Sequence[Plan], registry: Registry, execution: Execution | None = None
) -> AtlasResult:
    """Execute the unfinished runs (with `execution.overwrite`, all runs) and compare all runs that succeeded.

    Raises:
        RunInterrupted: The user stopped the atlas; finished runs are kept.
        RunError: All runs failed.
    """
    how = execution or Execution()
    found: list[WorkloadComparison] = []
    failures: list[tuple[str, str]] = []
    num_before = num_runs = 0
    for plan in plans:
        result = sweep(
            plan.config,
            workers=how.workers,
            registry=registry,
            overwrite=how.overwrite,
            progress=_shifted(how.progress, num_before, plan),
            pool=None if how.pool_of is None else how.pool_of(plan.config),
        )
        num_before += len(plan.places)
        num_runs += len(result.runs)
        failures += [(_words(plan, label), error) for label, error in result.failures]
        if result.runs:
            found.append(_compared(plan, result.runs, asked))
    if not found:
        first = f": {failures[0][1]}" if failures else ""
        raise RunError(f"atlas: every run failed{first}")
    return AtlasResult(found, failures, num_runs)


def num_points(plans: Iterable[Plan]) -> int:
    """Return the total number of runs of these plans."""
    return sum(len(plan.places) for plan in plans)


def _plan(asked: Request, workload: str, registry: Registry) -> Plan:
    path = WORKLOADS.get(workload, Path(workload))
    if workload not in WORKLOADS and not path.is_file():
        names = f"{did_you_mean(workload, WORKLOADS)}, or the path of an experiment file"
        raise ConfigError(Problem("--workload", f"is neither a workload nor a file ({workload!r})", names))
    own = tuple(f"{path}={json.dumps(value)}" for path, value in asked.baseline.settings.items())
    source = load_config(path, (*own, "replications=1", *asked.overrides), registry, drops_policies=True)
    loads = (
        [point for point, _ in expand_sweep(source, registry)] if source.sweep is not None else [SweepPoint({}, "", "")]
    )
    _check_loads(loads, path)
    name = workload if workload in WORKLOADS else source.name
    if name == FIGURES:
        raise ConfigError(Problem(f"{path} name", f"is the folder of the figures ({name!r})", "Another name"))
    points = [_point(entry, load) for entry in asked.rows for load in loads]
    settled = (
        f"sweep={json.dumps(points)}",
        f"replications={asked.replications}",
        f"output.dir={json.dumps(str(asked.out))}",
        f"name={json.dumps(name)}",
        "output.decision_log=false",
    )
    config = load_config(path, (*own, *asked.overrides, *settled), registry, drops_policies=True)
    labels = [_load_name(load, loads) for load in loads]
    keys = [(entry.name, label) for entry in asked.rows for label in labels for _ in range(asked.replications)]
    expanded = expand_sweep(config, registry)
    places = {point.label: key for (point, _), key in zip(expanded, keys, strict=True)}
    return Plan(name, config, labels, places)


def _point(entry: Entry, load: SweepPoint) -> dict[str, Any]:
    """Return the settings of an entry under a load; a preset replaces all policies."""
    return {**({"scheduling": None} if entry.preset else {}), **entry.settings, **load.values_by_path}


def _check_loads(loads: Sequence[SweepPoint], path: Path) -> None:
    for load in loads:
        for key in load:
            if key.split(".")[0] != "workload":
                message = f"sets {key!r}: the sweep of an atlas's workload gives its loads"
                raise ConfigError(Problem(f"{path} sweep", message, "Paths below `workload`"))


def _load_name(load: SweepPoint, loads: Sequence[SweepPoint]) -> str:
    """Return the name of a load: its first scalar value if no other load has the same value, else `load N`, counted
    from 1.
    """
    first = next((str(value) for value in load.values() if not isinstance(value, dict | list)), "")
    firsts = [next((str(value) for value in one.values() if not isinstance(value, dict | list)), "") for one in loads]
    return first if first and firsts.count(first) == 1 else f"load {loads.index(load) + 1}"


def _problems(plan: Plan, registry: Registry) -> Iterable[Problem]:
    """Yield the problems found by building each entry's policies once under the workload's first load."""
    firsts: dict[str, tuple[SweepPoint, ExperimentConfig]] = {}
    for point, config in expand_sweep(plan.config, registry):
        firsts.setdefault(plan.places[point.label][0], (point, config))
    for name, (point, config) in firsts.items():
        for problem in problems_of_parts([(point, config)], registry):
            yield replace(problem, where=f"policy {name!r} on {plan.name}: {problem.where}")


def _shifted(progress: SweepProgress | None, num_before: int, plan: Plan) -> SweepProgress | None:
    """Return a function that receives the progress of one workload's runs and passes it to `progress`, with run numbers
    and labels of the whole atlas; None if `progress` is None.
    """
    if progress is None:
        return None

    def report(index: int, status: PointStatus) -> None:
        progress(num_before + index, structs.replace(status, label=_words(plan, status.label)))

    return report


def _words(plan: Plan, label: str) -> str:
    policy, load = plan.places[label]
    seed = label.rpartition("seed=")[2] if "seed=" in label else ""
    return ", ".join(filter(None, (plan.name, policy, load, seed and f"seed {seed}")))


def _compared(plan: Plan, runs: Sequence[RunData], asked: Request) -> WorkloadComparison:
    """Compare the runs of a workload in those metrics that have values; settings are named by entry and load."""
    settings = group_replications(runs)
    keys = [metric.key for metric in named_metrics(asked.metrics or PRIMARY)]
    comparison = compare(runs, metrics=keys)
    present = tuple(key for key in keys if any(value is not None for value in comparison.values["overall"][key]))
    positions = {plan.places[runs[setting.positions[0]].name]: i for i, setting in enumerate(settings)}
    named = {i: f"{policy}, {load}" if len(plan.loads) > 1 else policy for (policy, load), i in positions.items()}
    names = tuple(named[i] for i in range(len(settings)))
    comparison = structs.replace(comparison, names=names, primary=present or tuple(keys))
    description = str(runs[0].config.get("description") or "")
    found = WorkloadComparison(
        plan.name, description, comparison, [entry.name for entry in asked.rows], plan.loads, positions
    )
    return replace(found, loads=sorted(plan.loads, key=lambda load: found.offered(load) or 0.0))
