"""Figures of runs, for a notebook, a paper or the report. Functions that draw return a matplotlib `Figure`; functions
named `has_…` return whether the runs have data for a figure.

Every figure takes one to about forty runs (`workload_figure`: a workload) and shows a message if there is nothing to
plot. Matplotlib is imported when the first figure is drawn.
"""

from __future__ import annotations

from vajra_py.metrics.plots.distributions import (
    has_movement,
    latency_cdfs,
    latency_ranges,
    movement_times,
    slowdown_by_prompt_length,
)
from vajra_py.metrics.plots.emitted import emitted_over_time, has_emitted
from vajra_py.metrics.plots.over_time import (
    batch_composition,
    queue_and_kv,
    service_by_tenant,
    service_difference,
    step_timeline,
)
from vajra_py.metrics.plots.programs import has_programs, program_makespans
from vajra_py.metrics.plots.rates import (
    attainment_by_rate,
    class_latency_by_rate,
    delivery_bars,
    goodput_by_rate,
    has_rate_sweep,
    latency_by_rate,
)
from vajra_py.metrics.plots.replicas import has_pools, has_scaling, pools_over_time, replicas_over_time
from vajra_py.metrics.plots.workload import workload_figure

__all__ = [
    "attainment_by_rate",
    "batch_composition",
    "class_latency_by_rate",
    "delivery_bars",
    "emitted_over_time",
    "goodput_by_rate",
    "has_emitted",
    "has_movement",
    "has_pools",
    "has_programs",
    "has_rate_sweep",
    "has_scaling",
    "latency_by_rate",
    "latency_cdfs",
    "latency_ranges",
    "movement_times",
    "pools_over_time",
    "program_makespans",
    "queue_and_kv",
    "replicas_over_time",
    "service_by_tenant",
    "service_difference",
    "slowdown_by_prompt_length",
    "step_timeline",
    "workload_figure",
]
