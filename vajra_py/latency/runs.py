"""Optional capabilities of latency models beyond the contract, found with `isinstance`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures
from vajra_py.latency.hardware.host_overhead import HostOverhead
from vajra_py.latency.models.variation import Variation


@runtime_checkable
class PredictsDecodeRuns(Protocol):
    """Predicts many steps at once while a batch does nothing but decode."""

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> Sequence[float] | npt.NDArray[np.float64]:
        """Seconds of each of `num_steps` steps; contexts sum to `first_context_tokens` in the first, and each grows by 1 a step.

        Must equal `batch_time_s` called step by step, bit for bit, so that it makes no difference which one a simulator uses.
        """


@runtime_checkable
class VariesSteps(Protocol):
    """Has the variation of equal steps. Predictions are their mean; a simulator lets single steps take more or less."""

    variation: Variation | None
    """None: they do not differ."""


@runtime_checkable
class HasHostOverhead(Protocol):
    """Has the time that an engine's host adds to requests beside the model's steps."""

    @property
    def host(self) -> HostOverhead:
        """The overhead; steps hold their part of it already."""


@runtime_checkable
class CountsSteps(Protocol):
    """Counts the sources of predictions for steps that are run, apart from those that policies ask about."""

    def taken_time_s(self, features: BatchFeatures) -> float:
        """Return `stage_time_s`, and count the step as taken."""


@runtime_checkable
class ReplaysDurations(Protocol):
    """Has the duration of each step of a recorded run; a simulator then takes these durations in place of predictions."""

    def next_duration_s(self, replica_id: int, step_index: int | None = None) -> float:
        """Seconds of the replica's next step; `step_index`, when given, is checked against the recording.

        Raises:
            ExecutorError: the recording has no such replica, has run out, or is queried out of order.
        """

    def restart(self) -> None:
        """Begin every replica's recording anew."""
