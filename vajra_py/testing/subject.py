"""A policy under test, which runs in scenarios together with plain policies in the other layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vajra_py.contract import Layer, PolicyContext, PolicySpec
from vajra_py.errors import VajraError
from vajra_py.testing import scenarios
from vajra_py.testing.arguments import params_of, require_spec
from vajra_py.testing.harness import Harness, PolicySource
from vajra_py.testing.reference_policies import ByArrival, ByArrivalInTime, InTurn, PlainChunks, Shared, by_slack
from vajra_py.testing.scenarios import Outcome, Policies, Rules, Scenario, StuckError, simulate

NUM_REPLICAS = {Layer.REQUEST_PRIORITIZER: 2, Layer.REPLICASET_SCHEDULER: 2, Layer.REPLICA_SCHEDULER: 1}
COUNTED = Rules()
UNCOUNTED = Rules(check_every_step=False)

Interposing = Callable[[Any], Any]
"""Function that returns a wrapper of a policy; the mechanism calls the wrapper."""


@dataclass(eq=False)
class Subject:
    """A policy with its parameters, and its cached outcome in each scenario."""

    spec: PolicySpec
    params: Mapping[str, Any]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_spec(self.spec, PolicySpec)

    def __str__(self) -> str:
        """Return the name of the policy for failure messages."""
        return f"{self.spec.layer.value} {self.spec.name!r}"

    @property
    def layer(self) -> Layer:
        """Layer of the policy."""
        return self.spec.layer

    def build(self, context: PolicyContext) -> Any:
        """Build a new policy object."""
        return self.spec.build(params_of(self.spec, self.params), context)

    def suits(self, scenario: Scenario) -> bool:
        """Return True if the policy can be built for the scenario's replicas; False if this raises `ValueError`."""
        try:
            self.build(context_of(scenario))
        except ValueError:
            return False
        return True

    def run(self, scenario: Scenario, interposing: Interposing | None = None, rules: Rules = COUNTED) -> Outcome:
        """Run the policy in a scenario, wrapped by `interposing` if given.

        If the run fails, raises `AssertionError` with the scenario's name.
        """
        layer = self.layer

        def source(context: PolicyContext) -> Any:
            policy = self.build(context)
            return policy if interposing is None else interposing(policy)

        rules = replace(rules, num_replicas=max(rules.num_replicas, NUM_REPLICAS[layer]))
        try:
            return simulate(scenario, _beside_partners(layer, source, scenario), rules)
        except (VajraError, StuckError, RuntimeError, AssertionError) as error:
            raise AssertionError(f"{error} ({scenario.name})") from error

    def base(self, scenario: Scenario) -> Outcome:
        """Return the outcome of the policy itself, without a wrapper, in a scenario; lost requests and blocks are
        detected after every step.
        """
        outcome = self.outcomes.get(scenario.name)
        if outcome is None:
            outcome = self.outcomes[scenario.name] = self.run(scenario)
        return outcome


def context_of(scenario: Scenario) -> PolicyContext:
    """Return the context for building a policy in a scenario."""
    return Harness(ByArrival(), Shared(), lambda context: PlainChunks(), scenario.options).context


def _beside_partners(layer: Layer, source: PolicySource, scenario: Scenario) -> Policies:
    """Return the policy with plain policies in the other layers.

    The plain policies alternate between scenarios, since the policy may behave differently with each of them.
    """
    odd = scenarios.SCENARIOS.index(scenario) % 2 == 1 if scenario in scenarios.SCENARIOS else False
    prioritizer: PolicySource = by_slack if odd else ByArrivalInTime()
    if layer is Layer.REQUEST_PRIORITIZER:
        return Policies(source, InTurn() if odd else Shared(), lambda context: PlainChunks())
    if layer is Layer.REPLICASET_SCHEDULER:
        return Policies(prioritizer, source, lambda context: PlainChunks())
    return Policies(prioritizer, Shared() if odd else InTurn(), source)
