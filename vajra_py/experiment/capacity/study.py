"""Execute a capacity search for every setting of an experiment's sweep.

Each setting has its own search (`vajra_py.experiment.capacity.search`), and all share one pool of workers. The next
runs of a search depend only on its own results, so answers do not depend on the number of workers. Every run has its
own folder, such as `<output.dir>/<name>/<setting>/rate-4.2-seed-1`; finished runs are read, not repeated, unless they
are to be overwritten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from vajra_py.config import ExperimentConfig, config_from_mapping, expand_sweep
from vajra_py.config.capacity import CapacityConfig
from vajra_py.config.load import effective_settings
from vajra_py.config.slo import GROUPS, Slo, SloMetric, parse_slo
from vajra_py.config.sweeps import values_of_label
from vajra_py.errors import ConfigError, Problem, RunError, VajraError, did_you_mean
from vajra_py.experiment.capacity.answers import CapacityAnswer, CurvePoint
from vajra_py.experiment.capacity.plain_values import plain_values
from vajra_py.experiment.capacity.rate import RateQuestion, search_rate
from vajra_py.experiment.capacity.search import Answer, Probe, Search, Setting, Slacks, search_replicas
from vajra_py.experiment.device_figures import devices_of, latency_models, model_key
from vajra_py.experiment.runs.equal_seeds import EqualSeeds, drew_beside_workload
from vajra_py.experiment.runs.folder import CAPACITY_FILE, RunFolder
from vajra_py.experiment.runs.pool import MakePool, RunTask, local_pool
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.summary.summary import Summary
from vajra_py.plugins import Registry, load_registry

_SEED = "seed"
_MANY = 1 << 30
"""Number of tasks stated to `local_pool`, which creates no more workers than tasks; large, since the number of runs is
not known in advance.
"""


SearchProgress: TypeAlias = Callable[[str, int, int, str], None]
"""Called with a setting's label, the numbers of its finished and requested runs, and a description of the current runs.
"""


def find_capacity(
    config: ExperimentConfig,
    *,
    workers: int | None = None,
    registry: Registry | None = None,
    overwrite: bool = False,
    progress: SearchProgress | None = None,
    pool: MakePool | None = None,
) -> list[CapacityAnswer]:
    """Return the answer for each setting of the experiment's sweep, in order.

    Raises `ConfigError` if the experiment has no valid `capacity:` section, `RunInterrupted` if the user stops it.
    """
    registry = registry or load_registry()
    searches = [_Search(one, overwrite, registry) for one in _settings(config, registry)]
    # Concurrent runs on a device would disturb each other's times.
    if workers is None and config.backend.kind != "simulator":
        workers = 1
    workers_pool = pool(None) if pool else local_pool(workers, _MANY, registry, None)
    owners: dict[int, tuple[_Search, Setting, int]] = {}
    try:
        todo = list(searches)
        number = 0
        while todo:
            search = todo.pop(0)
            for setting, seed, task in search.tasks():
                owners[number] = (search, setting, seed)
                workers_pool.submit(number, task)
                number += 1
            _notify(progress, search)
            if todo or not owners:
                continue
            for ended, error in workers_pool.ends():
                search, setting, seed = owners.pop(ended)
                search.take(setting, seed, error)
                _notify(progress, search)
                if search.is_ready:
                    for own_setting, own_seed, task in search.tasks():
                        owners[number] = (search, own_setting, own_seed)
                        workers_pool.submit(number, task)
                        number += 1
    finally:
        workers_pool.close()
    answers = [search.result() for search in searches]
    _write_json(answers, config)
    return answers


def _notify(progress: SearchProgress | None, search: _Search) -> None:
    if progress is not None:
        progress(search.label, search.num_done, search.num_asked, search.doing)


@dataclass(frozen=True, slots=True)
class _Question:
    """Search task of one setting of the sweep."""

    label: str
    mapping: dict[str, Any]
    """The setting's configuration as plain values, without `capacity:`."""
    folder: Path
    seeds: tuple[int, ...]
    """Seeds available to the search, all with different runs. Every setting takes its seeds from the same sequence,
    without those that would repeat one of its runs.
    """
    question: CapacityConfig
    slo: Slo
    paths: tuple[str, ...]
    costs: tuple[float, ...]
    unit: str
    note: str = ""
    """Reason for fewer seeds than requested, or the only source of variation between seeds."""

    def config(self, setting: Setting, seed: int, registry: Registry) -> ExperimentConfig:
        """Return the experiment at a rate or replica counts, under one seed."""
        absent = [path for path, value in zip(self.paths, setting, strict=True) if self.costs and not value]
        mapping = _without([path.split(".")[1] for path in absent], self.mapping) if absent else self.mapping
        values = [(path, self._value(value)) for path, value in zip(self.paths, setting, strict=True)]
        texts = [f"{path}={text}" for path, text in values if path not in absent]
        return config_from_mapping(mapping, [*texts, f"{_SEED}={seed}"], registry)

    def path(self, setting: Setting, seed: int) -> Path:
        """Return the folder of the run at a rate or replica counts, under one seed."""
        names = [path.removesuffix(".num_replicas").rpartition(".")[2] for path in self.paths]
        parts = [f"{name}-{self._value(value)}" for name, value in zip(names, setting, strict=True)]
        return self.folder / "-".join([*parts, f"seed-{seed}"])

    def _value(self, value: float) -> str:
        return str(int(value)) if self.costs else f"{value:.10g}"

    def cost(self, setting: Setting) -> float:
        """Return the cost of replica counts; for a rate, return the rate itself."""
        return sum(a * b for a, b in zip(setting, self.costs, strict=True)) if self.costs else setting[0]

    def seed_at(self, position: int) -> int:
        """Return the seed at a position of the search's seeds."""
        return self.seeds[position]

    @property
    def num_seeds(self) -> tuple[int, int]:
        """(Minimum, maximum) number of seeds that are run."""
        asked = self.question
        return min(asked.replications, len(self.seeds)), min(asked.max_replications, len(self.seeds))

    def search(self) -> Search:
        """Return the search. A search that finds a rate also requests the runs for further points of the curve."""
        asked, (fewest, most) = self.question, self.num_seeds
        if asked.replicas is not None:
            ranges = [range(one.min, one.max + 1) for one in asked.replicas.values()]
            return search_replicas(self.slo, ranges, self.costs, fewest)
        rate = asked.rate
        assert rate is not None  # the schema sets `rate` if `replicas` is absent
        given = _at(self.mapping, rate.path)
        start = float(given) if isinstance(given, int | float) else math.sqrt(rate.min * rate.max)
        question = RateQuestion(
            self.slo, rate.min, rate.max, min(max(start, rate.min), rate.max), asked.precision_fraction, fewest, most
        )
        return _with_curve(search_rate(question), asked.curve, fewest)


def _with_curve(search: Search, factors: Sequence[float], num_seeds: int) -> Search:
    answer = yield from search
    if answer.outcome == "found" and factors:
        rates = [float(f"{answer.setting[0] * factor:.3g}") for factor in factors]
        yield [((rate,), seed) for rate in rates for seed in range(num_seeds)]
    return answer


def _settings(config: ExperimentConfig, registry: Registry) -> list[_Question]:
    """Return the search task of each setting of the sweep. Raises `ConfigError` for invalid settings."""
    asked = config.capacity
    if asked is None:
        raise ConfigError(
            Problem("capacity", "is missing: nothing is asked", "Such as: capacity: {slo: p99(ttft) <= 0.5}")
        )
    if config.replications > 1:
        message = f"cannot be combined with `capacity` (got {config.replications})"
        raise ConfigError(Problem("replications", message, "Allowed: capacity.replications"))
    paths = (asked.rate.path,) if asked.rate is not None else tuple(asked.replicas or ())
    found = []
    equal = EqualSeeds(registry)
    for point, one in expand_sweep(config, registry):
        clash = [path for path in (*paths, _SEED) if path in point]
        if clash:
            raise ConfigError(Problem(f"sweep.{clash[0]}", "is what the search varies", "Allowed: other settings"))
        mapping = {key: value for key, value in effective_settings(one).items() if key not in ("capacity", "sweep")}
        costs, unit = _costs(asked, one, registry)
        label = values_of_label(point.label) or one.name
        folder = config.output_dir / config.name / point.point_id if config.sweep else config.output_dir / config.name
        seeds, note = equal.different(one, asked.max_replications)
        question = _Question(label, mapping, folder, seeds, asked, parse_slo(asked.slo), paths, costs, unit, note)
        _check_start(question, registry)
        found.append(question)
    return found


def _costs(asked: CapacityConfig, config: ExperimentConfig, registry: Registry) -> tuple[tuple[float, ...], str]:
    """Return (costs of a replica of each kind, their unit); no costs if a rate is searched.

    If no costs are configured, they are the prices of the replicas' devices; with a single kind, or if a price is
    unknown, every replica costs 1.
    """
    if asked.rate is not None:
        return (), "requests/s"
    given = [one.cost for one in (asked.replicas or {}).values() if one.cost is not None]
    if given:
        return tuple(given), "of cost"
    devices = devices_of(config, latency_models(config, registry))
    kinds = [devices.get(_devices_key(path)) for path in asked.replicas or ()]
    prices = [
        one.costs.price_per_hour * one.devices_per_replica
        for one in kinds
        if one is not None and one.costs.price_per_hour
    ]
    if len(kinds) < 2 or len(prices) < len(kinds):
        return (1.0,) * len(kinds), "replicas"
    return tuple(prices), "$ an hour"


def _devices_key(path: str) -> str:
    """Return the key, in the result of `devices_of`, of the replicas whose number is the setting at this path."""
    parts = path.split(".")
    names = dict(zip(parts[::2], parts[1::2], strict=False))
    replicaset = names.get("replicasets", "default")
    return model_key(replicaset, names["pools"]) if "pools" in names else replicaset


def _without(names: Sequence[str], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment without these replicasets; each of their requests is served by the next replicaset that
    matches it.
    """
    left = {name: one for name, one in mapping["replicasets"].items() if name not in names}
    changed = {**mapping, "replicasets": left}
    backend = mapping["backend"].get("simulator")
    if backend is not None:
        own = {name: one for name, one in (backend.get("replicasets") or {}).items() if name not in names}
        changed["backend"] = {"simulator": {**backend, "replicasets": own}}
    return changed


def _check_start(question: _Question, registry: Registry) -> None:
    """Check, before any run, that the searched settings exist. Raises `ConfigError`."""
    asked = question.question
    first = (
        (asked.rate.min,)
        if asked.rate is not None
        else tuple(float(max(one.min, 1)) for one in (asked.replicas or {}).values())
    )
    question.config(first, question.seeds[0], registry)


def _at(mapping: Mapping[str, Any], path: str) -> Any:
    here: Any = mapping
    for key in path.split("."):
        here = here.get(key) if isinstance(here, Mapping) else None
    return here


@dataclass(slots=True)
class _Search:
    """Search in progress: its requested and finished runs."""

    question: _Question
    overwrite: bool
    registry: Registry
    num_done: int = 0
    num_new: int = 0
    num_asked: int = 0
    _generator: Search = field(init=False)
    _wanted: Sequence[Probe] = field(init=False, default=())
    _pending: set[tuple[Setting, int]] = field(init=False, default_factory=set)
    _slacks: dict[Setting, dict[int, tuple[float, ...]]] = field(init=False, default_factory=dict)
    """Slack of each condition, by setting and seed."""
    _answer: Answer | None = field(init=False, default=None)
    _error: str | None = field(init=False, default=None)
    _has_begun: bool = field(init=False, default=False)
    _is_random_after_all: bool = field(init=False, default=False)
    """True if seeds were expected to repeat each other's runs, but a run used its seed after all; the search then
    restarts with all seeds.
    """

    def __post_init__(self) -> None:
        self._generator = self.question.search()

    @property
    def label(self) -> str:
        """Label of the setting."""
        return self.question.label

    @property
    def is_ready(self) -> bool:
        """True if the search has not ended and all requested runs have finished, so that it can advance."""
        return not self._pending and self._answer is None and self._error is None

    @property
    def doing(self) -> str:
        """Short description of the current runs."""
        if self._answer is not None or self._error is not None:
            return "done" if self._error is None else "failed"
        rates = sorted({setting for setting, _ in self._pending})
        return ", ".join(" + ".join(f"{value:g}" for value in one) for one in rates[:4])

    def tasks(self) -> list[tuple[Setting, int, RunTask]]:
        """Advance the search and return the runs that it needs next; an empty list if it has ended."""
        while self.is_ready:
            try:
                self._advance()
                found = self._missing()
            except VajraError as error:
                self._error = str(error)
                return []
            if found:
                return found
        return []

    def take(self, setting: Setting, seed: int, error: str | None) -> None:
        """Record the end of a run."""
        self._pending.discard((setting, seed))
        self.num_new += 1
        if error is None:
            try:
                self._read(setting, seed)
            except VajraError as wrong:
                error = str(wrong)
        if error is not None and self._error is None:
            self._error = error

    def result(self) -> CapacityAnswer:
        """Return the answer with the curve of all runs."""
        asked = self.question
        curve: list[CurvePoint] = []
        if self._error is None:
            try:
                curve += [self._point(one) for one in sorted(self._slacks, key=lambda one: (asked.cost(one), one))]
            except VajraError as error:
                self._error = str(error)
        rate, num_seeds = asked.question.rate, 0 if self._answer is None else self._answer.num_seeds
        return CapacityAnswer(
            asked.label, self._answer, tuple(curve), asked.paths, asked.costs, asked.unit, self.num_done, self.num_new, self._error,
            (0.0, 0.0) if rate is None else (rate.min, rate.max), tuple(asked.seed_at(k) for k in range(num_seeds)),
            0.0 if rate is None else asked.question.precision_fraction, asked.note,
        )  # fmt: skip

    def _advance(self) -> None:
        if self._is_random_after_all:
            first = self.question.seeds[0]
            every = tuple(range(first, first + self.question.question.max_replications))
            self.question = replace(self.question, seeds=every, note="")
            self._generator, self._has_begun, self._is_random_after_all = self.question.search(), False, False
        try:
            if not self._has_begun:
                self._has_begun = True
                self._wanted = next(self._generator)
            else:
                self._wanted = self._generator.send(self._known())
        except StopIteration as stop:
            self._answer = stop.value

    def _known(self) -> Slacks:
        return {
            (setting, position): self._slacks[setting][self.question.seed_at(position)]
            for setting, position in self._wanted
        }

    def _missing(self) -> list[tuple[Setting, int, RunTask]]:
        """Return the requested runs that are not in memory yet. Finished runs on disk are read, not returned, unless
        `overwrite` is set.
        """
        found: list[tuple[Setting, int, RunTask]] = []
        if self._answer is not None:
            return found
        for setting, position in self._wanted:
            seed = self.question.seed_at(position)
            if seed in self._slacks.get(setting, {}) or (setting, seed) in self._pending:
                continue
            config = self.question.config(setting, seed, self.registry)
            path = self.question.path(setting, seed)
            self.num_asked += 1
            if RunFolder(path).is_finished(config) and not self.overwrite:
                self._read(setting, seed)
            else:
                self._pending.add((setting, seed))
                found.append((setting, seed, RunTask(config, path, self.overwrite)))
        return found

    def _read(self, setting: Setting, seed: int) -> None:
        path = self.question.path(setting, seed)
        summary = RunData.load(path).summary
        if len(self.question.seeds) < self.question.question.max_replications and drew_beside_workload(path):
            self._is_random_after_all = True
        slacks = self.question.slo.slacks(lambda one: metric_value(summary, one))
        self._slacks.setdefault(setting, {})[seed] = slacks
        self.num_done += 1

    def _point(self, setting: Setting) -> CurvePoint:
        slacks = self._slacks[setting]
        seeds = sorted(slacks)
        summaries = [RunData.load(self.question.path(setting, seed)).summary for seed in seeds]
        metrics = {condition.metric.text: condition.metric for condition in self.question.slo.conditions}
        return CurvePoint(
            setting,
            tuple(seeds),
            {text: tuple(metric_value(one, metric) for one in summaries) for text, metric in metrics.items()},
            tuple(slacks[seed] for seed in seeds),
            tuple(self.question.slo.combined(slacks[seed]) for seed in seeds),
            sum(one.value("stability.label") == "overloaded" for one in summaries),
        )


def metric_value(summary: Summary, metric: SloMetric) -> float | None:
    """Return the value of an SLO's metric in a run; None if there is no value because no request completed.

    Raises `RunError` if the run does not have the metric's group, if several groups of that name differ in the metric,
    or if requests completed but there is no value.
    """
    groups: list[Any] = [summary.data.get("overall", {})]
    if metric.group is not None:
        sections = [summary.data.get(key) or {} for key in GROUPS]
        groups = [section[metric.group] for section in sections if metric.group in section]
        if not groups:
            message = f"{metric.text}: no SLO class, tenant or replicaset has that name ({metric.group})"
            names = [name for section in sections for name in section]
            raise RunError(f"capacity.slo: {message}. {did_you_mean(metric.group, names)}")
    values = [_at(one, metric.path) for one in groups]
    if len(set(values)) > 1:
        message = f"{metric.text}: is the name of several, with different values ({metric.group})"
        raise RunError(f"capacity.slo: {message}. Allowed: the name of only one SLO class, tenant or replicaset.")
    group, value = groups[0], values[0]
    if value is None and (group.get("counts") or {}).get("completed"):
        hint = "Requests need an SLO of their own (slo_classes) for an attainment"
        raise RunError(f"capacity.slo: {metric.text}: no request of the run has a value. {hint}.")
    return None if value is None else float(value)


def _write_json(answers: Sequence[CapacityAnswer], config: ExperimentConfig) -> None:
    """Write `capacity.json` beside the runs, with answers and curves as plain values."""
    folder = config.output_dir / config.name
    folder.mkdir(parents=True, exist_ok=True)
    slo = config.capacity.slo if config.capacity else ""
    (folder / CAPACITY_FILE).write_text(json.dumps(plain_values(slo, answers), indent=1) + "\n")
