"""Figure of a workload: arrivals, burstiness, lengths, repeated prefixes, sessions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from vajra_py.metrics.definitions import Floats
from vajra_py.metrics.plots.style import (
    COLOURS,
    DASHES,
    MUTED,
    add_legend,
    new_figure,
    note_empty,
    percent,
    plain_log,
    styled,
)
from vajra_py.workload import Workload
from vajra_py.workload.arrays import StringColumn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 100
_MIN_WINDOWS = 20
_PROMPT, _OUTPUT = COLOURS[0], COLOURS[1]


@styled
def workload_figure(workload: Workload) -> Figure:
    """Draw six panels: arrivals over time, gaps between arrivals, index of dispersion of arrivals, lengths, repeated
    prefixes, turns of sessions.

    Arrival times of later turns of a session are nominal, since in a run a turn arrives only after the previous turn
    has ended. The index of dispersion is the variance divided by the mean of the number of arrivals in windows of a
    given length. It is 1 at every length for Poisson arrivals, and rises at lengths at which arrivals are bursty.
    """
    from matplotlib.lines import Line2D

    figure, axes = new_figure(2, 3, 2.6)
    columns = workload.columns
    _arrivals(axes[0, 0], columns.arrived_at)
    _gaps(axes[0, 1], np.diff(columns.arrived_at))
    _dispersion(axes[0, 2], columns.arrived_at)
    _lengths(axes[1, 0], (("prompt", columns.num_prompt_tokens), ("output", columns.num_output_tokens)))
    _prefixes(axes[1, 1], workload)
    _cdf(axes[1, 2], _turns(columns.session_id), ("turns", "turns of a session", "share of sessions"), "no sessions")
    looks: tuple[tuple[str, str, Any], ...] = (
        ("prompt", _PROMPT, DASHES[0]),
        ("output", _OUTPUT, DASHES[1]),
        ("Poisson", MUTED, "--"),
    )
    entries: list[tuple[str, Any]] = [(label, Line2D([], [], color=hue, linestyle=dash)) for label, hue, dash in looks]
    add_legend(figure, entries)
    return figure


def _arrivals(axes: Any, arrived_at: Floats) -> None:
    axes.set_xlabel("time (s)")
    axes.set_ylabel("arrivals (requests/s)")
    if len(arrived_at) < 2 or not arrived_at[-1] > arrived_at[0]:
        note_empty(axes, "all at once" if len(arrived_at) else "no data")
        return
    edges = np.linspace(arrived_at[0], arrived_at[-1], _BINS + 1)
    rates = np.histogram(arrived_at, edges)[0] / np.diff(edges)
    axes.stairs(rates, edges, fill=True, color=_PROMPT, linewidth=0, label="arrivals")
    axes.set_ylim(bottom=0)


def _gaps(axes: Any, gaps: Floats) -> None:
    positive = gaps[gaps > 0]
    _cdf(axes, positive, ("gaps", "gap between arrivals (s)", "share of gaps"), "no gaps")
    if positive.size:
        low, high = axes.get_xlim()
        at = np.geomspace(low, high, 200)
        axes.plot(at, 1 - np.exp(-at / gaps.mean()), color=MUTED, linestyle="--", linewidth=1.0, label="Poisson")


def _dispersion(axes: Any, arrived_at: Floats) -> None:
    axes.set_xlabel("window (s)")
    axes.set_ylabel("index of dispersion")
    span = float(arrived_at[-1] - arrived_at[0]) if len(arrived_at) > _MIN_WINDOWS else 0.0
    if not span > 0:
        note_empty(axes, "too few arrivals")
        return
    windows = np.geomspace(span / len(arrived_at), span / _MIN_WINDOWS, 12)
    found = []
    for window in windows:
        counts = np.bincount(((arrived_at - arrived_at[0]) / window).astype(np.int64))[: int(span / window)]
        found.append(float(counts.var() / counts.mean()))
    axes.plot(windows, found, color=_PROMPT, marker="o", markersize=3.5, label="index of dispersion")
    axes.axhline(1.0, color=MUTED, linestyle="--", linewidth=1.0, label="Poisson")
    plain_log(axes.xaxis, most=5)
    axes.set_ylim(bottom=0)


def _lengths(axes: Any, named: tuple[tuple[str, Any], ...]) -> None:
    for (label, lengths), colour, dash in zip(named, (_PROMPT, _OUTPUT), DASHES, strict=False):
        if len(lengths):
            ordered = np.sort(lengths)
            axes.step(ordered, _shares(ordered), where="post", color=colour, linestyle=dash, label=label)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("share of requests")
    if axes.lines:
        plain_log(axes.xaxis, most=6)
        axes.set_ylim(0, 1.02)
        percent(axes.yaxis)
    else:
        note_empty(axes)


def _prefixes(axes: Any, workload: Workload) -> None:
    shared = workload.shared_prefix_tokens()
    fractions = None if shared is None else shared / np.maximum(workload.columns.num_prompt_tokens, 1)
    axes.set_xlabel("part of the prompt seen before")
    axes.set_ylabel("share of requests")
    if fractions is None or not fractions.size:
        note_empty(axes, "contents unknown")
        return
    ordered = np.sort(fractions)
    axes.step(ordered, _shares(ordered), where="post", color=_PROMPT, label="repeated prefixes")
    axes.set_ylim(0, 1.02)
    percent(axes.yaxis)
    percent(axes.xaxis)


def _turns(sessions: StringColumn | None) -> Any:
    """Return the number of requests of each session; None if there are no sessions."""
    if sessions is None:
        return None
    counts = Counter(sessions[row] for row in range(len(sessions)))
    return [count for name, count in counts.items() if name]


def _cdf(axes: Any, values: Any, words: tuple[str, str, str], missing: str) -> None:
    series, label, share = words
    axes.set_xlabel(label)
    axes.set_ylabel(share)
    if values is None or not len(values):
        note_empty(axes, missing)
        return
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    plain_log(axes.xaxis, most=5)
    axes.set_xlim(ordered[0] * 0.8, ordered[-1] * 1.25)
    axes.step(ordered, _shares(ordered), where="post", color=_PROMPT, label=series)
    axes.set_ylim(0, 1.02)
    percent(axes.yaxis)


def _shares(ordered: Any) -> Floats:
    shares: Floats = np.arange(1, len(ordered) + 1) / len(ordered)
    return shares


__all__ = ["workload_figure"]
