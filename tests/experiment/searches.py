"""Drives searches for a capacity with slacks that a function gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vajra_py.config.slo import parse_slo
from vajra_py.experiment.capacity.rate import RateQuestion
from vajra_py.experiment.capacity.search import Answer, Probe, Search, Setting

ONE = parse_slo("p99(ttft) <= 1")
BOTH = parse_slo("p99(ttft) <= 1 and attainment >= 0.9")


def question(
    low: float = 0.01,
    high: float = 10_000,
    start: float = 2.0,
    precision_fraction: float = 0.02,
    replications: int = 5,
    max_replications: int = 20,
    slo: str = ONE.text,
) -> RateQuestion:
    """A question with an SLO of one condition, unless another one is given."""
    return RateQuestion(parse_slo(slo), low, high, start, precision_fraction, replications, max_replications)


@dataclass(slots=True)
class Driven:
    """A search that has ended."""

    answer: Answer
    probes: list[Probe] = field(default_factory=list)

    @property
    def num_runs(self) -> int:
        """Number of runs that the search needed."""
        return len(self.probes)


def drive(search: Search, slack: Callable[[Setting, int], float | Sequence[float]]) -> Driven:
    """The answer to a search under slacks by setting and seed: of the only condition, or of each."""
    probes: list[Probe] = []
    try:
        wanted = next(search)
        while True:
            probes += wanted
            found = {}
            for probe in wanted:
                value = slack(*probe)
                found[probe] = (value,) if isinstance(value, float | int) else tuple(value)
            wanted = search.send(found)
    except StopIteration as stop:
        assert len(set(probes)) == len(probes)  # nothing is run twice
        return Driven(stop.value, probes)
