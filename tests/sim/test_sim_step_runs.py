"""Policies that take runs of steps hear of the same steps as those that are told of each, and cost no steps of their own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from vajra_py.contract import EndedRun, EndedStep, RequestView
from vajra_py.errors import PolicyError
from vajra_py.latency import ConstantModel
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions, InTurn, PlainChunks
from vajra_py.testing.reference_policies import ByArrival
from vajra_py.workload import RequestSpec

_SPECS = [RequestSpec(f"r{i}", 0.05 * i, 40 + i, num) for i, num in enumerate((60, 40, 50, 90, 80, 70, 1, 30))]


class Steps:
    """Keeps what it is told of steps, by replica."""

    def __init__(self) -> None:
        self.heard: dict[int, list[Any]] = defaultdict(list)

    def on_step_end(self, step: EndedStep) -> None:
        ids = [request.request_id for request in step.requests]
        facts = (step.step_index, step.formed_at, step.ended_at, ids, list(step.num_tokens))
        self.heard[step.replica_id].append(facts)


class Runs(Steps):
    """Takes runs."""

    num_runs = 0

    def on_step_run(self, run: EndedRun) -> None:
        self.num_runs += 1
        for step in run.steps():
            self.on_step_end(step)


def _run(*policies: Any) -> None:
    options = HarnessOptions(
        num_replicas=2, num_blocks=400, max_model_len=2000, latency=ConstantModel(0.01), reserves_growth=True
    )
    harness = Harness(*policies, options)
    harness.controller.watch(())
    harness.simulator(SimulationOptions(fast_forward=True)).run(_SPECS)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_runs_tell_of_the_same_steps_as_single_calls(layer: int) -> None:
    def heard(kind: type[Steps]) -> Any:
        base = (ByArrival, InTurn, PlainChunks)[layer]
        made = type("Both", (kind, base), {"__init__": lambda self: (kind.__init__(self), base.__init__(self))[0]})()
        policies: list[Any] = [ByArrival(), InTurn(), PlainChunks()]
        policies[layer] = made
        _run(*policies)
        return made

    single, runs = heard(Steps), heard(Runs)
    assert runs.num_runs > 0
    assert runs.heard == single.heard
    assert set(runs.heard) == {0, 1}


@pytest.mark.parametrize(("layer", "method"), [(0, "key"), (1, "assign")])
def test_policies_have_been_told_of_all_steps_when_a_request_arrives(layer: int, method: str) -> None:
    """A key that is fixed then may follow what was learned of steps, and so may the choice of a replica."""

    def known(kind: type[Steps]) -> list[Any]:
        base = (ByArrival, InTurn)[layer]
        seen: list[Any] = []

        class Asked(kind, base):  # type: ignore[valid-type, misc]
            def __init__(self) -> None:
                kind.__init__(self)
                base.__init__(self)

        def answer(policy: Any, request: RequestView, *facts: Any) -> Any:
            seen.append((request.request_id, {one: len(steps) for one, steps in policy.heard.items()}))
            return getattr(base, method)(policy, request, *facts)

        setattr(Asked, method, answer)
        policies: list[Any] = [ByArrival(), InTurn(), PlainChunks()]
        policies[layer] = Asked()
        _run(*policies)
        return seen

    assert known(Runs) == known(Steps)


def test_a_policy_that_fails_in_a_run_is_named_with_its_replica() -> None:
    class Fails(Runs, ByArrival):
        def on_step_run(self, run: EndedRun) -> None:
            raise LookupError("who?")

    with pytest.raises(PolicyError, match=r"Fails.*LookupError: who\?") as found:
        _run(Fails(), InTurn(), PlainChunks())
    assert found.value.replica_id in (0, 1)
