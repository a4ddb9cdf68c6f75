"""The shipped admission policies keep the contract, with default parameters and with those that defer."""

from __future__ import annotations

from typing import Any

import pytest

from vajra_policies import vajra_admission_policies
from vajra_py.contract import AdmissionSpec
from vajra_py.testing import check_admission_policy

_SPECS = {spec.name: spec for spec in vajra_admission_policies()}
OTHERWISE: list[tuple[str, dict[str, Any]]] = [
    ("token_bucket", {"when_empty": "defer", "capacity": 400, "refill_per_s": 500}),
    ("token_bucket", {"cost": "requests", "by": "slo_class", "capacity": 2, "refill_per_s": 20, "when_empty": "defer"}),
    ("max_load", {"max_requests": 2}),
    ("max_load", {"max_requests": None, "max_tokens": 200}),
    ("saturation_shedding", {"when_closed": "defer", "protected_priority": -2, "queue_threshold_requests": 1}),
    ("probabilistic_shedding", {"protected_priority": -1, "factor": 1.0}),
    ("priority_holdback", {"detector": "concurrency", "max_concurrency_requests": 2, "min_ceiling": 0.2}),
    ("priority_holdback", {"spacing": "value", "detector": "concurrency", "concurrency": "hybrid", "max_concurrency_tokens": 200}),
    ("priority_holdback", {"when_closed": "refuse", "queue_threshold_requests": 1}),
    ("soft_reflective_ceiling", {"detector": "concurrency", "max_concurrency_requests": 3}),
    ("mooncake", {"ttft_slo_s": 0.2, "tbt_slo_s": 0.02}),
    ("mooncake", {"rule": "load", "ttft_slo_s": 0.2, "tbt_slo_s": 0.006}),
    ("mooncake", {"rule": "predicted_load", "tbt_slo_s": 0.006, "decode_s": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize("spec", _SPECS.values(), ids=list(_SPECS))
def test_default_parameters_keep_the_contract(spec: AdmissionSpec) -> None:
    check_admission_policy(spec)


@pytest.mark.parametrize(("name", "params"), OTHERWISE, ids=[f"{name}-{i}" for i, (name, _) in enumerate(OTHERWISE)])
def test_other_parameters_keep_it_too(name: str, params: dict[str, Any]) -> None:
    check_admission_policy(_SPECS[name], params)
