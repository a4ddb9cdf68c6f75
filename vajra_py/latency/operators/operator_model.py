"""Predict steps from an engine's operator tables, and track how much of the time follows from rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures, ModelDescription
from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.operators.dense_times import interpolated, summed
from vajra_py.latency.operators.operator_bundle import Operators
from vajra_py.latency.operators.profile_bundle import BundleOptions, ProfileBundleModel


class OperatorTablesModel(ProfileBundleModel):
    """A `ProfileBundleModel` whose operator times come from tables by size.

    It supports everything that its base class does (calibrations, KV sizes, breakdowns). In addition it tracks how much
    of the time of executed steps follows from rules, because the tables have no measurement.
    """

    def __init__(
        self, operators: Operators, model: ModelSpec, options: BundleOptions, device: DeviceSpec | None = None
    ) -> None:
        super().__init__(operators.bundle, model, options, device)
        dense = operators.bundle.dense
        filled = {name: dense[name] for name in operators.filled}
        self._filled = summed(filled, model.num_layers, model.num_dense_layers)
        self._filled_dense: dict[int, float] = {}
        self._taken_s = 0.0
        self._filled_time_s = 0.0

    @property
    def source(self) -> str:
        """Origin of the operator times, in a few words."""
        return f"{super().source}, looked up by size in the tables of aiconfigurator"

    @property
    def filled_fraction(self) -> float:
        """Fraction of the time of all steps executed so far that follows from rules instead of measurements.

        Predictions do not depend on it.
        """
        return self._filled_time_s / self._taken_s if self._taken_s else 0.0

    def describe(self) -> ModelDescription:
        """Describe the model as `ProfileBundleModel` does, and add the fraction of time that was not measured; see
        `DescribesModel`.
        """
        described = super().describe()
        device = described.device if self.device is not None else self.bundle.hardware.replace("_", "-")
        return replace(described, device=device, filled_fraction=self.filled_fraction)

    def taken_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds of a step that is executed, and count it in `filled_fraction`."""
        seconds = self.batch_time_s(features)
        self._taken_s += seconds
        self._filled_time_s += self._filled_s(features, seconds)
        return seconds

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> Sequence[float] | npt.NDArray[np.float64]:
        """See `ProfileBundleModel`; the returned steps count as executed, even if the run is interrupted later.

        A step that is returned alone does not count here, because `taken_time_s` counts it.
        """
        times = super().decode_run_times_s(num_decodes, first_context_tokens, num_steps)
        if len(times) > 1:
            self._taken_s += float(np.sum(times))
            self._filled_time_s += len(times) * self._dense_filled_s(num_decodes)
        return times

    def filled_s(self, features: BatchFeatures) -> float:
        """Return the seconds of a step that follow from rules.

        These are the times of operators that were not measured and, if any chunk has cached context, of all attention.
        """
        return self._filled_s(features, self.batch_time_s(features))

    def _filled_s(self, features: BatchFeatures, seconds: float) -> float:
        filled = self._dense_filled_s(features.num_tokens)
        if features.prefill_context_tokens:
            filled += self._attention_s(features, seconds)
        return filled

    def _attention_s(self, features: BatchFeatures, seconds: float) -> float:
        """Return the attention's part of the `seconds` of a step with prompts; 0 if the step is beyond the tables."""
        if self._is_sum_of_parts(features):
            parts = self._parts(features) if self.covers(features) else {}
            return parts.get("prefill_attention", 0.0) + parts.get("decode_attention", 0.0)
        of_tokens = self._of_tokens_s.get(features.num_decodes + features.prefill_tokens)
        of_sequences = self._of_sequences_s.get(features.num_decodes + features.num_prefills)
        if of_tokens is None or of_sequences is None:
            return 0.0
        return max(0.0, seconds - of_tokens - of_sequences[0])

    def _dense_filled_s(self, tokens: int) -> float:
        known = self._filled_dense.get(tokens)
        if known is None:
            curve, padded = self._filled, self._padded(self._per_rank(tokens))
            known = 1e-6 * interpolated(curve.sizes, curve.times_us, padded) * self._scale["dense"]
            self._filled_dense[tokens] = known
        return known
