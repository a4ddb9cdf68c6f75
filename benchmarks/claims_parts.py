"""Parts of the claims of published policies: cells that are simulated once, comparisons over paired seeds, service of tenants over time.

Grades: 1, an invariant or closed form, without tolerance or with the one stated; 2, an order of means over paired seeds, by more than twice
the standard error of the difference; 3, a ratio within a factor of two of the paper's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias, TypeVar

import numpy as np

from vajra_py.contract.latency import OutputLengthPredictor
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import NoisyOracleLengths, OracleLengths
from vajra_py.runtime.requests.request import Request
from vajra_py.testing.harness import Harness, HarnessOptions, PolicySource
from vajra_py.workload.request import RequestSpec

ROOT = Path(__file__).resolve().parents[1]
SEEDS = tuple(range(5))
GPU_7B = AffineModel(base_s=0.015, per_token_s=0.0001, per_decode_context_token_s=2e-7)
"""A 7B model on one GPU in round figures: 15 ms a step, 10,000 prompt tokens a second beside that."""

Cell = Mapping[str, float]
Knows: TypeAlias = Callable[[Sequence[RequestSpec]], OutputLengthPredictor]
"""Factory of a predictor of these requests' output lengths."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a claim: whether it came out, our figure, and the reason where it did not."""

    holds: bool
    ours: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a policy's paper."""

    policy: str
    text: str
    paper: str
    """The paper's figure; "-" where it gives none."""
    grade: int
    check: Callable[[Cells], Verdict] | None = None
    test: str = ""
    """Tests that hold a claim of grade 1, from the root."""
    why: str = ""
    """Reason found for a claim that does not come out."""
    card: str = ""
    """Link from the page to the policy's card, where it is not the section of its name in the policy reference."""


class Cells:
    """Results of simulations, each written to a file as soon as it is there and never computed twice for the same sources."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"cells-{sources_digest()}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Cell] = {}
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # the last line of a run that was cut off may be incomplete
            if whole != text:
                self._path.write_text(whole, encoding="utf-8")
            rows = [json.loads(line) for line in whole.splitlines()]
            self._known.update((row["name"], row["cell"]) for row in rows)

    def get(self, name: str, make: Callable[[], Cell]) -> Cell:
        """The cell of this name; simulated if it is not known."""
        cell = self._known.get(name)
        if cell is None:
            cell = self._known[name] = make()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, "cell": cell}) + "\n")
        return cell

    def column(self, name: str, metric: str, make: Callable[[int], Cell], seeds: Sequence[int] = SEEDS) -> list[float]:
        """One figure of a family of cells over the seeds, in their order."""
        return [self.get(f"{name}, seed {seed}", lambda seed=seed: make(seed))[metric] for seed in seeds]  # type: ignore[misc]

    def columns(
        self, name: str, metric: str, make: Callable[..., Cell], over: Iterable[T], seeds: Sequence[int] = SEEDS
    ) -> dict[T, list[float]]:
        """One figure of several families of cells, each made of one of these things and a seed."""
        return {one: self.column(f"{name} {one}", metric, partial(make, one), seeds) for one in over}


def sources_digest() -> str:
    """A short name for the state of everything that a claim's figures depend on."""
    digest = hashlib.blake2b(digest_size=6)
    folders = ("vajra_py", "policies/vajra_policies")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([*paths, *(ROOT / "benchmarks").glob("claims*.py")]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


# Comparisons


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of paired differences, and its standard error."""

    mean: float
    error: float

    @property
    def is_positive(self) -> bool:
        """True if the mean is above zero by more than twice the standard error."""
        return self.mean > 2.0 * self.error


def difference(larger: Sequence[float], smaller: Sequence[float]) -> Difference:
    """Paired differences of two columns with the same seeds."""
    values = [one - other for one, other in zip(larger, smaller, strict=True)]
    return Difference(fmean(values), stdev(values) / math.sqrt(len(values)))


def ordered(columns: Mapping[str, Sequence[float]], unit: str = "", digits: int = 3) -> Verdict:
    """Verdict on columns that are claimed to rise in the order given, each by more than twice the standard error."""
    names = list(columns)
    failed = [
        f"{left} is not below {right}"
        for left, right in pairwise(names)
        if not difference(columns[right], columns[left]).is_positive
    ]
    means = ", ".join(f"{name} {fmean(values):.{digits}g}{unit}" for name, values in columns.items())
    return Verdict(not failed, means, "; ".join(failed))


# Simulations


def simulate(
    prioritizer: PolicySource,
    batcher: PolicySource,
    specs: Iterable[RequestSpec],
    options: HarnessOptions,
    router: PolicySource = "least_loaded",
) -> Harness:
    """Serve the requests to the end; nothing is kept of steps by default."""
    harness = Harness(prioritizer, router, batcher, options)
    harness.run(specs)
    return harness


def served(
    prioritizer: PolicySource,
    batcher: PolicySource,
    specs: Sequence[RequestSpec],
    options: HarnessOptions,
    router: PolicySource = "least_loaded",
) -> list[Request]:
    """The requests after such a simulation, in the order of the workload."""
    return requests_in(simulate(prioritizer, batcher, specs, options, router), specs)


def options_of(**settings: Any) -> HarnessOptions:
    """Options of a replica for claims: no checks after every step, which tests make elsewhere."""
    plain = HarnessOptions(latency=GPU_7B, check_conservation=False, keeps_steps=False, policy_timeout_s=None)
    return replace(plain, **settings)


def requests_in(harness: Harness, specs: Iterable[RequestSpec]) -> list[Request]:
    """The requests after the run, in the order of the workload."""
    return [harness.request(spec.request_id) for spec in specs]


def time_in_system(request: Request) -> float:
    """Seconds from arrival to the last token."""
    assert request.ended_at is not None
    return request.ended_at - request.arrived_at


def ttft(request: Request) -> float:
    """Seconds from arrival to the first token."""
    assert request.first_token_at is not None
    return request.first_token_at - request.arrived_at


def lengths_of(specs: Iterable[RequestSpec], sigma: float = 0.0, seed: int = 0) -> OracleLengths | NoisyOracleLengths:
    """Predictor of the requests' output lengths: the truth, or the truth times a log-normal error."""
    truth = {spec.request_id: spec.num_output_tokens for spec in specs}
    return NoisyOracleLengths(truth, sigma, seed) if sigma else OracleLengths(truth)


def poisson(stream: np.random.Generator, rate: float, until_s: float) -> list[float]:
    """Arrival times of a Poisson process, seconds."""
    times: list[float] = []
    now = float(stream.exponential(1.0 / rate))
    while now < until_s:
        times.append(now)
        now += float(stream.exponential(1.0 / rate))
    return times


# Service of tenants


def service_gap(
    harness: Harness,
    specs: Sequence[RequestSpec],
    tenants: tuple[str, str],
    prompt_weight: float,
    output_weight: float,
    *,
    counts_cached: bool = True,
) -> float:
    """Largest difference of two tenants' service over every window in which both have waiting requests throughout, weighted tokens.

    From a run's steps: prompts count at first admission, generated tokens at the end of their step; without `counts_cached`
    less what the prefix cache spared. Other tenants do not count.
    """
    facts = {spec.request_id: spec for spec in specs if spec.tenant in tenants}
    outputs = dict.fromkeys(facts, 0)
    waiting = dict.fromkeys(tenants, 0)
    sign = {tenants[0]: 1.0, tenants[1]: -1.0}
    events: list[tuple[float, int, int, str, str]] = [
        (spec.arrived_at, 1, index, "arrival", name) for index, (name, spec) in enumerate(facts.items())
    ]
    for index, step in enumerate(harness.steps):
        for entry in step.entries:
            if entry.request_id not in facts:
                continue
            if entry.kind != "running":
                events.append((step.formed_at, 2, index, entry.kind, entry.request_id))
            spec = facts[entry.request_id]
            if entry.num_computed_before + entry.num_tokens == spec.num_prompt_tokens + outputs[entry.request_id]:
                outputs[entry.request_id] += 1
                events.append((step.ended_at, 0, index, "token", entry.request_id))
    gap = widest = 0.0
    low = high = math.nan
    for _, _, _, kind, request_id in sorted(events, key=lambda event: event[:3]):
        spec = facts[request_id]
        was_backlogged = all(waiting.values())
        if kind == "arrival":
            waiting[spec.tenant] += 1
        elif kind == "token":
            gap += sign[spec.tenant] * output_weight
        else:
            waiting[spec.tenant] -= 1
            if kind == "admitted":
                num_spared = 0 if counts_cached else harness.request(request_id).num_cached_tokens
                gap += sign[spec.tenant] * prompt_weight * (spec.num_prompt_tokens - num_spared)
        if was_backlogged:
            low, high = min(low, gap), max(high, gap)
            widest = max(widest, high - low)
        if all(waiting.values()) and not was_backlogged:
            low = high = gap
    return widest
