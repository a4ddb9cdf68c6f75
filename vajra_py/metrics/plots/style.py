"""Common style of all figures: colours, lines, fonts, axes and units.

A run keeps its colour and dash in every figure of a report; colours are those of Okabe and Ito (readable with any
colour vision) without yellow and black, and dashes and markers also distinguish the runs. `INK` and `GRID` are the
colours of text, frames, grids, reference lines and the baseline; a report replaces them by the page's colours.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1b1f24"
GRID = "#d4d8dd"
MUTED = "#9aa1a9"
"""Colour of background series."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c3e", "#6b6ecf")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.4, 1.2, 1.4)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

DECODE_COLOUR = COLOURS[0]
PREFILL_COLOUR = COLOURS[4]
MIXED_COLOUR = COLOURS[2]

MAX_SERIES = len(COLOURS)
"""Maximum number of distinguishable lines in a panel."""

WIDTH_IN = 10.0
"""Width of a report's figures, in inches."""
_NARROW_IN = 8.0
"""Width in inches below which fonts are smaller and a figure is at most as tall as a page, for use in a paper."""
_NARROW_TYPE = 0.8
_NARROW_HEIGHT = 0.62
_PANEL_IN = 2.2
"""Minimum width of a panel in inches, for a figure whose rows of panels fit on a page at this width."""
_SMALL_PANEL_IN = 1.2
"""Minimum width of a panel in inches, for a figure that would otherwise have more rows of panels than fit on a page."""
MAX_HEIGHT_IN = 9.0
"""Text height of a page, in inches."""
_LEGEND_ROW_IN = 0.15
_LABELS_IN = 0.75
"""Height in inches of the labels below the last row of panels plus a short legend."""

LITERAL_TEXT: dict[str, Any] = {"text.parse_math": False}
"""Matplotlib settings with which names are drawn literally, even if they contain `$`. They must also be active when a
figure is written to a file, because tick labels are created at that time.
"""
_RC: dict[str, Any] = {
    **LITERAL_TEXT,
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.minor.visible": False,
    "ytick.minor.visible": False,
}

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Look:
    """Style of a series: positions in `COLOURS` and `DASHES`; a muted series is grey in the background."""

    colour: int | None
    """Position in `COLOURS`; None for the colour `INK`, used for a baseline and for a legend entry of a dash alone."""
    dash: int = 0
    is_muted: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments for drawing a line."""
        if self.is_muted:
            return {"color": MUTED, "linestyle": "-", "linewidth": 0.7, "alpha": 0.6, "zorder": 1.5}
        return {"color": self.hue, "linestyle": DASHES[self.dash % len(DASHES)]}

    @property
    def hue(self) -> str:
        """Colour as a hex string."""
        if self.colour is None:
            return INK
        return MUTED if self.is_muted else COLOURS[self.colour % len(COLOURS)]

    @property
    def marker(self) -> str:
        """Marker that corresponds to the dash."""
        return MARKERS[self.dash % len(MARKERS)]


def styled(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a drawing function to use this module's settings without changing the user's matplotlib settings."""

    @functools.wraps(draw)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        import matplotlib

        with matplotlib.rc_context():
            _use_settings(WIDTH_IN)
            return draw(*args, **kwargs)

    return wrapped


def draw_at(width_in: float, draw: Callable[..., Figure], *args: Any, **kwargs: Any) -> Figure:
    """Draw one of the package's figures at another width in inches, with fonts and panels to match (a column of a paper
    is 3.3 to 3.5 inches wide).
    """
    import matplotlib

    with matplotlib.rc_context():
        _use_settings(width_in)
        return cast("Figure", inspect.unwrap(draw)(*args, **kwargs))


def _use_settings(width_in: float) -> None:
    """Apply this module's settings to matplotlib, with font sizes for a figure of this width. The caller restores the
    previous settings.
    """
    import matplotlib

    matplotlib.rcdefaults()
    matplotlib.rcParams.update(cast("Any", _RC))
    matplotlib.rcParams["figure.figsize"] = (width_in, width_in)
    if width_in < _NARROW_IN:
        for key in (
            "axes.labelsize",
            "axes.titlesize",
            "font.size",
            "legend.fontsize",
            "xtick.labelsize",
            "ytick.labelsize",
        ):
            matplotlib.rcParams[key] = _RC[key] * _NARROW_TYPE
        matplotlib.rcParams["lines.linewidth"] = 1.2


def new_figure(num_rows: int, num_columns: int, row_height_in: float, **shared: Any) -> tuple[Figure, NDArray[Any]]:
    """Return a figure and its grid of axes (always a 2-D array). The width is that of matplotlib's current settings;
    `row_height_in` is the height of a row of panels in inches.

    Panels that do not fit side by side are wrapped to further rows. If the rows of a narrow figure would be taller than
    a page, more panels are placed side by side; if that is not enough, panels are made less tall.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width_in = float(matplotlib.rcParams["figure.figsize"][0])
    height_in = row_height_in * (1.0 if width_in >= _NARROW_IN else _NARROW_HEIGHT)
    across, height_in = _fitted(num_rows * num_columns, num_columns, width_in, height_in)
    rows = -(-num_rows * num_columns // across)
    figure = Figure(
        figsize=(width_in, height_in * rows + _LABELS_IN), layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.06)
    )
    if across == num_columns:
        axes = figure.subplots(num_rows, num_columns, squeeze=False, **shared)
    else:
        axes = _stacked(figure, (num_rows, num_columns, across), shared)
    size = matplotlib.rcParams["xtick.labelsize"]
    for own in axes.flat:
        # Ticks are created when the figure is drawn. At that time, the style's `rcParams` are no longer active, so the
        # style is stored in the axes.
        own.tick_params(color=INK, labelcolor=INK, labelsize=size, width=0.7, grid_color=GRID, grid_linewidth=0.6)
    return figure, axes


def _fitted(count: int, num_columns: int, width_in: float, height_in: float) -> tuple[int, float]:
    """Return (number of panels side by side, height of each in inches)."""
    across = min(num_columns, max(1, int(width_in / _PANEL_IN)))
    if width_in >= _NARROW_IN:
        return across, height_in
    most = max(across, min(num_columns, int(width_in / _SMALL_PANEL_IN)))
    room_in = MAX_HEIGHT_IN - _LABELS_IN
    while across < most and -(-count // across) * height_in > room_in:
        across += 1
    return across, min(height_in, room_in / -(-count // across))


def label_all(axes: NDArray[Any]) -> None:
    """Set, on every panel of a grid, the title of the row and the labels of row and column; hide titles and labels that
    a neighbouring panel shows.
    """
    geometry = axes.flat[0].get_subplotspec().get_geometry()
    across = int(geometry[1])
    is_wrapped = tuple(geometry[:2]) != axes.shape
    common = {own.get_xlabel() for own in axes[-1]} - {""}
    heads = [(own.get_title("left"), own.get_ylabel()) for own in axes[:, 0]]
    foots = [own.get_xlabel() for own in axes[-1]]
    for place, own in enumerate(axes.flat):
        row, column = divmod(place, axes.shape[1])
        is_lowest = place + across >= axes.size if is_wrapped else row == len(axes) - 1
        title, y_label = heads[row]
        if not own.get_title("left"):
            own.set_title(title, visible=is_wrapped)
        if not own.get_ylabel():
            own.set_ylabel(y_label, visible=place % across == 0)
        if foots[column]:
            own.set_xlabel(foots[column], visible=is_lowest or (is_wrapped and len(common) > 1))
        if is_wrapped:
            own.tick_params(labelbottom=True)


def name_panel(axes: Axes, name: str) -> None:
    """Name a panel for the option `--panel`, such as `ttft_p99`."""
    axes.set_label(name)


def panels(figure: Figure) -> dict[str, Axes]:
    """Return the named panels in reading order. Panels that share a name are distinguished by their titles:
    `ttft_p99/interactive`.
    """
    named = [own for own in figure.axes if own.get_visible() and own.get_label()]
    names = [str(own.get_label()) for own in named]
    found: dict[str, Axes] = {}
    for name, own in zip(names, named, strict=True):
        title = re.sub(r"[^\w.+-]+", "_", own.get_title("left")).strip("_")
        found[f"{name}/{title}" if names.count(name) > 1 and title else name] = own
    return found


def keep_panel(figure: Figure, kept: Axes) -> None:
    """Remove every other panel from a figure and reduce its height to that of one panel."""
    from matplotlib.gridspec import GridSpec

    width_in, height_in = figure.get_size_inches()
    for axis in (kept.xaxis, kept.yaxis):
        name = f"{axis.axis_name}axis"
        others = (getattr(own, name).get_label_text() for own in figure.axes)
        axis.set_label_text(axis.get_label_text() or next(filter(None, others), ""))
        axis.label.set_visible(True)
    spec = kept.get_subplotspec()
    rows = 1 if spec is None else spec.get_geometry()[0]
    for own in list(figure.axes):
        if own is not kept:
            own.remove()
    kept.set_subplotspec(GridSpec(1, 1, figure=figure)[0, 0])
    kept.tick_params(labelbottom=True, labelleft=True)
    lowest = (0.5 if width_in < _NARROW_IN else 0.35) * width_in
    figure.set_size_inches(width_in, max((height_in - _LABELS_IN) / rows, lowest) + _LABELS_IN)


def _stacked(figure: Figure, shape: tuple[int, int, int], shared: Mapping[str, Any]) -> NDArray[Any]:
    """Return a (rows, columns) array of axes whose panels are wrapped: the panels fill the figure in reading order, and
    more or fewer than `columns` of them are side by side. `shape` is (rows, columns, panels side by side). `sharex` and
    `sharey` in `shared` refer to the rows and columns of the array, not of the figure.
    """
    import numpy as np

    num_rows, num_columns, across = shape
    axes = np.empty((num_rows, num_columns), dtype=object)

    def partner(how: Any, row: int, column: int) -> Any:
        place = {True: (0, 0), "all": (0, 0), "row": (row, 0), "col": (0, column)}.get(how)
        return None if place is None or place == (row, column) else axes[place]

    for row in range(num_rows):
        for column in range(num_columns):
            place = row * num_columns + column
            axes[row, column] = own = figure.add_subplot(
                -(-num_rows * num_columns // across),
                across,
                place + 1,
                sharex=partner(shared.get("sharex"), row, column),
                sharey=partner(shared.get("sharey"), row, column),
            )
            if shared.get("sharey") and place % across:
                own.tick_params(labelleft=False)
    return axes


def add_legend(figure: Figure, entries: Sequence[tuple[str, Any]], title: str | None = None) -> None:
    """Add one legend below all axes from (label, artist) pairs; without entries there is no legend."""
    if not entries:
        return
    longest = max(len(label) for label, _ in entries)
    width_in, height_in = figure.get_size_inches()
    columns = max(1, min(len(entries), int((13 if width_in >= _NARROW_IN else 16) * width_in / (longest + 8))))
    if width_in < _NARROW_IN:
        rows = -(-len(entries) // columns)
        figure.set_size_inches(width_in, min(MAX_HEIGHT_IN, height_in + _LEGEND_ROW_IN * (rows - 1)))
    figure.legend(
        [artist for _, artist in entries],
        [label for label, _ in entries],
        loc="outside lower center",
        ncols=columns,
        title=title,
        handlelength=2.6,
        columnspacing=1.6,
    )


def line_entries(labelled: Iterable[tuple[str, Look]], with_marker: bool = False) -> list[tuple[str, Any]]:
    """Return legend entries that show lines, with markers if `with_marker`."""
    from matplotlib.lines import Line2D

    entries = []
    for label, look in labelled:
        line = Line2D([], [], **look.line)
        line.set_alpha(1.0)
        if with_marker:
            line.set_marker(look.marker)
            line.set_markersize(5)
        entries.append((label, line))
    return entries


def patch_entries(labelled: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return legend entries that show coloured areas, from (label, colour) pairs."""
    from matplotlib.patches import Patch

    return [(label, Patch(facecolor=colour, edgecolor="none")) for label, colour in labelled]


def tapered(place: int, count: int) -> float:
    """Return the width in points of the line with index `place` among `count` lines. Lines drawn later are thinner, so
    that coinciding lines do not hide each other.
    """
    return 2.4 - 1.2 * place / (count - 1) if count > 1 else 1.7


def note_empty(axes: Axes, text: str = "no data") -> None:
    """Write a text, such as the reason why there are no data, into an empty plot."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set_xticks([])
    axes.set_yticks([])


def plain_log(axis: Any, most: int = 8) -> None:
    """Make an axis logarithmic with at most `most` ticks, written as plain numbers: 0.01, 0.1, 1, 10."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    from vajra_py.metrics.plots.ticks import ReadableLogLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(ReadableLogLocator(most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def number(value: float) -> str:
    """Return a tick label without trailing zeros, with k and M for thousands and millions; only tiny values have an
    exponent.
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    if value != 0 and abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{round(value, 6):g}"


def big_numbers(axis: Any) -> None:
    """Format the ticks of a linear axis with `number`."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def token_count(value: int) -> str:
    """Return a power of two in common notation: 64, 1k, 64k (k = 1024)."""
    return f"{value // 1024}k" if value >= 1024 else str(value)


def misses(axis: Any, least: float) -> None:
    """Scale an axis of fractions to show small values: logarithmic down to the decade of `least`, linear from there to
    0.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    decade = min(-1, math.floor(math.log10(least)))
    set_scale = axis.axes.set_yscale if axis.axis_name == "y" else axis.axes.set_xscale
    set_scale("symlog", linthresh=10.0**decade, linscale=0.5)
    ticks = [0.0] + [step * 10.0**power for power in range(decade, 0) for step in (1, 3)] + [1.0]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axis.set_minor_locator(NullLocator())


def percent(axis: Any) -> None:
    """Format the ticks of an axis of fractions as percentages."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
