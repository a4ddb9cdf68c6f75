"""HTML page of an atlas with its files: map of policies, figures, numbers, and a card for each policy."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vajra_py.metrics.comparison.compared_settings import OVERALL
from vajra_py.metrics.comparison.metrics import BY_KEY
from vajra_py.metrics.comparison.policy_map import (
    BASELINE,
    WorkloadComparison,
    atlas_json,
    differences_csv,
    map_csv,
    values_csv,
)
from vajra_py.metrics.comparison.table_model import Table
from vajra_py.metrics.comparison.tables import origins, value_table
from vajra_py.metrics.plots import policy_map as plots
from vajra_py.metrics.report.figure_files import COLUMNS, figure_data, save_figure
from vajra_py.metrics.report.figures_svg import inline_svg
from vajra_py.metrics.report.report import findings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "atlas.html"
FIGURES = "figures"
"""Folder of the figures beside the page."""
_FURTHER = ("throughput_output_tokens_per_s", "max_service_difference", "jain_index", "cost_per_million_output_tokens")
"""Metrics in the table of numbers, besides the primary ones."""
_MAP_CAPTION = (
    "Means over the seeds, under the highest load that the baseline kept up with. Blue is better than the baseline and orange worse, full from half or twice its value, "
    "pale where the difference may be chance. A frame marks the best of its column, a thick one and * where it is significantly better than every other policy; † is "
    "significantly worse than the best. Grey: overloaded, neither marked nor tested."
)
_EFFECT_CAPTION = "Mean difference from the baseline under the highest load that it kept up with, over pairs of one seed, with its 95 % interval."

_CURVE_CAPTION = "Against load: the policy, the baseline, and in grey all others."
_SECTIONS = (
    (
        "latency_by_load",
        "Latency against load",
        "Means over the seeds with their 95 % intervals, logarithmic; hollow: overloaded.",
    ),
    (
        "fairness_by_throughput",
        "Fairness against throughput",
        "Largest difference of service between two tenants that both waited, against the output tokens per second, under the highest load that the baseline kept "
        "up with. Low and to the right is better; intervals may end beyond the figure; hollow: overloaded.",
    ),
    (
        "cost",
        "Cost",
        "Cost per million output tokens, a colour for each load: the higher the load, the cheaper. The replicas are the same for all policies, so that policies differ in cost where they "
        "keep up with a load that others do not; hollow: overloaded.",
    ),
)
"""Figures that the page shows below the map, as (name, title, caption)."""


@dataclass(frozen=True, slots=True)
class CardPart:
    """Policy described on a card, from its own declaration."""

    name: str
    place: str
    """Layer of the policy, or its kind if it belongs to no layer."""
    package: str
    summary: str
    source: str
    statement: str
    """Docstring of the policy's class; empty if there is none."""
    parameters: Table
    advice: str = ""
    """Advice in two sentences; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Card:
    """Description of one row of the map."""

    name: str
    parts: Sequence[CardPart]


@dataclass(frozen=True, slots=True)
class AtlasPage:
    """Content of an atlas page."""

    workloads: Sequence[WorkloadComparison]
    cards: Sequence[Card]
    """Cards of the map's policies, in the order of the map."""
    failures: Sequence[tuple[str, str]] = ()
    title: str = "Atlas of policies"


def write_atlas(page: AtlasPage, folder: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write the page, its figures in these formats with their data as CSV, and all values as CSV and JSON; return the
    paths, with the page first.
    """
    pictures = folder / FIGURES
    pictures.mkdir(parents=True, exist_ok=True)
    figures = _drawn(page)
    texts = {
        PAGE: _rendered(page, figures),
        "map.csv": map_csv(page.workloads),
        "values.csv": values_csv(page.workloads),
        "differences.csv": differences_csv(page.workloads),
        "atlas.json": atlas_json(page.workloads),
    }
    written = []
    for key, figure in figures.items():
        figure.set_layout_engine("none")  # keep the layout that was computed for the page
        written += [save_figure(figure, pictures / f"{key}.{form}") for form in formats]
        with (pictures / f"{key}.csv").open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(figure_data(figure))
    for name, content in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, folder / name)
    return [*(folder / name for name in texts), *written]


def _drawn(page: AtlasPage) -> dict[str, Figure]:
    """Return the figures by file name without suffix."""
    workloads = page.workloads
    others = [card.name for card in page.cards if card.name != BASELINE]
    ranks = max(len(own.loads) for own in workloads)
    return {
        "map": plots.policy_map(workloads),
        **{f"map-load-{rank + 1}": plots.policy_map(workloads, rank) for rank in range(ranks) if ranks > 1},
        "latency_by_load": plots.latency_by_load(workloads),
        "fairness_by_throughput": plots.fairness_by_throughput(workloads),
        "cost": plots.cost(workloads),
        **{f"effect-{_slug(name)}": plots.effect(workloads, name) for name in others},
        **{f"curve-{_slug(name)}": plots.latency_by_load(workloads, name) for name in others},
    }


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def _rendered(page: AtlasPage, figures: Mapping[str, Figure]) -> str:
    """Return the page as self-contained HTML text without scripts."""
    from vajra_py.metrics.comparison.table_renderers import html_templates

    workloads = page.workloads

    def shown(key: str, title: str, caption: str = "", alt: str = "") -> dict[str, str]:
        words = " ".join(filter(None, (f"{title}.", caption, alt)))
        name = re.sub(r"[^A-Za-z0-9-]", "-", key)
        return {"key": name, "title": title, "caption": caption, "svg": inline_svg(figures[key], name, words)}

    def of_card(card: Card) -> list[dict[str, str]]:
        name = _slug(card.name)
        captions = (
            (f"effect-{name}", f"Effect of {card.name}", _EFFECT_CAPTION),
            (f"curve-{name}", f"{card.name} and the baseline against load", _CURVE_CAPTION),
        )
        return [shown(*own) for own in captions if own[0] in figures]

    ranks = [key for key in figures if key.startswith("map-load-")]
    context = {
        "title": page.title,
        "lead": list(_lead(workloads, page.cards)),
        "failures": page.failures,
        "workloads": [_workload(own) for own in workloads],
        "map": shown("map", "Map", _MAP_CAPTION, _winners(workloads)),
        "maps": [shown(key, f"Load {rank} of {len(ranks)}") for rank, key in enumerate(ranks, start=1)],
        "figures": [shown(*own) for own in _SECTIONS],
        "cards": [{"name": card.name, "parts": card.parts, "figures": of_card(card)} for card in page.cards],
    }
    return html_templates().get_template("atlas.html.j2").render(context)


def _lead(workloads: Sequence[WorkloadComparison], cards: Sequence[Card]) -> Iterator[str]:
    base = cards[0]
    seeds = sorted({count for own in workloads for count in own.comparison.replications})
    span = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    yield (
        f"{len(cards) - 1} policies on {len(workloads)} workload{'s' if len(workloads) > 1 else ''}, each under {span} "
        f"seed{'s' if seeds != [1] else ''} that all policies share."
    )
    yield f"The baseline is {', '.join(part.name for part in base.parts)}; each policy takes its own place in it, a preset all places."
    if seeds == [1]:
        yield "One seed tests nothing: marks say which value is lowest or highest."
    for sentence in dict.fromkeys(one for own in workloads for one in origins(own.comparison)):
        yield f"{sentence}."


def _winners(workloads: Sequence[WorkloadComparison]) -> str:
    """Return a sentence on the best policies under the main loads, as the map's text alternative."""
    found = []
    for own in workloads:
        for metric in own.metrics:
            names = own.winners(own.main_load, metric.key)
            if names:
                found.append(f"{own.name}, {metric.label}: {', '.join(names)}")
    return "; ".join(found)


def _workload(own: WorkloadComparison) -> dict[str, Any]:
    values = own.comparison.values[OVERALL]
    further = [BY_KEY[key] for key in _FURTHER if any(value is not None for value in values[key])]
    metrics = [*own.metrics, *(metric for metric in further if metric not in own.metrics)]
    return {
        "name": own.name,
        "description": own.description,
        "findings": findings(own.comparison),
        "numbers": value_table(own.comparison, OVERALL, metrics, by_setting=True),
    }
