"""Assignment of panels, colours and dashes to runs, so that a figure of forty runs stays readable.

Up to eight runs share a panel, each with its own colour. If more runs form a grid, as in a sweep, the axes of the grid
determine colours, dashes and panels; a load axis always determines panels, so that the runs of a panel have the same
load. If more than eight runs do not form a grid, the seven runs with the lowest P99 TTFT are coloured, and the others
are grey in the background.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vajra_py.metrics.plots.style import DASHES, MAX_SERIES, Look
from vajra_py.metrics.runs.differences import SEED_PATH, Axis, axes, is_rate, is_workload
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.replications import Setting, group_replications, load_labels
from vajra_py.metrics.runs.run_data import RunData

MAX_PANELS = 9
_HIGHLIGHTED = 7


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Panel, colour and dashes of each series."""

    panels: tuple[str, ...]
    """Titles of the panels; a single panel has an empty title."""
    panel_of: tuple[int, ...]
    looks: tuple[Look, ...]
    legend: tuple[tuple[str, Look], ...]

    def members(self, panel: int) -> list[int]:
        """Return the positions of the series in this panel, with muted ones first so that they are drawn behind."""
        found = [i for i, own in enumerate(self.panel_of) if own == panel]
        return sorted(found, key=lambda i: not self.looks[i].is_muted)


@dataclass(frozen=True, slots=True)
class Series:
    """Settings of one system under different rates; a series may have only one setting."""

    label: str
    settings: tuple[Setting, ...]


def arrange_runs(runs: Sequence[RunData]) -> Arrangement:
    """Return the arrangement of a figure with one series per run."""
    names = tuple(run.name for run in distinct(runs))
    return _arrange(names, axes(runs), [_rank(run) for run in runs])


def series_by_system(runs: Sequence[RunData]) -> tuple[list[Series], Arrangement]:
    """Group settings that differ only in their rate; return one series for each system and kind of workload, and their
    arrangement.
    """
    settings = group_replications(runs)
    firsts = [setting.first for setting in settings]
    own_axes = [axis for axis in axes(firsts) if not is_rate(axis) and axis.path != SEED_PATH]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(settings)):
        groups.setdefault(tuple(axis.values[i] for axis in own_axes), []).append(i)
    series = []
    for key, members in groups.items():
        label = "/".join(key) if own_axes else "all runs" if len(settings) > 1 else settings[members[0]].name
        if len(members) == 1 and len(groups) > 1:
            label = settings[members[0]].name
        series.append(Series(label, tuple(settings[i] for i in members)))
    heads = [members[0] for members in groups.values()]
    reduced = [Axis(axis.path, axis.label, tuple(axis.values[i] for i in heads)) for axis in own_axes]
    ranks = [min(_rank(setting.first) for setting in one.settings) for one in series]
    return series, _arrange(tuple(one.label for one in series), reduced, ranks)


def select(runs: Sequence[RunData], limit: int) -> list[RunData]:
    """Select at most `limit` runs for a figure with a panel per run, and return them in the given order.

    If there are more runs, those under the highest load are preferred, and among these the ones with the lowest P99
    TTFT. Runs under other loads are selected only if fewer than three runs are under the highest load.
    """
    if len(runs) <= limit:
        return list(runs)
    loads = _offered_by_load(runs)
    order = sorted(range(len(runs)), key=lambda i: (-loads[i], _rank(runs[i]), i))
    under_top_load = [i for i in order if loads[i] == loads[order[0]]]
    order = under_top_load if len(under_top_load) >= 3 else order
    return [runs[i] for i in sorted(order[:limit])]


def _arrange(names: tuple[str, ...], varied: Sequence[Axis], ranks: Sequence[float]) -> Arrangement:
    if len(names) <= MAX_SERIES:
        looks = tuple(Look(i, i) for i in range(len(names)))
        return Arrangement(("",), (0,) * len(names), looks, tuple(zip(names, looks, strict=True)))
    return _grid(len(names), varied) or _highlight(names, ranks)


def _grid(count: int, varied: Sequence[Axis]) -> Arrangement | None:
    """Return an arrangement by the axes of the runs' grid; None if panels, colours and dashes cannot distinguish the
    runs.
    """
    roles = _roles(varied)
    if roles is None or len(set(zip(*(axis.values for axis in varied), strict=True))) < count:
        return None
    dash, colour, rest = roles
    keys = [tuple(axis.values[i] for axis in rest) for i in range(count)]
    ordered = sorted(set(keys), key=lambda key: [axis.levels.index(v) for axis, v in zip(rest, key, strict=True)])
    if len(ordered) > MAX_PANELS:
        return None
    looks = tuple(
        Look(colour.levels.index(colour.values[i]), dash.levels.index(dash.values[i]) if dash else 0)
        for i in range(count)
    )
    legend = [(_called(colour, level), Look(i)) for i, level in enumerate(colour.levels)]
    legend += [(_called(dash, level), Look(None, i)) for i, level in enumerate(dash.levels)] if dash else []
    titles = tuple(
        ", ".join(f"{axis.label}: {value}" for axis, value in zip(rest, key, strict=True)) for key in ordered
    )
    return Arrangement(titles, tuple(ordered.index(key) for key in keys), looks, tuple(legend))


def _called(axis: Axis, level: str) -> str:
    """Return the legend text of an axis level: the name of a policy, or the axis' label with any other value."""
    return level if axis.path.endswith(".policy") else f"{axis.label} {level}"


def _roles(varied: Sequence[Axis]) -> tuple[Axis | None, Axis, list[Axis]] | None:
    """Return the axes that select (dashes, colours, panels).

    A system axis varies the system, a load axis the workload. Load axes select panels. A single system axis selects
    colours. Of two system axes without a load axis, the one with more levels selects colours, the other panels. In all
    other cases, the system axes in ascending order of their number of levels select dashes, colours and panels. None if
    there is no system axis, or if the axis for dashes or colours has too many levels.
    """
    loads = [axis for axis in varied if is_workload(axis) and axis.path != SEED_PATH]
    systems = sorted((axis for axis in varied if not is_workload(axis)), key=lambda axis: len(axis.levels))
    if not systems:
        return None
    if len(systems) == 1:
        dash, colour, rest = None, systems[0], loads
    elif len(systems) == 2 and not loads:
        dash, colour, rest = None, systems[1], systems[:1]
    else:
        dash, colour, rest = systems[0], systems[1], [*systems[2:], *loads]
    if len(colour.levels) > MAX_SERIES or (dash is not None and len(dash.levels) > len(DASHES)):
        return None
    return dash, colour, rest


def _highlight(names: tuple[str, ...], ranks: Sequence[float]) -> Arrangement:
    best = sorted(range(len(names)), key=lambda i: (ranks[i], i))[:_HIGHLIGHTED]
    shown = {position: i for i, position in enumerate(sorted(best))}
    looks = tuple(Look(shown[i], shown[i]) if i in shown else Look(0, is_muted=True) for i in range(len(names)))
    legend = [(names[position], looks[position]) for position in shown]
    legend.append((f"{len(names) - len(shown)} others", Look(0, is_muted=True)))
    return Arrangement(("",), (0,) * len(names), looks, tuple(legend))


def _rank(run: RunData) -> float:
    value = run.summary.value("overall.ttft_s.p99")
    return math.inf if value is None else float(value)


def _offered_by_load(runs: Sequence[RunData]) -> list[float]:
    """Return, for each run, the mean offered rate of the runs under the same configured load."""
    offered: dict[str, list[float]] = {}
    labels = load_labels(runs)
    for label, run in zip(labels, runs, strict=True):
        offered.setdefault(label, []).append(float(run.summary.value("overall.offered_requests_per_s") or 0.0))
    return [math.fsum(offered[label]) / len(offered[label]) for label in labels]
