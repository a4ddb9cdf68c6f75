"""Python interface to experiments: load, run, sweep, compare and plot experiments described in YAML.

import vajra_py as vajra

config = vajra.load("experiment.yaml", {"workload.rate": 8})
run = vajra.run(config)                    # or straight from a file: vajra.run("experiment.yaml")
run.requests_frame()                       # pandas, one row per request
vajra.plots.latency_cdfs([run])            # a matplotlib figure
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vajra_py.config import ExperimentConfig, config_from_mapping, expand_sweep, load_config
from vajra_py.contract import (
    AdmissionSpec,
    AnyPolicySpec,
    Layer,
    PolicySpec,
    RetentionSpec,
    RoutingPartSpec,
    ScalerSpec,
)
from vajra_py.errors import ConfigError, Problem, RunError
from vajra_py.experiment.runs.backend import Progress
from vajra_py.experiment.runs.check import problems_of_parts
from vajra_py.experiment.runs.folder import find_all_runs
from vajra_py.experiment.runs.pool import MakePool, RunTask, run_in_pool
from vajra_py.experiment.runs.run import load_workload, run_experiment
from vajra_py.experiment.runs.sweep import SweepProgress, SweepResult
from vajra_py.experiment.runs.sweep import sweep as run_sweep
from vajra_py.metrics.comparison.comparison import Comparison
from vajra_py.metrics.comparison.comparison import compare as compare_runs
from vajra_py.metrics.runs.naming import load_runs
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry, load_registry

if TYPE_CHECKING:
    from vajra_py.experiment.capacity.answers import CapacityAnswer
    from vajra_py.experiment.capacity.study import SearchProgress
    from vajra_py.experiment.measured.accuracy import Accuracy
    from vajra_py.metrics import plots

__all__ = [
    "CapacityAnswer",
    "Comparison",
    "ExperimentConfig",
    "RunData",
    "SweepResult",
    "capacity",
    "compare",
    "figures",
    "load",
    "load_workload",
    "open_runs",
    "plots",
    "report",
    "run",
    "sweep",
    "validate_measured",
]


Experiment: TypeAlias = ExperimentConfig | str | Path | Mapping[str, Any]
"""Loaded experiment, or anything that `load` accepts."""
Runs: TypeAlias = RunData | str | Path | Sequence[RunData] | Sequence[str | Path]
"""One or several opened runs, or anything that `open_runs` accepts."""


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    policies: Iterable[AnyPolicySpec] = (),
) -> ExperimentConfig:
    """Load an experiment from a YAML file or from a mapping of the same form; `overrides` maps dotted paths to values.

    The experiment may name policies in `policies` as well as installed ones; pass the same `policies` to `run` or
    `sweep`. Raises `ConfigError` with all mistakes, like `vajra check`; to find them, workload files are read, and
    replicas and policies are built once.
    """
    registry = _registry(policies)
    config = _read(source, overrides, registry)
    where = "" if isinstance(source, Mapping) else str(source)
    problems = list(dict.fromkeys(problems_of_parts(expand_sweep(config, registry), registry, where)))
    if problems:
        raise ConfigError(problems)
    return config


def _read(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None, registry: Registry
) -> ExperimentConfig:
    """Load an experiment and validate its settings, without building its parts."""
    given: Any = overrides
    if given is not None and not isinstance(given, Mapping):
        allowed = "Allowed: a mapping such as {'workload.rate': 8}"
        raise ConfigError(Problem("overrides", f"must map dotted paths to values (got {given!r})", allowed))
    texts = [f"{path}={_yaml(str(path), value)}" for path, value in (overrides or {}).items()]
    if isinstance(source, Mapping):
        return config_from_mapping(source, texts, registry)
    path: Any = source
    if not isinstance(path, str | os.PathLike):
        problem = Problem("experiment", f"cannot be read from {type(path).__name__}", "Allowed: a path, or a mapping")
        raise ConfigError(problem)
    return load_config(Path(path), texts, registry)


def run(
    config: Experiment,
    *,
    folder: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    policies: Sequence[AnyPolicySpec] = (),
    on: str = "local",
) -> RunData:
    """Run one experiment (loaded, or anything that `load` accepts) and return its results. For folders and errors see
    `vajra_py.experiment.runs.run.run_experiment`.

    `on` is the place of execution, as for `vajra run --on`: a Ray cluster executes a whole simulation, or the replicas
    of an engine.

    `policies` need not be installed: the experiment's file names them like any other. An experiment that may use one of
    these policies is always rerun, because no version tracks changes of the policy's code.
    """
    config = _loaded(config, policies)
    place = config.output_dir / config.name if folder is None else Path(folder)
    with _pool(on, config, None, policies) as pool:
        if pool is not None and config.is_single:
            return run_in_pool(pool, RunTask(config, place, overwrite), progress)
        return run_experiment(
            config,
            folder=place,
            overwrite=overwrite or _names_any(config, policies),
            progress=progress,
            registry=_registry(policies),
        )


def sweep(
    config: Experiment,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: SweepProgress | None = None,
    policies: Sequence[AnyPolicySpec] = (),
    on: str = "local",
) -> SweepResult:
    """Run every point of the experiment's sweep that is not finished yet; `.runs` of the result has the runs of all
    points, in order.

    With more than one worker, the calling script needs the usual `if __name__ == "__main__":` guard. `policies` are as
    for `run`: if there are any, the points run one after the other in this process, and all points are rerun if any
    point may use one of these policies. `on`: see `run`.
    """
    config = _loaded(config, policies)
    registry, workers = _in_process(policies, workers)
    anew = any(_names_any(point, policies) for _, point in expand_sweep(config, registry))
    with _pool(on, config, workers, policies) as pool:
        return run_sweep(
            config,
            workers=workers,
            overwrite=overwrite or anew,
            progress=progress,
            registry=registry,
            pool=pool,
        )


def capacity(
    config: Experiment,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: SearchProgress | None = None,
    policies: Sequence[AnyPolicySpec] = (),
    on: str = "local",
) -> list[CapacityAnswer]:
    """Run the experiment's `capacity:` search for every setting of its sweep; return an answer per setting, in the
    sweep's order, each with `.answer`, `.curve` and `.sentence`.

    Existing runs are read instead of repeated. Workers, `policies` and `on` are as for `sweep`. Raises `ConfigError` if
    the experiment has no valid `capacity:` section.
    """
    from vajra_py.experiment.capacity.study import find_capacity

    config = _loaded(config, policies)
    registry, workers = _in_process(policies, workers)
    anew = overwrite or any(_names_any(point, policies) for _, point in expand_sweep(config, registry))
    with _pool(on, config, workers, policies) as pool:
        return find_capacity(config, workers=workers, registry=registry, overwrite=anew, progress=progress, pool=pool)


def open_runs(paths: str | Path | Iterable[str | Path]) -> list[RunData]:
    """Open the runs at one or several paths, which are run folders or folders that contain them; each run is opened
    once. Raises `RunError` if there are no runs or a manifest cannot be read.
    """
    return load_runs(find_all_runs(map(Path, [paths] if isinstance(paths, str | Path) else paths)))


def compare(runs: Runs, metrics: Sequence[str] = ()) -> Comparison:
    """Compare runs, or the runs at paths (see `open_runs`); `.frame()` and `.difference_frame()` return pandas frames,
    `.to_markdown()`, `.to_csv()` and `.to_json()` return text.

    `metrics` names the primary metrics, whose differences are tested together; by default P99 TTFT, P99 TBT and SLO
    attainment. Raises `RunError` for an unknown metric.
    """
    return compare_runs(_opened(runs, "compare"), metrics=metrics)


def validate_measured(
    measured: str | Path,
    profile: str | Path,
    calibration: str | Path | None = None,
    *,
    folder: str | Path,
    engine: Mapping[str, Any] | None = None,
) -> Accuracy:
    """Simulate a real engine's run with a profile bundle; return a comparison of both runs, with `.errors`, `.series`,
    `.passes` and `.table()`.

    Results of the simulation are written below `folder`; `engine` sets engine arguments that the measured file lacks,
    by vLLM's names. Raises `ConfigError` if a file or setting is invalid.
    """
    from vajra_py.experiment.measured.accuracy import compare_with_measured
    from vajra_py.experiment.measured.files import read_measured
    from vajra_py.experiment.measured.simulation import bundle_latency, simulate_measured

    found = read_measured(measured, engine)
    return compare_with_measured(
        found, simulate_measured(found, bundle_latency(found, profile, calibration), Path(folder))
    )


def report(runs: Runs, path: str | Path, title: str | None = None) -> Path:
    """Write the runs' report as one self-contained HTML file and return its path."""
    from vajra_py.metrics.report.report import write_report

    write_report(_opened(runs, "report"), path, title)
    return Path(path)


def figures(
    runs: Runs,
    folder: str | Path,
    *,
    formats: Sequence[str] = ("pdf",),
    width_in: float = 3.35,
    only: Sequence[str] = (),
    panels: Sequence[str] = (),
) -> list[Path]:
    """Write the report's figures, or single `panels` of them, as files for a paper (PDF, SVG, PNG), each with its data
    as CSV. Also write the report's table as LaTeX, Markdown and CSV. Returns the paths. `width_in` is in inches.
    """
    from vajra_py.metrics.report.figure_files import write_figures

    return write_figures(_opened(runs, "figures"), folder, formats=formats, width_in=width_in, only=only, panels=panels)


def __getattr__(name: str) -> Any:
    """Import `plots` (matplotlib) and `CapacityAnswer` on first use."""
    if name == "CapacityAnswer":
        from vajra_py.experiment.capacity.answers import CapacityAnswer

        return CapacityAnswer
    if name == "plots":
        from vajra_py.metrics import plots

        return plots
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _opened(runs: Runs, what: str) -> Sequence[RunData]:
    """Return the runs, opened if they are given as paths. Raises `RunError` that names the function `what` if they are
    neither.
    """
    if isinstance(runs, RunData):
        return [runs]
    if isinstance(runs, str | Path):
        return open_runs(runs)
    others: Any = runs
    given = list(others) if isinstance(others, Iterable) else [others]
    if given and all(isinstance(one, str | Path) for one in given):
        return open_runs(given)
    if not all(isinstance(one, RunData) for one in given):
        allowed = "Allowed: runs (from run, open_runs, or .runs of a sweep) or paths of runs, one or a list"
        raise RunError(str(Problem(what, f"the runs are neither opened runs nor paths (got {runs!r})", allowed)))
    return given


def _loaded(config: Experiment, policies: Iterable[AnyPolicySpec]) -> ExperimentConfig:
    registry = _registry(policies)
    return config if isinstance(config, ExperimentConfig) else _read(config, None, registry)


@contextmanager
def _pool(
    on: str, config: ExperimentConfig, workers: int | None, policies: Sequence[AnyPolicySpec]
) -> Iterator[MakePool | None]:
    """Yield the factory of worker pools at the place `on`; None for this machine. Raises the errors of `ray_cluster`,
    and `ConfigError` if `policies` would have to run elsewhere.
    """
    from vajra_py.cluster.connect import LOCAL, ray_cluster
    from vajra_py.cluster.places import pool_on

    if policies and on != LOCAL:
        message = f"policies that are not installed run in this process alone ({on!r})"
        raise ConfigError(Problem("on", message, "Install their package on every node, or leave `on` out"))
    with ray_cluster(on) as cluster:
        yield None if cluster is None else pool_on(cluster, config, workers)


def _registry(policies: Iterable[AnyPolicySpec]) -> Registry:
    if not isinstance(policies, Iterable):
        raise ConfigError(Problem("policies", f"must be a list of specs (got {policies!r})", "Write policies=[SPEC]"))
    return load_registry().with_policies(policies)


def _in_process(policies: Sequence[AnyPolicySpec], workers: int | None) -> tuple[Registry, int | None]:
    """Return the registry and number of workers: one worker if there are policies that are not installed, because other
    processes cannot import them.
    """
    asked: Any = workers
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise ConfigError(Problem("workers", f"must be a whole number of at least 1 (got {asked!r})"))
    if policies and workers not in (None, 1):
        problem = Problem(
            "workers", f"policies that are not installed are run in this process ({workers})", "Allowed: 1"
        )
        raise ConfigError(problem)
    return _registry(policies), 1 if policies else workers


def _names_any(config: ExperimentConfig, policies: Iterable[AnyPolicySpec]) -> bool:
    """Return True if the experiment selects one of these policies, or if one of them is a part that a router may use."""
    specs = list(policies)
    if any(isinstance(spec, RoutingPartSpec) for spec in specs):
        return True  # a router may use a part, such as a producer, that the experiment does not name
    layered = [spec for spec in specs if isinstance(spec, PolicySpec)]
    given = {(spec.layer, name) for spec in layered for name in (spec.name, *spec.aliases)}
    admission = config.admission_policy
    if admission is not None and any(isinstance(one, AdmissionSpec) and one.name == admission.policy for one in specs):
        return True
    schedulings = [one.scheduling for one in config.effective_replicasets.values()]
    scalers = {spec.name for spec in specs if isinstance(spec, ScalerSpec)}
    if any(one.scaling is not None and one.scaling.policy in scalers for one in schedulings):
        return True
    retained = {spec.name for spec in specs if isinstance(spec, RetentionSpec)}
    pools = [pool for one in config.effective_replicasets.values() for pool in one.pools.values()]
    choices = [*(one.retention for one in schedulings), *(one.retention for one in pools)]
    if any(one is not None and one.policy in retained for one in choices):
        return True
    return any((layer, one.choice(layer).policy) in given for one in schedulings for layer in Layer)


def _yaml(path: str, value: Any) -> str:
    """Return a value as YAML on one line; JSON is YAML. Raises `ConfigError` if it is not plain data."""
    import json

    def plain(other: Any) -> Any:
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        if hasattr(other, "tolist"):  # numpy scalars and arrays
            return other.tolist()
        message = f"is not plain data (got {type(other).__name__})"
        raise ConfigError(Problem(path, message, "Allowed: numbers, text, paths, lists and mappings of them"))

    try:
        return json.dumps(value, default=plain, allow_nan=False)
    except ValueError:  # NaN, infinity, or a list that contains itself
        raise ConfigError(Problem(path, f"must be made of finite numbers (got {value!r})")) from None
