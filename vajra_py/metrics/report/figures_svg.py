"""Embed matplotlib figures into an HTML page as small, deterministic SVG in the page's colours."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, cast

from vajra_py.metrics.plots.style import GRID, INK, LITERAL_TEXT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_IDENTIFIER = re.compile(r'\sid="([^"]+)"')
_REFERENCE = re.compile(r'(href="#|url\(#)([^")]+)')
_PATH = re.compile(r'\sd="[^"]*"')
_LONG_NUMBER = re.compile(r"(\d+\.\d{2})\d+")
_SIZE = re.compile(r'\s(?:width|height)="[\d.]+pt"')


def inline_svg(figure: Figure, key: str, alt: str) -> str:
    """Return the figure as an `<svg>` element with an accessible name (`alt`) and without scripts, links or metadata.

    `key` must be unique in the page; it prefixes the identifiers inside. Text and frames use the page's text colour,
    grids its `--grid` colour.
    """
    import matplotlib

    buffer = io.StringIO()
    settings = {**LITERAL_TEXT, "svg.fonttype": "path", "svg.hashsalt": key, "path.simplify_threshold": 0.3}
    with matplotlib.rc_context(cast("Any", settings)):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = _METADATA.sub("", _COMMENT.sub("", svg[svg.index("<svg") :]))
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    referenced = {found.group(2) for found in _REFERENCE.finditer(svg)}
    svg = _IDENTIFIER.sub(lambda m: f' id="{key}-{m.group(1)}"' if m.group(1) in referenced else "", svg)
    svg = _REFERENCE.sub(lambda m: f"{m.group(1)}{key}-{m.group(2)}", svg)
    head, rest = svg.split(">", 1)
    head = _SIZE.sub("", head)
    return f'{head} role="img" aria-label="{_attribute(alt)}">{_squeezed(rest)}'


def _squeezed(svg: str) -> str:
    """Return the SVG without indentation and empty lines, with coordinates of paths cut to hundredths of a point."""
    lines = (line.strip() for line in svg.splitlines())
    text = "\n".join(line for line in lines if line)
    return _PATH.sub(lambda path: _LONG_NUMBER.sub(r"\1", path.group()), text)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
