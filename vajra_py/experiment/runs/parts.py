"""Execute a run in parts (`divided`) and merge their results; the tables have the rows of the undivided run's tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig, run_manifest
from vajra_py.experiment.device_figures import devices_of, latency_models
from vajra_py.experiment.runs.backend import Progress, Run
from vajra_py.experiment.runs.divided import Part, divide, why_whole
from vajra_py.experiment.runs.folder import FINISHED, RunFolder
from vajra_py.experiment.runs.part_tables import has_transfers, take_emitted, take_notes, take_part
from vajra_py.experiment.runs.pool import MakePool, RunTask
from vajra_py.experiment.runs.results import Tables, write_results
from vajra_py.experiment.runs.run import load_workload
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.latency import StepTimes
from vajra_py.metrics.runs.run_data import DECISIONS_FILE, MANIFEST_FILE, RunData
from vajra_py.metrics.tables.further_columns import FurtherColumns
from vajra_py.metrics.tables.requests import RequestsBuilder, TbtBuilder
from vajra_py.metrics.tables.steps import StepsBuilder
from vajra_py.metrics.tables.transfers import TransfersBuilder
from vajra_py.plugins import Registry
from vajra_py.runtime.records.decision_merge import merge_decision_logs
from vajra_py.runtime.support.seeds import NotedSeeds, SeedTree


def parts_of(config: ExperimentConfig, registry: Registry, count: int) -> list[Part] | str:
    """Return the parts of this experiment for `count` workers, or the reason why it cannot be divided. Raises
    `ConfigError` in the same cases as a run.
    """
    reason = why_whole(config, registry)
    if reason is not None:
        return reason
    workload = load_workload(config)
    if workload.has_followers:
        return "its requests follow one another, wherever they were served"
    if "program_id" in workload.columns.stated:
        return "its programs have calls that may be served by any replica"
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
    *,
    overwrite: bool = False,
) -> RunData | str:
    """Run an experiment in parts and open its results, or return the reason why a part failed.

    Parts are written beside the run's folder and removed at the end. Parts that an interrupted run has finished are
    repeated only if `overwrite` is set, or if their inputs or the installed versions have changed.
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
            is_done = not overwrite and _is_done(path, config, registry)
            runs.submit(number, RunTask(config, path, overwrite=not is_done, part=part))
        for _, error in runs.ends():
            failed = failed or error
    finally:
        runs.close()
    if failed is None:
        _combine(config, registry, place, paths)
    if folder.exists():  # the folder is absent if no part has begun
        shutil.rmtree(folder)
    return failed or RunData.load(place.path)


def _is_done(path: Path, config: ExperimentConfig, registry: Registry) -> bool:
    """Return whether a part was finished with the package versions that are installed now; all parts of a run must come
    from the same versions.
    """
    if not RunFolder(path).is_finished(config):
        return False
    made, now = json.loads((path / MANIFEST_FILE).read_text()), run_manifest(config, registry)
    return all(made[name] == now[name] for name in ("versions", "plugins"))


def _combine(config: ExperimentConfig, registry: Registry, place: RunFolder, paths: Sequence[Path]) -> None:
    try:
        place.start(config, registry, overwrite=True)
        _write_combined(config, registry, place, paths)
    finally:
        place.close()


def _write_combined(config: ExperimentConfig, registry: Registry, place: RunFolder, paths: Sequence[Path]) -> None:
    manifests = [json.loads((path / MANIFEST_FILE).read_text()) for path in paths]
    ended_at = max(one["ended_at_s"] for one in manifests)
    with ThreadPoolExecutor(1) as beside:
        merging = None
        if config.output.decision_log:
            logs = [path / DECISIONS_FILE for path in paths]
            merging = beside.submit(merge_decision_logs, logs, place.path / DECISIONS_FILE)
        devices = devices_of(config, latency_models(config, registry))
        transfers = TransfersBuilder() if any(map(has_transfers, paths)) else None
        requests = RequestsBuilder(FurtherColumns(movement=transfers))
        emitted, notes = take_emitted(paths), take_notes(paths)
        tables = Tables(requests, StepsBuilder(), TbtBuilder(), emitted, notes, devices, transfers=transfers)
        step_times = [take_part(path, tables) for path in paths]
        write_results(place.path, config, tables, ended_at, _origin(step_times))
        if merging is not None:
            merging.result()
    place.note(FINISHED, **_facts(manifests))


def _origin(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the merged origin of step times, including the fallbacks of all parts."""
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
        "drawn_beside_workload": sorted({name for one in manifests for name in one["drawn_beside_workload"]}),
    }
