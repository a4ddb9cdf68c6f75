"""Conformance suite: the checks that every policy must pass.

A package's own tests need one function:

    @pytest.mark.parametrize("spec", vajra_policies(), ids=lambda spec: spec.name)
    def test_keeps_the_contract(spec):
        check_policy(spec)

The policy is built as in a run, and tested in small simulated situations with plain policies in the other layers. A
policy can declare more than its Protocol requires: how its keys move, that it repeats steps, that it does not read the
load, or that it never idles. Each declaration is compared with the policy's behaviour.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicySpec,
    ReplicaScheduler,
    ReplicasetScheduler,
    RequestPrioritizer,
)
from vajra_py.contract.policies import ChunksSoloPrompts, traits_of
from vajra_py.errors import VajraError
from vajra_py.plugins import check_policy_shape, load_registry
from vajra_py.plugins.shapes import hooks_of
from vajra_py.testing import scenarios
from vajra_py.testing.checking import (
    POLICY_TIMEOUT_S,
    packages_of,
    require,
    require_all_end,
    require_built,
    run_checks,
)
from vajra_py.testing.habits import (
    attributes_read_in,
    futile_preemptions,
    kept_programs,
    kept_requests,
    uncalled_methods,
)
from vajra_py.testing.harness import Harness
from vajra_py.testing.hash_seeds import first_difference, rows_by_hash_seed
from vajra_py.testing.key_watch import KeyWatch
from vajra_py.testing.purity import only_pure
from vajra_py.testing.reference_policies import ByArrival, ByArrivalInTime, InTurn, PassedOn
from vajra_py.testing.scenarios import Outcome, Policies, Rules, Scenario, simulate
from vajra_py.testing.strict import StrictViews, interpose
from vajra_py.testing.subject import NUM_REPLICAS, UNCOUNTED, Interposing, Subject, context_of

__all__ = ["Check", "ConformanceWarning", "check_policy", "conformance_checks", "policies_under_test"]

PROTOCOLS: Mapping[Layer, type] = {
    Layer.REQUEST_PRIORITIZER: RequestPrioritizer,
    Layer.REPLICASET_SCHEDULER: ReplicasetScheduler,
    Layer.REPLICA_SCHEDULER: ReplicaScheduler,
}
ALL_LAYERS = tuple(Layer)


class ConformanceWarning(UserWarning):
    """Warning of behaviour that the contract allows but that is hardly intended."""


def check_policy(
    spec: PolicySpec, params: Mapping[str, Any] | None = None, *, policy_timeout_s: float = POLICY_TIMEOUT_S
) -> None:
    """Run every check of the policy's layer, with its default parameters or `params`.

    Raises `AssertionError` that names the policy and, one per line, every failed check with its finding. Warns with
    `ConformanceWarning` about behaviour that is allowed but hardly intended. A policy whose call takes longer than
    `policy_timeout_s` fails, and is not called again.
    """
    subject = Subject(spec, params or {})
    checks = conformance_checks(spec.layer)
    needed = [check.name for check in checks if check.is_needed_by_all]
    run_checks(str(subject), {check.name: partial(check.run, subject) for check in checks}, policy_timeout_s, needed)


def conformance_checks(layer: Layer) -> list[Check]:
    """Return the checks for policies of a layer; each can be called separately with a `PolicySpec` (and parameters)."""
    return [check for check in _CHECKS if layer in check.layers]


def policies_under_test() -> list[PolicySpec]:
    """Return every installed policy, by layer and name, for `pytest.mark.parametrize`."""
    registry = load_registry()
    return [offer.spec for layer in Layer for offer in registry.policies(layer).values()]


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement of the contract."""

    name: str
    layers: tuple[Layer, ...]
    run: Callable[[Subject], None]
    is_needed_by_all: bool = False
    """True if no other check is possible after this one has failed."""

    def __call__(self, spec: PolicySpec, params: Mapping[str, Any] | None = None) -> None:
        """Check one policy. Raises `AssertionError`."""
        subject = Subject(spec, params or {})
        run_checks(str(subject), {self.name: partial(self.run, subject)})


# For every layer


def _builds(subject: Subject) -> None:
    layer = subject.layer
    require_built(
        lambda: subject.build(context_of(scenarios.LIGHT)),
        subject.params,
        lambda policy: check_policy_shape(layer, policy, "it", "under test"),
        PROTOCOLS[layer],
    )


def _serves(scenario: Scenario) -> Callable[[Subject], None]:
    def check(subject: Subject) -> None:
        if not subject.suits(scenario):
            return
        require_all_end(subject.base(scenario))

    return check


_AGAIN = (
    *(scenarios.STARVED, scenarios.LEAVING, scenarios.SHARED_PREFIXES, scenarios.PROGRAMS),
    *(scenarios.MORE_ADAPTERS, scenarios.DRAFTS),
)


def _decides_again(
    subject: Subject, what: str, interposing: Interposing | None, violations: Sequence[str] = ()
) -> None:
    """Check that decisions are the same in another run, with an interposed wrapper that must make no difference."""
    for scenario in _AGAIN:
        if not subject.suits(scenario):
            continue
        try:
            outcome = subject.run(scenario, interposing, UNCOUNTED)
        except AssertionError as error:
            if violations:
                raise AssertionError(violations[0]) from error
            raise
        require(not violations, violations[0] if violations else "")
        first = subject.base(scenario)
        for position, (before, now) in enumerate(zip(first.decisions, outcome.decisions, strict=False)):
            require(before == now, f"step {position} differs {what} ({scenario.name}): {before} and then {now}")
        same = len(first.decisions) == len(outcome.decisions) and first.ends == outcome.ends
        require(same, f"the run ends in another way {what} ({scenario.name})")


def _is_repeatable(subject: Subject) -> None:
    _decides_again(subject, "when the run is repeated with the same seed", None)


def _is_the_same_under_every_hash_seed(subject: Subject) -> None:
    """Repeat runs in processes where sets of strings have other orders; decisions must not depend on these orders."""
    try:
        (runs,) = rows_by_hash_seed([(subject.spec, dict(subject.params))])
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        text = f"{subject} was not tried under other hash seeds, since it cannot be pickled: {error}"
        warnings.warn(text, ConformanceWarning, stacklevel=2)
        return
    difference = first_difference(runs)
    advice = "Python iterates sets of strings in another order in each process: sort them, or use a dict"
    require(difference is None, f"it decides otherwise in another process: {difference}. {advice}")


def _calls_its_methods(subject: Subject) -> None:
    names = uncalled_methods(subject.build(context_of(scenarios.LIGHT)), hooks_of(subject.layer))
    allowed = "a name of the contract (such as on_step_end), or a leading underscore"
    require(not names, f"public methods that neither the mechanism nor its package calls: {names}. Allowed: {allowed}")


def _forgets_ended_requests(subject: Subject) -> None:
    for scenario in (scenarios.OVERLOADED, scenarios.LEAVING, scenarios.PROGRAMS):
        if not subject.suits(scenario):
            continue
        built: list[Any] = []

        def kept(policy: Any, built: list[Any] = built) -> Any:
            built.append(policy)
            return policy

        outcome = subject.run(scenario, kept, UNCOUNTED)
        requests = outcome.requests.values()
        num_kept, num_ended = len(kept_requests(built, requests)), len(outcome.ends)
        text = f"after a run it still holds references to {num_kept} of {num_ended} requests, all of which have ended ({scenario.name})"
        require(num_kept <= num_ended // 2, f"{text}. Delete what it keeps of a request in `on_departures`")
        num_kept, num_ended = len(kept_programs(built, outcome.programs)), len(outcome.programs)
        text = f"after a run it still holds references to {num_kept} of {num_ended} programs, all of which have ended"
        require(num_kept <= num_ended // 2, f"{text}. Delete what it keeps of a program in `on_program_end`")


def _is_pure(subject: Subject) -> None:
    spec = subject.spec
    packages = packages_of(spec.build, spec.config, type(subject.build(context_of(scenarios.LIGHT))))
    violations: list[str] = []
    with only_pure(packages, violations):
        _decides_again(subject, "without clocks and global generators", None, violations)


def _reads_the_contract_only(subject: Subject) -> None:
    views = StrictViews()
    _decides_again(subject, "behind views that know the contract alone", views.policy, views.violations)


# Prioritizers


def _keys_move_as_declared(subject: Subject) -> None:
    def watched(policy: Any) -> Any:
        return KeyWatch(policy, np.random.default_rng(3)).interposed()

    _decides_again(subject, "when keys are read more often", watched)


def _order_would_be_the_same_if_volatile(subject: Subject) -> None:
    """Warn of keys declared ARBITRARY that move while a step is formed, if re-reading them would change the order."""
    if subject.build(context_of(scenarios.LIGHT)).key_motion is not KeyMotion.ARBITRARY:
        return

    def volatile(policy: Any) -> Any:
        changed = interpose(policy, {})
        changed.key_motion = KeyMotion.VOLATILE
        return changed

    for scenario in (scenarios.OVERLOADED, scenarios.STARVED):
        if not subject.suits(scenario):
            continue
        declared, other = subject.base(scenario), subject.run(scenario, volatile, UNCOUNTED)
        for before, now in zip(declared.decisions, other.decisions, strict=False):
            if before["chunks"] != now["chunks"]:
                text = f"KeyMotion.VOLATILE would order otherwise from the step at {before['formed_at']} s ({scenario.name})"
                why = "keys move while a step is formed, and ARBITRARY ones are read once a step"
                warnings.warn(f"{subject}: {text}: {why}", ConformanceWarning, stacklevel=2)
                return


# Replicaset schedulers


def _respects_who_is_up(subject: Subject) -> None:
    outcome = subject.run(scenarios.ONE_DOWN)
    require(outcome.num_unfinished == 0, f"{outcome.num_unfinished} requests never ended with one replica down")
    down = scenarios.ONE_DOWN.down
    served = sorted(name for name, request in outcome.requests.items() if request.replica_id in down)
    require(not served, f"replicas {sorted(down)} take no requests and were given {served}")


# Decode fast-forward


def _is_the_same_when_fast_forwarded(subject: Subject) -> None:
    """Compare a simulation that forms every step with one that fast-forwards equal decode steps.

    The plain policies in the other layers repeat their decodes, so prioritizers and replicaset schedulers are tested
    with fast-forward too: the views that they read must be the same as if every step were formed.
    """
    traits = traits_of(subject.build(context_of(scenarios.LIGHT)))
    if subject.layer is Layer.REPLICA_SCHEDULER and not traits.repeats_decodes:
        return  # without this trait, no step is fast-forwarded
    claim = "it decides otherwise while decode steps are fast-forwarded"
    if traits.repeats_decodes:
        claim = "traits.repeats_decodes is not true"
    elif not traits.reads_load:
        claim = "traits.reads_load = False is not true"
    for scenario in (
        *(scenarios.LIGHT, scenarios.OVERLOADED, scenarios.STARVED, scenarios.LEAVING),
        scenarios.PROGRAMS,
    ):
        if not subject.suits(scenario):
            continue
        asked = subject.run(scenario, None, replace(UNCOUNTED, detailed=False, fast_forward=False))
        ahead = subject.run(scenario, None, replace(UNCOUNTED, detailed=False))
        for one, other in zip(asked.steps, ahead.steps, strict=False):
            text = (
                f"{claim}: called at every step it decides {one}, with fast-forwarded steps {other} ({scenario.name})"
            )
            require(one == other, text)
        same = len(asked.steps) == len(ahead.steps) and asked.ends == ahead.ends
        require(same, f"{claim}: the runs end in different ways ({scenario.name})")


# Replica schedulers


def _solo_chunks_are_true(subject: Subject) -> None:
    policy = subject.build(context_of(scenarios.LIGHT))
    if not isinstance(policy, ChunksSoloPrompts):
        return
    solo_chunk_size = policy.solo_chunk_size
    for num_tokens in (1, 40, 700):
        harness = Harness(ByArrivalInTime(), InTurn(), subject.build, scenarios.SMALL)
        harness.submit("lone", num_tokens, 1)
        done = 0
        for step in harness.steps_until_idle():
            declared = solo_chunk_size(done, num_tokens - done)
            given = step.tokens["lone"]
            text = (
                f"solo_chunk_size({done}, {num_tokens - done}) is {declared!r}, but the prompt alone got {given} tokens"
            )
            require(declared == given, text)
            done += given
        require(done == num_tokens, f"a prompt of {num_tokens} tokens alone was not finished")


def _declares_that_it_needs_slack(subject: Subject) -> None:
    scenario = scenarios.LIGHT
    if not subject.suits(scenario) or traits_of(subject.build(context_of(scenario))).needs_slack:
        return
    text = "traits.needs_slack is False, and it fails if the prioritizer predicts no slack"
    try:
        outcome = simulate(scenario, Policies(ByArrival(), InTurn(), subject.build), Rules())
    except VajraError as error:
        raise AssertionError(f"{text}: {error} ({scenario.name})") from error
    require_all_end(outcome, f" ({scenario.name}, under a prioritizer that predicts no slack)")


def _preempts_for_somebody(subject: Subject) -> None:
    """Warn if many preemptions are futile although memory is ample: no other request is admitted before the victim
    resumes.
    """
    for scenario in scenarios.SCENARIOS:
        if not scenario.is_memory_ample or not subject.suits(scenario):
            continue
        num_preemptions, num_futile = futile_preemptions(subject.base(scenario).decisions)
        if num_futile > max(4, num_preemptions // 2):
            text = f"{num_futile} of {num_preemptions} preemptions gained nothing: no other request was admitted before the victim"
            warnings.warn(f"{subject}: {text} ({scenario.name})", ConformanceWarning, stacklevel=2)
            return


def _hands_off_safely(subject: Subject) -> None:
    """Check that handed-off requests continue at a second replica, also with fast-forward.

    Skipped for policies that do not hand off.
    """
    if "hand_off" not in attributes_read_in(type(subject.build(context_of(scenarios.LIGHT))).__module__):
        return
    for scenario in _AGAIN:
        if not subject.suits(scenario):
            continue
        policies = Policies(ByArrivalInTime(), lambda context: PassedOn(), subject.build)
        outcomes = [simulate(scenario, policies, Rules(num_replicas=2, detailed=one)) for one in (True, False)]
        for outcome in outcomes:
            require_all_end(outcome, f" ({scenario.name}, with a second replica that takes what is handed off)")
        require(outcomes[0].ends == outcomes[1].ends, f"it hands off otherwise when fast-forwarded ({scenario.name})")


# Replica schedulers and replicaset schedulers


def _works_while_there_is_work(subject: Subject) -> None:
    if not traits_of(subject.build(context_of(scenarios.LIGHT))).is_work_conserving:
        return
    for scenario in scenarios.SCENARIOS:
        if scenario.is_memory_ample and subject.suits(scenario):
            idle = _idle_beside_work(subject.base(scenario), NUM_REPLICAS[subject.layer])
            require(idle is None, f"traits.is_work_conserving is not true: {idle} ({scenario.name})")


def _idle_beside_work(outcome: Outcome, num_replicas: int) -> str | None:
    """Return a description of a time at which a replica was idle although a request waited; None if there is none.

    A request counts as waiting from its arrival until its end or, with several replicas, until its admission.
    """
    wanting = []
    for name, _, ended_at, _, _, _, admitted_at in outcome.ends:
        until = ended_at if num_replicas == 1 or admitted_at is None else admitted_at
        wanting.append((outcome.requests[name].arrived_at, until, name))
    for replica_id in range(num_replicas):
        free_from = 0.0
        busy = sorted((step[3], step[4]) for step in outcome.steps if step[1] == replica_id)
        for begun_at, ended_at in [*busy, (math.inf, math.inf)]:
            for arrived_at, until, name in wanting:
                if max(free_from, arrived_at) < min(begun_at, until):
                    return f"replica {replica_id} is idle at {max(free_from, arrived_at)} s, and {name} waits"
            free_from = max(free_from, ended_at)
    return None


_SCHEDULERS = (Layer.REPLICASET_SCHEDULER, Layer.REPLICA_SCHEDULER)
_CHECKS: tuple[Check, ...] = (
    Check("is built from its parameters", ALL_LAYERS, _builds, is_needed_by_all=True),
    *(Check(f"serves everybody: {one.name}", ALL_LAYERS, _serves(one)) for one in scenarios.SCENARIOS),
    Check("decides the same again", ALL_LAYERS, _is_repeatable),
    Check("decides the same in every process", ALL_LAYERS, _is_the_same_under_every_hash_seed),
    Check("is pure", ALL_LAYERS, _is_pure),
    Check("has no method that nobody calls", ALL_LAYERS, _calls_its_methods),
    Check("forgets requests that have ended", ALL_LAYERS, _forgets_ended_requests),
    Check("reads what the contract offers", ALL_LAYERS, _reads_the_contract_only),
    Check("keys move as declared", (Layer.REQUEST_PRIORITIZER,), _keys_move_as_declared),
    Check("declares how keys move", (Layer.REQUEST_PRIORITIZER,), _order_would_be_the_same_if_volatile),
    Check("leaves alone who is down", (Layer.REPLICASET_SCHEDULER,), _respects_who_is_up),
    Check("decides the same with decode fast-forward", ALL_LAYERS, _is_the_same_when_fast_forwarded),
    Check("chunks lone prompts as it says", (Layer.REPLICA_SCHEDULER,), _solo_chunks_are_true),
    Check("declares that it needs slack", (Layer.REPLICA_SCHEDULER,), _declares_that_it_needs_slack),
    Check("hands off without losing anybody", (Layer.REPLICA_SCHEDULER,), _hands_off_safely),
    Check("preempts for somebody", (Layer.REPLICA_SCHEDULER,), _preempts_for_somebody),
    Check("works while there is work, where it says so", _SCHEDULERS, _works_while_there_is_work),
)
