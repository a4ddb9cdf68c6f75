"""Check the `sarathi` preset against request times of the Vidur simulator on the same step times.

A workload is NAME_workload.csv.gz with NAME_requests.csv.gz beside it, and the step-time tables of the folder. Settings are
those of NAME_settings.json or settings.json where there is one, else what the folder's README says, else Vidur's defaults for
Llama-3-8B on one A100.

Vidur counts seconds in floating point, ours are picoseconds: times agree to a relative 1e-9, not bit for bit. Where the
folder's tables are rounded (its recorded times come from unrounded ones), they need only agree so closely once the digits
that the rounding cut off are put back, as one set of digits for all requests; see `rounding`.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path

import numpy as np

from tests.golden.readers import simulation
from tests.golden.readers.rounding import (
    EXACT_DIGITS,
    Event,
    Floats,
    StepTimes,
    half_units,
    left_over,
    significant_digits,
)
from tests.golden.readers.trace import Difference, Result
from tests.golden.readers.vidur_tables import ATTENTION_FILE, CACHE_WRITE, OPERATORS, OPERATORS_FILE, VidurTables
from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import VajraError
from vajra_py.latency.models.tabular import Columns, read_columns, read_npz
from vajra_py.workload.request import RequestSpec

WORKLOAD = "_workload.csv.gz"
REQUESTS = "_requests.csv.gz"
MAX_RELATIVE_DIFFERENCE = 1e-9
UNIT = "requests"
ALL_REDUCES_PER_LAYER = 2
"""With tensor parallelism a layer reduces twice over its devices: after attention and after the MLP."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the simulated replica, and how its step times add up."""

    chunk_size: int = 512
    max_batch_size: int = 128
    block_size: int = 16
    num_blocks: int = 29_696
    watermark_fraction: float = 0.01
    num_layers: int = 32
    token_grain: int = 8
    attention_overhead: float = 1.1
    rounded: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(OPERATORS, 1.0))
    """Operators looked up at the rounded number of tokens, and how often a layer has each."""
    exact: Mapping[str, float] = field(default_factory=lambda: {CACHE_WRITE: 1.0})
    """Operators looked up at the exact number of tokens."""


def compare(system: str, workload: Path) -> Result:
    """Simulate one workload and compare TTFT and E2E of each of its requests."""
    return _compare(system, workload.name.removesuffix(WORKLOAD), workload.parent)


def read_settings(folder: Path, name: str) -> Settings:
    """Read a workload's settings from the folder."""
    readmes = sorted(folder.glob("*README*"), key=lambda path: (not path.name.startswith(name), path.name))
    text = "\n".join(path.read_text() for path in readmes)
    settings = settings_in(f"{text}\n{_section_about(folder)}")
    for path in (folder / f"{name}_settings.json", folder / "settings.json"):
        if path.is_file():
            known = {one.name for one in fields(Settings)}
            return replace(
                settings, **{key: value for key, value in json.loads(path.read_text()).items() if key in known}
            )
    return settings


def _section_about(folder: Path) -> str:
    """The section of the README one folder up whose heading names this folder."""
    readme = folder.parent / "README.md"
    if not readme.is_file():
        return ""
    sections = re.split(r"^(?=#)", readme.read_text(), flags=re.MULTILINE)
    return "\n".join(one for one in sections if f"`{folder.name}/`" in one.partition("\n")[0])


_NUMBERS: Mapping[str, str] = {
    "num_layers": r"1e-3\s*\*\s*(\d+)\s*\*|\b(\d+) layers",
    "token_grain": r"multiple of (\d+)",
    "attention_overhead": r"\*\s*\(\s*(\d+\.\d+) if >\s*1",
    "chunk_size": r"chunk(?:[ _]size| \(token budget\)|s of)\D{0,3}(\d[\d,]*)",
    "max_batch_size": r"at most (\d+) (?:sequences|requests)",
    "block_size": r"block[ _]size\D{0,3}(\d+)",
    "num_blocks": r"(\d[\d,]*) KV blocks",
}


def settings_in(text: str) -> Settings:
    """The settings that a README states, and the operators of its formula; defaults for what it leaves out."""
    settings = Settings()
    for key, pattern in _NUMBERS.items():
        if (found := re.search(pattern, text)) is not None:
            number = next(filter(None, found.groups())).replace(",", "")
            settings = replace(settings, **{key: float(number) if "." in number else int(number)})  # type: ignore[arg-type]
    if (found := re.search(r"watermark\D{0,3}(\d+(?:\.\d+)?) ?%", text)) is not None:
        settings = replace(settings, watermark_fraction=float(found.group(1)) / 100)
    if (found := re.search(r"\*\s*\(\s*([^()\[\]]+)\[at N", text)) is not None:
        settings = replace(settings, rounded=_terms(found.group(1)))
    if (found := re.search(r"\]\s*\+\s*([^\[\]]+)\[at the exact", text)) is not None:
        settings = replace(settings, exact=_terms(found.group(1)))
    return settings


def _terms(formula: str) -> dict[str, float]:
    """`a + 2*b` as {a: 1, b: 2}."""
    terms: dict[str, float] = {}
    for term in formula.split("+"):
        factor, name = 1.0, term.strip()
        if "*" in name:
            left, right = (part.strip() for part in name.split("*", 1))
            factor, name = (float(left), right) if left[:1].isdigit() else (float(right), left)
        if name:
            terms[name] = terms.get(name, 0.0) + factor
    return terms


@dataclass(frozen=True, slots=True)
class Tables:
    """The step-time tables of a workload, operators summed up."""

    rounded: Floats
    """Milliseconds of a layer at 1, 2, 3 … tokens, to be looked up at the rounded number of tokens."""
    exact: Floats
    """The same, to be looked up at the exact number of tokens."""
    rounded_may_move: Floats
    exact_may_move: Floats
    """Largest error of each entry by rounding of the file; 0 if the file is exact."""
    attention: Columns

    def step_times(self, settings: Settings) -> VidurTables:
        """Return the step times of these tables."""
        return VidurTables(
            self.rounded,
            self.exact,
            self.attention,
            num_layers=settings.num_layers,
            token_grain=settings.token_grain,
            attention_overhead=settings.attention_overhead,
        )

    def may_move_s(self, settings: Settings, max_tokens: int) -> Floats:
        """Largest difference in seconds of a step of 0, 1, 2 … tokens by rounding of the tables."""
        tokens = np.arange(1, max_tokens + 1)
        grain = settings.token_grain
        up = np.minimum(-(-tokens // grain) * grain, len(self.rounded))
        moved = self.rounded_may_move[up - 1] + self.exact_may_move[tokens - 1]
        return np.concatenate(([0.0], 1e-3 * settings.num_layers * moved))


def read_tables(folder: Path, name: str, settings: Settings) -> Tables:
    """The folder's tables (NAME's own, where there are such).

    Raises `ConfigError` where they are broken, `ValueError` for a column that no formula mentions.
    """
    operators, attention = (
        own if (own := folder / f"{name}_{file}").is_file() else folder / file
        for file in (OPERATORS_FILE, ATTENTION_FILE)
    )
    with gzip.open(operators, "rt", newline="") as stream:
        header = next(csv.reader(stream))
    columns = dict(read_columns(operators, tuple(header)))
    used = dict(settings.rounded)
    for extra in set(header) - {"num_tokens", *settings.rounded, *settings.exact}:
        if "all_reduce" not in extra:
            raise ValueError(f"{operators}: column {extra!r} stands in no formula. Say in README.txt how it counts.")
        used[extra] = ALL_REDUCES_PER_LAYER
    digits = significant_digits(operators)
    moved: Mapping[str, Floats] = {one: np.zeros(len(values)) for one, values in columns.items()}
    if digits < EXACT_DIGITS:
        moved = half_units(columns, digits)
    return Tables(
        rounded=_sum(columns, used),
        exact=_sum(columns, settings.exact),
        rounded_may_move=_sum(moved, used),
        exact_may_move=_sum(moved, settings.exact),
        attention=read_npz(attention),
    )


def _sum(columns: Mapping[str, Floats], factors: Mapping[str, float]) -> Floats:
    total: Floats = np.sum([columns[name] * factor for name, factor in factors.items()], axis=0)
    return total


class _Times(Observer):
    """First token and end of each request."""

    def __init__(self) -> None:
        self.first_token_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        self.detail: dict[str, str] = {}

    def on_first_token(self, request: RequestView, now: float) -> None:
        self.first_token_at[request.request_id] = now

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.ended_at[request.request_id] = now
        self.detail[request.request_id] = f"{reason.value} {detail}".strip()


def simulate(requests: Sequence[RequestSpec], settings: Settings, step_times: VidurTables, *watching: Observer) -> None:
    """Run the `sarathi` preset with these settings and step times."""
    system = {
        "preset": "sarathi",
        "scheduling": {"replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": settings.chunk_size}}},
        "replica": {
            "max_batch_size": settings.max_batch_size,
            "memory": {
                "block_size": settings.block_size,
                "num_blocks": settings.num_blocks,
                "watermark_fraction": settings.watermark_fraction,
            },
        },
    }
    simulation.simulate(system, requests, lambda replica: step_times, watching)


def _compare(system: str, name: str, folder: Path) -> Result:
    settings = read_settings(folder, name)
    requests = [
        RequestSpec(
            str(number), float(row["arrived_at"]), int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
        )
        for number, row in enumerate(_rows(folder / f"{name}{WORKLOAD}"))
    ]
    tables = read_tables(folder, name, settings)
    times, steps = _Times(), StepTimes()
    try:
        simulate(requests, settings, tables.step_times(settings), times, steps)
    except VajraError as error:
        failed = Difference("none", "the simulation", "runs to its end", str(error), [f"settings: {settings}"])
        return Result(system, name, len(requests), failed, UNIT)
    recorded = {row["req_id"]: row for row in _rows(folder / f"{name}{REQUESTS}")}
    events: list[Event] = []
    first: Difference | None = None
    for spec in requests:
        row = recorded[spec.request_id]
        for what, at in (("ttft", times.first_token_at), ("e2e", times.ended_at)):
            expected = float(row[what])
            here = at.get(spec.request_id, inf)
            events.append(Event(here, spec.arrived_at + expected, expected))
            if first is None and events[-1].relative_difference > MAX_RELATIVE_DIFFERENCE:
                first = _difference(spec, row, what, times, settings)
    if first is None:
        return Result(system, name, len(requests), unit=UNIT)
    largest = max(event.relative_difference for event in events)
    may_move_s = tables.may_move_s(settings, max(steps.num_tokens, default=0))
    if largest == inf or not may_move_s.any():
        return Result(system, name, len(requests), first, UNIT)
    rest = left_over(steps, events, may_move_s)
    if rest > MAX_RELATIVE_DIFFERENCE:
        return Result(system, name, len(requests), first, UNIT)
    note = f"times differ by up to {largest:.1e}, by {rest:.1e} once the digits are put back that the tables were rounded by"
    return Result(system, name, len(requests), unit=UNIT, note=note)


def _difference(spec: RequestSpec, row: Mapping[str, str], what: str, times: _Times, settings: Settings) -> Difference:
    name = spec.request_id
    given = {
        "ttft": times.first_token_at.get(name, inf) - spec.arrived_at,
        "e2e": times.ended_at.get(name, inf) - spec.arrived_at,
    }
    here = [*(f"{key}: {value!r} s" for key, value in given.items()), f"ended: {times.detail.get(name, 'never')}"]
    there = [f"settings: {settings}", *(f"{key}: {value}" for key, value in row.items())]
    return Difference(f"of request {name}", what, float(row[what]), given[what], there, here)


def _rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as stream:
        return list(csv.DictReader(stream))
