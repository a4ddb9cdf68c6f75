"""Detect, before running, the seeds of a setting that would give equal runs.

Two seeds give equal runs if they draw equal requests and the experiment draws nothing else. Requests are drawn and
compared; building the experiment without requests shows whether policies, predictors of output lengths or step times
use random streams. A policy that requests a stream only during its run is detected afterwards (`drew_beside_workload`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vajra_py.config import ExperimentConfig, SweepPoint
from vajra_py.config.sweeps import SEED
from vajra_py.errors import VajraError
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.metrics.runs.copies import MEASURED, SECTION, copies_sentence, same_load_sentence
from vajra_py.metrics.runs.run_data import MANIFEST_FILE, SUMMARY_FILE
from vajra_py.metrics.summary.summary import Summary
from vajra_py.plugins import Registry
from vajra_py.runtime.support.seeds import STEP_TIMES, NotedSeeds, SeedTree
from vajra_py.workload import Workload
from vajra_py.workload.draws import Draws


@dataclass(frozen=True, slots=True)
class SettingSeeds:
    """Points of one setting, as positions among the points under examination."""

    points: tuple[int, ...]
    original: tuple[int, ...]
    """For each point, the first point with an equal run, possibly the point itself."""
    same_load: str = ""
    """Sentence on the only source of differences between the runs if all runs have equal requests; else empty."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Points to run, one per group of equivalent points."""
        return tuple(dict.fromkeys(self.original))

    @property
    def why(self) -> str:
        """Reason why some seeds are not run; empty if all are run."""
        num_seeds, num_runs = len(self.points), len(self.kept)
        return copies_sentence(num_seeds, num_runs) if num_runs < num_seeds else ""

    def copies_of(self, point: int) -> list[int]:
        """Return the points that are not run because their runs would equal that of `point`, which is one of `kept`."""
        return [one for one, first in zip(self.points, self.original, strict=True) if first == point and one != point]


class EqualSeeds:
    """Finds seeds that would repeat another seed's run; input files are read once for all settings."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._draws = Draws(Path.cwd())
        self._known: dict[str, tuple[int, ...]] = {}

    def of_points(self, points: Sequence[tuple[SweepPoint, ExperimentConfig]]) -> list[SettingSeeds]:
        """Return the settings of a sweep's points, in order; points that differ only in their seed form one setting."""
        groups: dict[str, list[int]] = {}
        for index, (point, _) in enumerate(points):
            values = {path: value for path, value in point.items() if path != SEED}
            groups.setdefault(json.dumps(values, sort_keys=True, default=str), []).append(index)
        found = []
        for members in groups.values():
            own = self.of_seeds(points[members[0]][1], [points[i][1].seed for i in members])
            found.append(SettingSeeds(tuple(members), tuple(members[i] for i in own.original), own.same_load))
        return found

    def of_seeds(self, config: ExperimentConfig, seeds: Sequence[int]) -> SettingSeeds:
        """Return which of these seeds give equal runs of an experiment; the points of the result are positions in
        `seeds`.

        If the requests cannot be drawn or the experiment cannot be built, all seeds count as different, so that the
        runs report the error.
        """
        every = tuple(range(len(seeds)))
        different = SettingSeeds(every, every)
        if len(seeds) < 2:
            return different
        key = f"{config.workload.model_dump_json()} {seeds}"
        try:
            if key not in self._known:
                streams = [SeedTree(seed).child("workload").stream for seed in seeds]
                prints = self._draws.fingerprints(config.workload, streams)
                self._known[key] = tuple(prints.index(one) for one in prints)
            found = self._known[key]
            drawn = [] if found == every else self._drawn_beside_workload(config)
        except VajraError:
            return different
        if not drawn:
            return SettingSeeds(every, found)
        return SettingSeeds(every, every, "" if any(found) else same_load_sentence(drawn))

    def different(self, config: ExperimentConfig, count: int) -> tuple[tuple[int, ...], str]:
        """Return a tuple (seeds, note): at most `count` seeds that give different runs, beginning with the experiment's
        seed.

        The note gives the reason if there are fewer than `count` seeds. Otherwise it names the source of variation if
        all runs have the same requests; else it is empty.
        """
        every = range(config.seed, config.seed + count)
        own = self.of_seeds(config, every)
        return tuple(every[i] for i in own.kept), own.why or own.same_load

    def _drawn_beside_workload(self, config: ExperimentConfig) -> list[str]:
        """Return the sources of variation between runs of equal requests: the policies, predictors and step times that
        request a random stream when they are built.
        """
        if config.backend.kind != "simulator":
            return [MEASURED]
        seeds = NotedSeeds(SeedTree(config.seed))
        made = SimulatedRun(Run(config, self._registry, Workload.from_requests([]), seeds))
        made.close()
        return sorted({*seeds.draws(), *([STEP_TIMES] if made.varies_steps else [])})


def drew_beside_workload(path: Path) -> bool:
    """Return whether a finished run used its seed for anything besides its requests."""
    return bool(json.loads((path / MANIFEST_FILE).read_text()).get("drawn_beside_workload"))


def note_copies(path: Path, seeds: SettingSeeds) -> None:
    """Record in a run's summary that it represents several seeds, or remove an earlier record if it does not."""
    file = path / SUMMARY_FILE
    written = file.read_text(encoding="utf-8")
    if not seeds.why and f'"{SECTION}"' not in written:
        return
    summary = Summary.from_json(written)
    before = summary.value(f"{SECTION}.why")
    data = {key: value for key, value in summary.data.items() if key != SECTION}
    data["warnings"] = [one for one in data["warnings"] if one != before]
    if seeds.why:
        data["warnings"].append(seeds.why)
        data[SECTION] = {"asked": len(seeds.points), "run": len(seeds.kept), "why": seeds.why}
    text = Summary(data).to_json()
    if text != written:
        partial = file.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
