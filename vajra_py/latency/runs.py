"""Protocols of optional capabilities of latency models; callers test for them with `isinstance`."""

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
    """Latency model that predicts many steps of a pure-decode batch at once."""

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> Sequence[float] | npt.NDArray[np.float64]:
        """Return the seconds of each of `num_steps` steps of `num_decodes` decodes.

        A model may leave out the last steps, but not the first one. If only one step is returned, the simulator
        predicts that step alone (`taken_time_s` or `stage_time_s`). An interrupted run does not reach its last steps,
        so a step that the model cannot predict must be left out; only the first step may raise an error.

        Contexts sum to `first_context_tokens` in the first step, and each grows by 1 per step. The result must equal,
        bit for bit, the results of calling `batch_time_s` for each step, so that a simulation does not depend on which
        of these methods the simulator calls.
        """


@runtime_checkable
class VariesSteps(Protocol):
    """Latency model in which equal steps may have different durations: predictions are means, simulated steps vary."""

    variation: Variation | None
    """Variation of the durations of equal steps; None if equal steps have equal durations."""


@runtime_checkable
class HasHostOverhead(Protocol):
    """Latency model that states the host's overhead per request, in addition to the overhead per step."""

    @property
    def host(self) -> HostOverhead:
        """Overhead of the host per step and per request; predictions of steps already include the part per step."""


@runtime_checkable
class CountsSteps(Protocol):
    """Latency model that counts the steps that are executed. Predictions that it makes for policies do not count."""

    def taken_time_s(self, features: BatchFeatures) -> float:
        """Return the result of `stage_time_s` for this step, and count the step as executed."""


@runtime_checkable
class ReplaysDurations(Protocol):
    """Latency model with the step durations of a recorded run, which a simulator uses instead of predictions."""

    def next_duration_s(self, replica_id: int, step_index: int | None = None) -> float:
        """Return the seconds of the replica's next step; `step_index`, if given, is checked against the recording.

        Raises:
            ExecutorError: the replica has no recording, its steps are used up, or the order is wrong.
        """

    def restart(self) -> None:
        """Restart every replica's recording from its first step."""
