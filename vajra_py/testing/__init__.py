"""Conformance checks, fakes and scenarios for plug-in authors.

Names are loaded on first use, so importing this package alone is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vajra_py.lazy import lazy_names

if TYPE_CHECKING:
    from vajra_py.testing.admission import admission_policies_under_test, check_admission_policy
    from vajra_py.testing.conformance import (
        Check,
        ConformanceWarning,
        check_policy,
        conformance_checks,
        policies_under_test,
    )
    from vajra_py.testing.harness import Harness, HarnessOptions, PolicySource, Step, StepEntry
    from vajra_py.testing.reference_policies import ByArrival, BySlack, InTurn, PlainChunks, Shared
    from vajra_py.testing.retention import check_retention
    from vajra_py.testing.routing_parts import check_routing_part, routing_parts_under_test
    from vajra_py.testing.scalers import check_scaler
    from vajra_py.testing.scenarios import SCENARIOS, Scenario
    from vajra_py.testing.strict import StrictViews

_HOMES = {
    "ByArrival": "reference_policies",
    "BySlack": "reference_policies",
    "Check": "conformance",
    "ConformanceWarning": "conformance",
    "Harness": "harness",
    "HarnessOptions": "harness",
    "InTurn": "reference_policies",
    "PlainChunks": "reference_policies",
    "PolicySource": "harness",
    "SCENARIOS": "scenarios",
    "Scenario": "scenarios",
    "Shared": "reference_policies",
    "Step": "harness",
    "StepEntry": "harness",
    "StrictViews": "strict",
    "admission_policies_under_test": "admission",
    "check_admission_policy": "admission",
    "check_policy": "conformance",
    "check_retention": "retention",
    "check_routing_part": "routing_parts",
    "check_scaler": "scalers",
    "conformance_checks": "conformance",
    "policies_under_test": "conformance",
    "routing_parts_under_test": "routing_parts",
}

__all__ = [
    "SCENARIOS",
    "ByArrival",
    "BySlack",
    "Check",
    "ConformanceWarning",
    "Harness",
    "HarnessOptions",
    "InTurn",
    "PlainChunks",
    "PolicySource",
    "Scenario",
    "Shared",
    "Step",
    "StepEntry",
    "StrictViews",
    "admission_policies_under_test",
    "check_admission_policy",
    "check_policy",
    "check_retention",
    "check_routing_part",
    "check_scaler",
    "conformance_checks",
    "policies_under_test",
    "routing_parts_under_test",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
