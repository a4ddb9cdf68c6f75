"""Conformance suite of admission policies.

In a package's own tests:

    @pytest.mark.parametrize("spec", vajra_admission_policies(), ids=lambda spec: spec.name)
    def test_keeps_the_contract(spec):
        check_admission_policy(spec)

The policy is built as in a run, and decides in small simulated situations with plain policies in the other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vajra_py.contract import AdmissionPolicy, AdmissionSpec
from vajra_py.errors import VajraError
from vajra_py.plugins import check_admission_shape, load_registry
from vajra_py.plugins.shapes import ADMISSION_METHODS, hooks_beside
from vajra_py.testing import scenarios
from vajra_py.testing.arguments import params_of, require_spec
from vajra_py.testing.checking import packages_of, require, require_all_end, require_built, run_checks
from vajra_py.testing.habits import kept_requests, uncalled_methods
from vajra_py.testing.purity import only_pure
from vajra_py.testing.reference_policies import ByArrivalInTime, InTurn, PlainChunks
from vajra_py.testing.scenarios import Outcome, Policies, Rules, Scenario, StuckError, simulate
from vajra_py.testing.strict import StrictViews
from vajra_py.testing.subject import UNCOUNTED, Interposing, context_of

SCENARIOS = (
    scenarios.LIGHT,
    scenarios.OVERLOADED,
    scenarios.ALL_AT_ONCE,
    scenarios.STARVED,
    scenarios.LEAVING,
    scenarios.SHARED_PREFIXES,
)
_NUM_REPLICAS = 2


def admission_policies_under_test() -> list[AdmissionSpec]:
    """Return every installed admission policy by name, for `pytest.mark.parametrize`."""
    return [offer.spec for offer in load_registry().admission_policies.values()]


def check_admission_policy(spec: AdmissionSpec, params: Mapping[str, Any] | None = None) -> None:
    """Run every check of an admission policy, with its default parameters or `params`.

    Raises `AssertionError` that names the policy and, one per line, every failed check with its finding.
    """
    require_spec(spec, AdmissionSpec)
    subject = _Subject(spec, params or {})
    checks = {name: partial(check, subject) for name, check in _CHECKS.items()}
    run_checks(f"admission policy {spec.name!r}", checks, needed=list(checks)[:1])


@dataclass(eq=False)
class _Subject:
    """A policy with its parameters, and its cached outcome in each scenario."""

    spec: AdmissionSpec
    params: Mapping[str, Any]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def build(self, context: Any) -> Any:
        """Build a new policy object."""
        return self.spec.build(params_of(self.spec, self.params), context)

    def run(self, scenario: Scenario, interposing: Interposing | None = None, rules: Rules = UNCOUNTED) -> Outcome:
        """Run the policy in a scenario, wrapped by `interposing` if given.

        If the run fails, raises `AssertionError` with the scenario's name.
        """

        def source(context: Any) -> Any:
            policy = self.build(context)
            return policy if interposing is None else interposing(policy)

        policies = Policies(ByArrivalInTime(), InTurn(), lambda context: PlainChunks(), source)
        try:
            return simulate(scenario, policies, replace(rules, num_replicas=_NUM_REPLICAS))
        except (VajraError, StuckError, RuntimeError, AssertionError) as error:
            raise AssertionError(f"{error} ({scenario.name})") from error

    def base(self, scenario: Scenario) -> Outcome:
        """Return the outcome of the policy itself, without a wrapper, in a scenario; lost requests and blocks are
        detected after every step.
        """
        outcome = self.outcomes.get(scenario.name)
        if outcome is None:
            outcome = self.outcomes[scenario.name] = self.run(scenario, rules=Rules())
        return outcome


def _builds(subject: _Subject) -> None:
    require_built(
        lambda: subject.build(context_of(scenarios.LIGHT)),
        subject.params,
        lambda policy: check_admission_shape(policy, "it", "under test"),
        AdmissionPolicy,
    )


def _decides_about_everybody(subject: _Subject) -> None:
    """Check that every request is accepted or refused, ends exactly once, and is not left deferred."""
    for scenario in SCENARIOS:
        require_all_end(subject.base(scenario), f" ({scenario.name})")


def _same_as_base(
    subject: _Subject, what: str, run: Callable[[Scenario], Outcome], violations: Sequence[str] = ()
) -> None:
    for scenario in SCENARIOS:
        try:
            outcome = run(scenario)
        except AssertionError as error:
            raise AssertionError(violations[0] if violations else str(error)) from error
        require(not violations, violations[0] if violations else "")
        first = subject.base(scenario)
        for before, now in zip(first.admissions, outcome.admissions, strict=False):
            require(before == now, f"a decision differs {what} ({scenario.name}): {before} and then {now}")
        same = len(first.admissions) == len(outcome.admissions) and first.ends == outcome.ends
        require(same, f"the run ends in another way {what} ({scenario.name})")


def _is_repeatable(subject: _Subject) -> None:
    _same_as_base(subject, "when the run is repeated with the same seed", subject.run)


def _is_pure(subject: _Subject) -> None:
    spec = subject.spec
    packages = packages_of(spec.build, spec.config, type(subject.build(context_of(scenarios.LIGHT))))
    violations: list[str] = []
    with only_pure(packages, violations):
        _same_as_base(subject, "without clocks and global generators", subject.run, violations)


def _reads_the_contract_only(subject: _Subject) -> None:
    views = StrictViews()

    def run(scenario: Scenario) -> Outcome:
        return subject.run(scenario, views.policy)

    _same_as_base(subject, "behind views that know the contract alone", run, views.violations)


def _is_the_same_when_fast_forwarded(subject: _Subject) -> None:
    for scenario in (scenarios.LIGHT, scenarios.OVERLOADED, scenarios.STARVED, scenarios.LEAVING):
        asked = subject.run(scenario, None, replace(UNCOUNTED, detailed=False, fast_forward=False))
        ahead = subject.run(scenario, None, replace(UNCOUNTED, detailed=False))
        text = f"its decisions differ while decode steps are fast-forwarded ({scenario.name})"
        require((asked.admissions, asked.ends) == (ahead.admissions, ahead.ends), text)


def _calls_its_methods(subject: _Subject) -> None:
    names = uncalled_methods(subject.build(context_of(scenarios.LIGHT)), hooks_beside(ADMISSION_METHODS))
    allowed = "a name of the contract (such as on_arrivals), or a leading underscore"
    require(not names, f"public methods that neither the mechanism nor its package calls: {names}. Allowed: {allowed}")


def _forgets_ended_requests(subject: _Subject) -> None:
    for scenario in (scenarios.OVERLOADED, scenarios.LEAVING):
        built: list[Any] = []

        def kept(policy: Any, built: list[Any] = built) -> Any:
            built.append(policy)
            return policy

        outcome = subject.run(scenario, kept)
        num_kept, num_ended = len(kept_requests(built, outcome.requests.values())), len(outcome.ends)
        text = f"after a run it still holds references to {num_kept} of {num_ended} requests, all of which have ended ({scenario.name})"
        require(num_kept <= 1, text)  # a policy may keep the last request that it was called for


_CHECKS: Mapping[str, Callable[[_Subject], None]] = {
    "is built from its parameters": _builds,
    "decides about everybody": _decides_about_everybody,
    "decides the same again": _is_repeatable,
    "is pure": _is_pure,
    "has no method that nobody calls": _calls_its_methods,
    "forgets requests that have ended": _forgets_ended_requests,
    "reads what the contract offers": _reads_the_contract_only,
    "decides the same with decode fast-forward": _is_the_same_when_fast_forwarded,
}
