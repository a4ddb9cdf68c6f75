"""Origin and known error of a run's step times, in one line for summaries, tables and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field, structs

from vajra_py.contract.latency import DescribesModel, LatencyModel, ModelDescription, Origin


class StepTimes(Struct, frozen=True):
    """Origin of step times, and their known errors."""

    kind: Origin
    source: str
    errors: Mapping[str, float] = field(default_factory=dict)
    """Absolute values of the known relative errors of means, by metric (`ttft_s`, `tpot_s`, `e2e_s`, `step`); empty if
    never compared with an engine.
    """
    num_fallback: int = 0
    """Number of predictions by the roofline for steps beyond the measurements, including predictions for policies."""
    filled_fraction: float = 0.0
    """Fraction of the run's step time that was computed by rules, for steps without a measurement in the tables."""

    @property
    def sentence(self) -> str:
        """Kind, source and errors in one line, without a full stop."""
        text = f"{self.kind}: {self.source}"
        if self.errors:
            known = ", ".join(f"{name.removesuffix('_s').upper()} {value:.1%}" for name, value in self.errors.items())
            text += f"; error of means where it was checked: {known}"
        elif self.kind in ("analytic", "measured"):
            text += "; never compared with a run of this engine"
        if self.filled_fraction:
            text += f"; {self.filled_fraction:.0%} of the step time by rules where the tables have holes"
        if self.num_fallback:
            text += f"; {self.num_fallback} times beyond what was measured, where the roofline answered"
        return text

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields and the sentence as plain values."""
        return {**structs.asdict(self), "errors": dict(self.errors), "sentence": self.sentence}


LEAST_TRUSTED_FIRST: tuple[Origin, ...] = ("given", "analytic", "measured", "calibrated", "recorded", "real")

REAL = StepTimes("real", "computed by the engine")


def combined_step_times(models: Mapping[str, LatencyModel]) -> StepTimes:
    """Return the combined origin of the step times of a run, given the latency model of each replicaset.

    The result has the least trusted kind, all sources, the total number of fallback predictions (a model that several
    replicasets share counts once), and the largest filled fraction. For each metric whose error is known for every
    model, it has the largest error.
    """
    by_replicaset = {name: step_times_of(one) for name, one in models.items()}
    by_model = {id(one): by_replicaset[name] for name, one in models.items()}
    num_fallback = sum(one.num_fallback for one in by_model.values())
    distinct = list(by_replicaset.values())
    if all(one == distinct[0] for one in distinct):
        return structs.replace(distinct[0], num_fallback=num_fallback)
    metrics = set.intersection(*(set(one.errors) for one in distinct))
    return StepTimes(
        next(kind for kind in LEAST_TRUSTED_FIRST if any(one.kind == kind for one in distinct)),
        "; ".join(f"{name}: {one.kind}, {one.source}" for name, one in by_replicaset.items()),
        {name: max(one.errors[name] for one in distinct) for name in sorted(metrics)},
        num_fallback,
        max(one.filled_fraction for one in distinct),
    )


def description_of(latency: LatencyModel) -> ModelDescription:
    """Return a latency model's own description; without one, a description that names the experiment's author as the
    origin.
    """
    if isinstance(latency, DescribesModel):
        return latency.describe()
    return ModelDescription("given", f"{type(latency).__name__}, figures of the experiment's author")


def step_times_of(latency: LatencyModel) -> StepTimes:
    """Return the origin of a latency model's step times."""
    one = description_of(latency)
    return StepTimes(one.origin, one.source, dict(one.errors), one.num_fallback, one.filled_fraction)
