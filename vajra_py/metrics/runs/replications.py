"""Group runs into settings: runs that differ only in their seed are replications of one setting, unless they repeat
each other.

A load is defined by the configuration, not by the measured rate: seeds of one configured rate differ slightly in their
measured rates and are still the same load.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from vajra_py.metrics.runs.copies import (
    COPIED,
    copies_sentence,
    drawn_beside_workload,
    have_same_load,
    num_asked,
    originals,
    same_load_sentence,
)
from vajra_py.metrics.runs.differences import ABSENT, SEED_PATH, Axis, axes, flatten, is_rate, workload_axes
from vajra_py.metrics.runs.load_variation import load_note
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.run_data import RunData


class Setting(Struct, frozen=True):
    """One configuration with its runs in the order given: one per seed, without runs that repeat another."""

    name: str
    positions: tuple[int, ...]
    """Positions of `runs` in the sequence that was grouped."""
    runs: tuple[RunData, ...]
    seeds: tuple[str, ...]
    num_seeds: int = 1
    """Number of seeds of the setting, including seeds that have no run in `runs` because they repeat another run."""
    every: tuple[RunData, ...] = ()
    """All runs of the setting, including those that repeat another run."""
    note: str = ""
    """Text on a limitation of the replications (copies, equal requests, load that does not vary); empty if none."""

    @property
    def is_copied(self) -> bool:
        """True if all of several seeds give the same run, so that the random variation is unknown."""
        return self.num_seeds > 1 and len(self.runs) == 1

    @property
    def one_sample(self) -> str:
        """Reason why the setting's seeds count as one observation, shown in place of an interval or a mark; empty if
        each run is a replication.
        """
        return COPIED if self.is_copied else ""

    @property
    def first(self) -> RunData:
        """The first replication, renamed to the setting's name, for figures that show a single run."""
        return self.runs[0] if self.runs[0].name == self.name else self.runs[0].renamed(self.name)


def system_axes(runs: Sequence[RunData]) -> list[Axis]:
    """Return the axes in which the runs differ, without the seed."""
    return [axis for axis in axes(runs) if axis.path != SEED_PATH]


def load_labels(runs: Sequence[RunData]) -> tuple[str, ...]:
    """Return, for each run, the values of the workload parameters in which the runs differ (without seeds), as text;
    empty texts if the runs differ in no workload parameter.
    """
    varied = workload_axes(runs)
    return tuple(", ".join(f"{axis.label} {axis.values[i]}" for axis in varied) for i in range(len(runs)))


def workload_differences(runs: Sequence[RunData]) -> str:
    """Return a sentence, without its full stop, on how the runs' workloads differ; an empty text if they differ at most
    in their rate.
    """
    varied = workload_axes(runs)
    if all(is_rate(axis) for axis in varied):
        return ""
    words = ", ".join(f"{axis.label} ({', '.join(axis.levels)})" for axis in varied if not is_rate(axis))
    return f"The workloads differ in {words}: settings under different workloads are not compared"


def seed_of(run: RunData) -> str:
    """Return the run's seed as text; a dash if neither its manifest nor its configuration has one."""
    seed = run.manifest.get("seed")  # checked first: parsing the YAML configuration is much slower
    if isinstance(seed, int):
        return str(seed)
    return flatten(run.config).get(SEED_PATH, ABSENT)


def group_replications(runs: Sequence[RunData], *, each_run: bool = False) -> list[Setting]:
    """Return the settings of these runs under distinct names, ordered by their first runs; with `each_run` every run is
    a setting of its own.

    Two runs with the same configuration *and* seed are not replications of each other: they give the same results, or
    they differ because they come from different versions of the code. If a configuration has such runs, its runs are
    grouped by parent folder, and each group becomes a setting named after its folder. If a folder has two runs of the
    configuration with the same seed, each run of the configuration becomes a setting of its own instead.
    """
    named = distinct(runs)
    varied = system_axes(runs)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(runs)):
        groups.setdefault(tuple(axis.values[i] for axis in varied), []).append(i)
    seeds = [seed_of(run) for run in runs]
    settings: list[Setting] = []
    for key, members in groups.items():
        for positions, folder in (
            [((i,), "") for i in members] if each_run else _without_repetition(runs, members, seeds)
        ):
            every = tuple(named[i] for i in positions)
            kept = [0] if each_run else originals(every)
            runs_kept = tuple(every[k] for k in kept)
            num_seeds = 1 if each_run else max(len(every), num_asked(runs_kept))
            label = "/".join(key) or named[positions[0]].path.resolve().parent.name
            name = named[positions[0]].name if num_seeds == 1 else f"{label}{folder}"
            settings.append(
                Setting(
                    name,
                    tuple(positions[k] for k in kept),
                    runs_kept,
                    tuple(seeds[positions[k]] for k in kept),
                    num_seeds,
                    every,
                    _note(runs_kept, num_seeds),
                )
            )
    return sorted(settings, key=lambda setting: setting.positions)


def _note(runs: Sequence[RunData], num_seeds: int) -> str:
    if len(runs) < num_seeds:
        return copies_sentence(num_seeds, len(runs))
    if len(runs) > 1 and have_same_load(runs):
        return same_load_sentence(drawn_beside_workload(runs))
    return load_note(runs) if len(runs) > 1 else ""


def _without_repetition(
    runs: Sequence[RunData], members: Sequence[int], seeds: Sequence[str]
) -> list[tuple[tuple[int, ...], str]]:
    """Divide these runs into groups without repeated seeds; return (positions of the runs, suffix for the setting's
    name) of each group.
    """
    if _is_repetition_free(members, seeds):
        return [(tuple(members), "")]
    folders: dict[str, list[int]] = {}
    for i in members:
        folders.setdefault(str(runs[i].path.resolve().parent), []).append(i)
    if len(folders) > 1 and all(_is_repetition_free(own, seeds) for own in folders.values()):
        return [
            (tuple(own), f" [{runs[own[0]].path.resolve().parent.name} #{number}]")
            for number, own in enumerate(folders.values(), start=1)
        ]
    return [((i,), "") for i in members]


def _is_repetition_free(members: Sequence[int], seeds: Sequence[str]) -> bool:
    return len({seeds[i] for i in members}) == len(members)
