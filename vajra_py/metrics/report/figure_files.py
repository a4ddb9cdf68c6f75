"""Write a report's figures as files for a paper, at column width and with their data as CSV, and its table as LaTeX,
Markdown and CSV.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vajra_py.errors import RunError, did_you_mean
from vajra_py.metrics.comparison.comparison import compare
from vajra_py.metrics.plots.style import LITERAL_TEXT, draw_at, keep_panel
from vajra_py.metrics.plots.style import panels as named_panels
from vajra_py.metrics.report.figures import FIGURES, FigureSpec
from vajra_py.metrics.runs.replications import group_replications
from vajra_py.metrics.runs.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_IN = 3.35
"""Width of a column of a two-column paper, in inches."""
MIN_WIDTH_IN, MAX_WIDTH_IN = 2.0, 40.0
FORMATS = ("pdf", "svg", "png")
COLUMNS = ("panel", "title", "x_label", "y_label", "series", "category", "x", "y", "y_high")
"""Columns of a figure's data. `category` names the row of a bar. For an interval or area, `y` is the lower end and
`y_high` the upper end. For a horizontal interval or a step of the step timeline, `x` is the left end and `y_high` the
right end.
"""
_PNG_DPI = 300
_UNNAMED = re.compile(r"_(child\d+|nolegend_|point|baseline)")
"""Pattern of the labels that matplotlib and the figures of this package give to lines and areas without a name."""


def write_figures(
    runs: Sequence[RunData],
    folder: str | Path,
    *,
    formats: Sequence[str] = ("pdf",),
    width_in: float = COLUMN_IN,
    only: Sequence[str] = (),
    panels: Sequence[str] = (),
) -> list[Path]:
    """Write the figures of the runs' report in each format with their data as CSV, and the comparison as `table.tex`,
    `table.md` and `table.csv`.

    No figure is taller than a page. The same runs give the same bytes.

    Args:
        runs: Runs to show.
        folder: Destination, created if it does not exist.
        formats: File formats among `FORMATS`.
        width_in: Width of the figures in inches.
        only: Names of the figures to write; by default all.
        panels: Names of single panels, such as `ttft_p99`, to write as files of their own.

    Returns:
        Paths of the written files.

    Raises:
        RunError: For an unknown format, figure or panel, or an invalid width.
    """
    known = {spec.key: spec for spec in FIGURES}
    formats, only, panels = ([one] if isinstance(one, str) else one for one in (formats, only, panels))
    for name in only:
        if name not in known:
            raise RunError(f"figures: there is none of that name ({name!r}). {did_you_mean(name, known)}")
    for form in formats:
        if form not in FORMATS:
            raise RunError(f"figures: not a format for files ({form!r}). {did_you_mean(form, FORMATS)}")
    if not MIN_WIDTH_IN <= width_in <= MAX_WIDTH_IN:
        raise RunError(f"figures: not a width ({width_in}). Allowed: {MIN_WIDTH_IN:g} to {MAX_WIDTH_IN:g} inches.")
    runs = _by_load(runs)
    comparison = compare(runs)
    specs = [spec for key, spec in known.items() if (not only or key in only) and spec.wanted(runs)]
    drawn = list(_single_panels(specs, runs, width_in, panels) if panels else _whole(specs, runs, width_in))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for key, figure in drawn:
        written += [save_figure(figure, target / f"{key}.{form}") for form in formats]
        path = target / f"{key}.csv"
        with path.open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(figure_data(figure))
        written.append(path)
    for name, table in (
        ("table.tex", comparison.to_latex()),
        ("table.md", comparison.to_markdown()),
        ("table.csv", comparison.to_csv()),
    ):
        (target / name).write_text(table, encoding="utf-8")
        written.append(target / name)
    return written


def _by_load(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs in the order of a report: grouped by load, with loads in natural order."""
    settings = group_replications(runs)
    return [run for i in compare(runs).by_load() for run in settings[i].runs] if runs else []


def _whole(specs: Sequence[FigureSpec], runs: Sequence[RunData], width_in: float) -> Iterator[tuple[str, Figure]]:
    for spec in specs:
        yield spec.key, draw_at(width_in, spec.draw, spec.runs_of(runs))


def _single_panels(
    specs: Sequence[FigureSpec], runs: Sequence[RunData], width_in: float, wanted: Sequence[str]
) -> list[tuple[str, Figure]]:
    """Return (file name, figure) of each panel whose name, or the part of its name before `/`, is in `wanted`. Raises
    `RunError` for an unknown name in `wanted`.
    """
    found, names = [], dict[str, None]()
    for spec in specs:
        own = list(named_panels(draw_at(width_in, spec.draw, spec.runs_of(runs))))
        names |= dict.fromkeys([*own, *(name.partition("/")[0] for name in own)])
        for name in own:
            if name in wanted or name.partition("/")[0] in wanted:
                figure = draw_at(width_in, spec.draw, spec.runs_of(runs))
                keep_panel(figure, named_panels(figure)[name])
                found.append((f"{spec.key}-{name.replace('/', '-')}", figure))
    for name in wanted:
        if name not in names:
            raise RunError(f"figures: no panel of these figures has that name ({name!r}). {did_you_mean(name, names)}.")
    return found


def figure_data(figure: Figure) -> Iterator[dict[str, Any]]:
    """Yield a figure's data as rows of `COLUMNS`: the points of its lines, and its intervals, bars and areas."""
    for panel, axes in enumerate(figure.axes, start=1):
        if not axes.get_visible():
            continue
        base = {
            "panel": panel,
            "title": axes.get_title("left"),
            "x_label": axes.get_xlabel(),
            "y_label": axes.get_ylabel(),
        }
        for row in itertools.chain(_lines(axes), _intervals(axes), _bars(axes), _areas(axes)):
            yield base | row


def _lines(axes: Axes) -> Iterator[dict[str, Any]]:
    for line in axes.get_lines():
        label = str(line.get_label())
        if not _UNNAMED.fullmatch(label):
            xs, ys = cast("Any", line.get_xdata()), cast("Any", line.get_ydata())
            yield from ({"series": label, "x": float(x), "y": float(y)} for x, y in zip(xs, ys, strict=True))


def _intervals(axes: Axes) -> Iterator[dict[str, Any]]:
    """Yield the intervals of values, and the steps of a step timeline."""
    for collection in axes.collections:
        label = str(collection.get_label())
        if _UNNAMED.fullmatch(label):
            continue
        for path in collection.get_paths():
            (x, low), (right, high) = path.get_extents().get_points().tolist()
            # Only steps and horizontal intervals have a width. In their rows, `y_high` holds the x of the right end.
            if right > x:
                yield {"series": label, "x": x, "y": low, "y_high": right}
            else:
                yield {"series": label, "x": x, "y": low, "y_high": high}


def _bars(axes: Axes) -> Iterator[dict[str, Any]]:
    names = [text.get_text() for text in axes.get_yticklabels()]
    for container in axes.containers:
        for i, bar in enumerate(cast("Any", container)):
            category = names[i] if i < len(names) else str(i)
            yield {"series": container.get_label(), "category": category, "x": float(bar.get_width())}


def _areas(axes: Axes) -> Iterator[dict[str, Any]]:
    from matplotlib.patches import StepPatch

    for patch in axes.patches:
        if isinstance(patch, StepPatch):
            values, edges, baseline = (cast("Any", part) for part in patch.get_data())
            lows = np.broadcast_to(
                np.asarray(baseline or 0.0 if np.ndim(baseline) == 0 else baseline), np.shape(values)
            )
            for low, value, edge in zip(lows, values, edges[:-1], strict=True):
                yield {"series": patch.get_label(), "x": float(edge), "y": float(low), "y_high": float(value)}


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix and return the path; the same figure gives the same bytes."""
    import matplotlib

    settings = {**LITERAL_TEXT, "svg.fonttype": "none", "svg.hashsalt": path.stem, "pdf.fonttype": 42}
    metadata: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(path.suffix[1:], {})
    with matplotlib.rc_context(cast("Any", settings)):
        figure.savefig(path, metadata=metadata, dpi=_PNG_DPI)
    return path
