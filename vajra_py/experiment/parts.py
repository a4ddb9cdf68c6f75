"""Execute a run in parts and put their results together (`divided`); the folder has the bytes of the undivided run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from vajra_py.config import ExperimentConfig
from vajra_py.experiment.backend import Progress, Run
from vajra_py.experiment.divided import NotedSeeds, Part, divide, why_whole
from vajra_py.experiment.folder import FINISHED, RunFolder
from vajra_py.experiment.pool import MakePool, RunTask
from vajra_py.experiment.results import Tables, write_results
from vajra_py.experiment.run import load_workload
from vajra_py.experiment.simulated import SimulatedRun
from vajra_py.latency import StepTimes
from vajra_py.metrics.run_data import DECISIONS_FILE, RunData
from vajra_py.metrics.steps_table import StepsBuilder
from vajra_py.metrics.tables import RequestsBuilder, TbtBuilder
from vajra_py.plugins import Registry
from vajra_py.runtime.records.decision_merge import merge_decision_logs
from vajra_py.runtime.support.seeds import SeedTree


def parts_of(config: ExperimentConfig, registry: Registry, count: int) -> list[Part] | str:
    """The parts that `count` workers run this experiment in, or why it stays whole. Raises `ConfigError` as a run does."""
    reason = why_whole(config, registry)
    if reason is not None:
        return reason
    workload = load_workload(config)
    if workload.has_followers:
        return "its requests follow one another, wherever they were served"
    seeds = NotedSeeds(SeedTree(config.seed))
    whole = SimulatedRun(Run(config, registry, workload, seeds))
    division = divide(whole, config, seeds, count)
    if len(division.parts) > 1:
        return [Part(index, count) for index in division.parts]
    return "; ".join(f"{name}: {why}" for name, why in division.together.items()) or "it has one replica"


def run_in_parts(
    config: ExperimentConfig,
    registry: Registry,
    parts: Sequence[Part],
    pool: MakePool,
    progress: Progress | None = None,
) -> RunData | str:
    """Run an experiment in parts and open its results, or return why a part could not be run.

    Parts are kept beside the run's folder until they are put together, so that what is finished is not run again.
    """
    place = RunFolder(config.output_dir / config.name)
    folder = place.path.with_name(f".{place.path.name}.parts")
    paths = [folder / f"{one.index}-of-{one.count}" for one in parts]
    done: dict[int, tuple[int, int, float]] = {}

    def report(number: int, ended: int, total: int, now: float) -> None:
        done[number] = ended, total, now
        if progress is not None:
            progress(sum(one for one, _, _ in done.values()), total, min(now for _, _, now in done.values()))

    runs = pool(report)
    failed = None
    try:
        for number, (part, path) in enumerate(zip(parts, paths, strict=True)):
            other = RunFolder(path).holds_other_results(config)
            runs.submit(number, RunTask(config, path, overwrite=other, part=part))
        for _, error in runs.ends():
            failed = failed or error
    finally:
        runs.close()
    if failed is None:
        _combine(config, registry, place, paths)
    shutil.rmtree(folder)
    return failed or RunData.load(place.path)


def _combine(config: ExperimentConfig, registry: Registry, place: RunFolder, paths: Sequence[Path]) -> None:
    try:
        place.start(config, registry, overwrite=True)
        _write_combined(config, place, paths)
    finally:
        place.close()


def _write_combined(config: ExperimentConfig, place: RunFolder, paths: Sequence[Path]) -> None:
    tables = Tables(RequestsBuilder(), StepsBuilder(), TbtBuilder())
    manifests, step_times = [], []
    for path in paths:
        manifests.append(json.loads((path / "manifest.json").read_text()))
        step_times.append(json.loads((path / "summary.json").read_text())["step_times"])
        _take_requests(tables.requests, path)
        tables.steps.extend(pq.read_table(path / "steps.parquet"))
        _take_gaps(tables.tbt, path)
    if config.output.decision_log:
        merge_decision_logs([path / DECISIONS_FILE for path in paths], place.path / DECISIONS_FILE)
    write_results(place.path, config, tables, max(one["ended_at_s"] for one in manifests), _origin(step_times))
    place.note(FINISHED, **_facts(manifests))


def _take_requests(requests: RequestsBuilder, path: Path) -> None:
    table = pq.read_table(path / "requests.parquet")
    requests.extend(
        {
            name: column.to_pylist() if str(column.type) == "string" else column.to_numpy()
            for name, column in zip(table.column_names, table.columns, strict=True)
            if name != "slo_met"
        }
    )


def _take_gaps(tbt: TbtBuilder, path: Path) -> None:
    table = pq.read_table(path / "tbt.parquet").to_pandas()
    for (replicaset, slo_class), rows in table.groupby(["replicaset", "slo_class"], sort=False):
        gaps = tbt.gaps(str(replicaset), str(slo_class))
        gaps.extend_weighted(rows["gap_s"].to_numpy(), rows["weight"].to_numpy())


def _origin(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where step times come from: as each part says, with what fell back in all of them."""
    facts = {name: value for name, value in parts[0].items() if name != "sentence"}
    return StepTimes(**facts | {"num_fallback": sum(one["num_fallback"] for one in parts)}).to_mapping()


def _facts(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ended = [reason for one in manifests for reason in one["num_ended"]]
    return {
        "ended_at_s": max(one["ended_at_s"] for one in manifests),
        **{name: sum(one[name] for one in manifests) for name in ("num_steps", "num_submitted", "num_unfinished")},
        "num_ended": {
            reason: sum(one["num_ended"].get(reason, 0) for one in manifests) for reason in dict.fromkeys(ended)
        },
        "workload": manifests[0]["workload"],
    }
