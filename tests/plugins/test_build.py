from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vajra_py.contract import KeyMotion, Layer, SchedulerTraits, SteadyState
from vajra_py.contract.policies import traits_of
from vajra_py.errors import ConfigError, PluginError, UnknownNameError
from vajra_py.plugins import (
    OutputLengthInputs,
    build_latency_model,
    build_observer,
    build_output_lengths,
    build_policy,
    check_policy_shape,
)
from vajra_py.runtime.serving.prefill_times import solo_chunk_rule

PRIORITIZER, ROUTER, SCHEDULER = Layer
CONTEXT: Any = SimpleNamespace()

SOURCE = """
from pydantic import BaseModel, Field
from vajra_py.contract import *
from vajra_py.contract.hookspecs import LatencyModelSpec, ObserverSpec, OutputLengthSpec, Preset
from vajra_py.contract.observer import Observer

class Config(PolicyConfig):
    slope: float = Field(1.0, gt=0)

{classes}

class P(BaseModel):
    model_config = {{"extra": "forbid"}}
    type: str = "x"
    every_s: float = Field(1.0, gt=0)

@hookimpl
def vajra_policies():
    return [PolicySpec("mine", Layer.{layer}, Config, {build}, "A policy.", aliases=("alias",))]

@hookimpl
def vajra_observers():
    return [ObserverSpec("watch", P, lambda c: {observer}(), "Watches."), ObserverSpec("liar", P, lambda c: 3, "Lies.")]

@hookimpl
def vajra_latency_models():
    return [LatencyModelSpec("lab", P, lambda c: object(), "A model.")]

@hookimpl
def vajra_output_length_predictors():
    return [OutputLengthSpec("guess", P, lambda c, s, t: Guess(t), "Guesses.")]

class Guess:
    def __init__(self, truth): self.truth = truth
    def predict(self, request): return self.truth[request]
"""


def install(
    site: Any,
    classes: str,
    layer: Layer = PRIORITIZER,
    build: str = "lambda c, x: Policy(c)",
    observer: str = "Observer",
) -> Any:
    source = SOURCE.format(classes=classes, layer=layer.name, build=build, observer=observer)
    site.install("lab", source, version="3.1")
    return site.registry()


GOOD = """
class Policy:
    key_motion = KeyMotion.TIME_LINEAR
    def __init__(self, config=None): self.config = config
    def key(self, request, now): return 0.0
    def line(self, request): return 0.0, 0.0
"""

SCHEDULES = """
class Policy:
    def __init__(self, config=None): self.config = config
    def schedule(self, replica, batch, now): pass
"""
ASSIGNS = """
class Policy:
    def __init__(self, config=None): self.config = config
    def assign(self, request, replicas, now): return 0
    def pull(self, replica, queued, now): return ()
"""


def test_a_policy_is_built_from_validated_parameters(site: Any) -> None:
    registry = install(site, GOOD)
    policy: Any = build_policy(PRIORITIZER, "alias", {"slope": "2.5"}, CONTEXT, registry)
    assert policy.config.slope == 2.5


def test_names_of_its_own_are_a_policys_business(site: Any) -> None:
    """Near a hook's name, with the hook there too; or near it, and begun with an underscore."""
    own = "    def lines(self): pass\n    def _on_arrival(self): pass\n    is_late = property(lambda self: 1 / 0)\n"
    registry = install(site, GOOD + own)
    assert build_policy(PRIORITIZER, "mine", {}, CONTEXT, registry)


def test_one_object_may_serve_several_layers() -> None:
    class Both:
        key_motion = KeyMotion.STATIC
        traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState))

        def key(self, request: Any, now: float) -> float:
            return 0.0

        def schedule(self, replica: Any, batch: Any, now: float) -> None: ...

    for layer in (PRIORITIZER, SCHEDULER):
        check_policy_shape(layer, Both(), "it", "here")


def test_wrong_parameters_say_where(site: Any) -> None:
    registry = install(site, GOOD)
    with pytest.raises(ConfigError) as caught:
        build_policy(PRIORITIZER, "mine", {"slope": 0, "slop": 1}, CONTEXT, registry)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("scheduling.request_prioritizer.params.slope:")
    assert lines[1].startswith("scheduling.request_prioritizer.params.slop:")
    with pytest.raises(UnknownNameError):
        build_policy(ROUTER, "mine", {}, CONTEXT, registry)


@pytest.mark.parametrize(
    ("classes", "layer", "complaint"),
    [
        (GOOD.replace("def key(", "def kee("), PRIORITIZER, "Policy has no method 'key'"),
        (GOOD.replace("def line(", "def lime("), PRIORITIZER, r"TIME_LINEAR.*no method 'line'"),
        (
            GOOD.replace("KeyMotion.TIME_LINEAR", "'static'"),
            PRIORITIZER,
            "key_motion is 'static'; expected one of KeyMotion.STATIC",
        ),
        (GOOD.replace("    key_motion = KeyMotion.TIME_LINEAR\n", ""), PRIORITIZER, "key_motion is None"),
        (
            GOOD.replace("request, now", "request"),
            PRIORITIZER,
            r"key\(request\) has the wrong signature.*called with 2",
        ),
        (GOOD.replace("def key", "async def key"), PRIORITIZER, "'key' is a coroutine"),
        (GOOD + "    on_arrivals = 3\n", PRIORITIZER, "something that cannot be called as 'on_arrivals'"),
        (GOOD + "    def on_step_end(self): pass\n", PRIORITIZER, "on_step_end.*wrong signature"),
        (
            GOOD + "    def on_arrival(self, request, now): pass\n",
            PRIORITIZER,
            "nothing calls 'on_arrival'. Did you mean 'on_arrivals'",
        ),
        (
            GOOD + "    def on_token(self, request): pass\n",
            PRIORITIZER,
            "nothing calls 'on_token'.*Allowed: fallen_groups, fallen_requests, falls_at, group, group_key, key,",
        ),
        (
            SCHEDULES + "    trait = SchedulerTraits()\n",
            SCHEDULER,
            "nothing calls 'trait'. Did you mean 'traits'",
        ),
        (
            GOOD + "    def refuses(self, request): return None\n",
            PRIORITIZER,
            "'refuses' is never called on a request prioritizer. It applies to a replica scheduler",
        ),
        (GOOD + "    def group(self, request): return 'a'\n", PRIORITIZER, "group and group_key belong together"),
        (
            GOOD + "    def on_step_run(self, run): pass\n",
            PRIORITIZER,
            "on_step_end the others, and on_step_end is missing",
        ),
        (GOOD + "    def group_keys(self, group): return 0\n", PRIORITIZER, "Did you mean 'group_key'"),
        (
            GOOD.replace("KeyMotion.TIME_LINEAR", "KeyMotion.NAMED_FALLS"),
            PRIORITIZER,
            "fallen_requests is None; a FallenRequests and KeyMotion.NAMED_FALLS belong together",
        ),
        (
            GOOD + "    def falls_at(self, request, now): return None\n",
            PRIORITIZER,
            "falls_at is for a policy with KeyMotion.NAMED_FALLS or PREFIX_HITS",
        ),
        (
            GOOD.replace("KeyMotion.TIME_LINEAR", "KeyMotion.STATIC") + "    def key_epoch(self): return 0\n",
            PRIORITIZER,
            "key_epoch is for a policy with KeyMotion.ARBITRARY, VOLATILE or PREFIX_HITS",
        ),
        (GOOD + "    fallen_groups = []\n", PRIORITIZER, r"fallen_groups is \[\]; expected a FallenGroups"),
        (GOOD + "    fallen_groups = FallenGroups()\n", PRIORITIZER, "for a policy with group and group_key"),
        (GOOD + "    def assign(self, request, replicas, now): return 0\n", ROUTER, "no method 'pull'"),
        (GOOD, SCHEDULER, "no method 'schedule'"),
    ],
)
def test_what_is_no_policy_of_the_layer_is_refused(site: Any, classes: str, layer: Layer, complaint: str) -> None:
    registry = install(site, classes, layer)
    with pytest.raises(PluginError, match=complaint) as caught:
        build_policy(layer, "mine", {}, CONTEXT, registry)
    assert "'lab' of lab 3.1" in str(caught.value)


@pytest.mark.parametrize(
    ("classes", "layer", "complaint"),
    [
        (
            SCHEDULES + "    traits = {'reads_load'}\n",
            SCHEDULER,
            "traits is {'reads_load'}; expected a SchedulerTraits",
        ),
        (
            SCHEDULES + "    traits = SchedulerTraits(repeats_decodes=True)\n",
            SCHEDULER,
            "repeats_decodes is True; expected a frozenset of SteadyState.NOTHING_WAITS",
        ),
        (
            SCHEDULES + "    traits = SchedulerTraits(repeats_decodes=frozenset({'full'}))\n",
            SCHEDULER,
            "repeats_decodes is frozenset.*expected a frozenset of SteadyState",
        ),
        (
            ASSIGNS + "    traits = SchedulerTraits(reads_load=0)\n",
            ROUTER,
            "reads_load is 0; expected True or False",
        ),
        (
            SCHEDULES + "    traits = SchedulerTraits(reads_load=False)\n",
            SCHEDULER,
            "traits.reads_load applies only to a replicaset scheduler",
        ),
        (
            ASSIGNS + "    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState))\n",
            ROUTER,
            "traits.repeats_decodes applies only to a replica scheduler",
        ),
        (GOOD + "    traits = SchedulerTraits()\n", PRIORITIZER, "'traits' is never called on a request prioritizer"),
        (SCHEDULES + "    repeats_decodes = 1\n", SCHEDULER, r"'repeats_decodes'.*SchedulerTraits\(repeats_decodes"),
        (ASSIGNS + "    reads_load = False\n", ROUTER, r"'reads_load'.*SchedulerTraits\(reads_load"),
        (ASSIGNS + "    is_work_conserving = True\n", ROUTER, r"'is_work_conserving'.*Traits\(is_work_conserving"),
    ],
)
def test_traits_that_are_wrong_or_declared_in_the_wrong_place(
    site: Any, classes: str, layer: Layer, complaint: str
) -> None:
    registry = install(site, classes, layer)
    with pytest.raises(PluginError, match=complaint):
        build_policy(layer, "mine", {}, CONTEXT, registry)


def test_without_a_rule_of_its_own_a_scheduler_chunks_a_solo_prompt_by_the_budget() -> None:
    limits: Any = SimpleNamespace(max_batch_tokens=3)
    assert solo_chunk_rule(object(), limits)(0, 9) == 3  # type: ignore[arg-type]
    limits.max_batch_tokens = None
    assert solo_chunk_rule(object(), limits)(0, 9) == 9  # type: ignore[arg-type]


def test_traits_may_depend_on_parameters(site: Any) -> None:
    line = "    traits = property(lambda self: SchedulerTraits(is_work_conserving=self.config.slope > 1))\n"
    registry = install(site, SCHEDULES + line, SCHEDULER)
    for slope in (1.0, 2.0):
        policy: Any = build_policy(SCHEDULER, "mine", {"slope": slope}, CONTEXT, registry)
        assert traits_of(policy) == SchedulerTraits(is_work_conserving=slope > 1)
    assert traits_of(object()) == SchedulerTraits()


@pytest.mark.parametrize(
    ("build", "error", "complaint"),
    [
        ("lambda c, x: Policy", PluginError, "build returned the class Policy"),
        ("lambda c: Policy(c)", PluginError, "building 'mine' raised TypeError"),
        ("lambda c, x: 1 / 0", PluginError, r"'lab' of lab 3\.1.*ZeroDivisionError"),
        (
            "lambda c, x: int('no budget')",
            ConfigError,
            r"scheduling.request_prioritizer: 'mine' of lab 3\.1 cannot be built.*no budget",
        ),
    ],
)
def test_a_failing_build_is_named(site: Any, build: str, error: type[Exception], complaint: str) -> None:
    registry = install(site, GOOD, build=build)
    with pytest.raises(error, match=complaint):
        build_policy(PRIORITIZER, "mine", {}, CONTEXT, registry)


def test_models_predictors_and_observers_are_built_and_checked(site: Any) -> None:
    registry = install(site, GOOD)
    assert build_observer("watch", {"every_s": 2.0}, registry).wants_steps is False
    with pytest.raises(PluginError, match=r"expected a vajra_py\.contract\.observer\.Observer"):
        build_observer("liar", {}, registry)
    with pytest.raises(ConfigError, match=r"observers\.every_s"):
        build_observer("watch", {"every_s": -1}, registry)
    with pytest.raises(PluginError, match="no method 'stage_time_s'"):
        build_latency_model("lab", {"type": "lab"}, registry)
    inputs = OutputLengthInputs(lambda name: None, {"r": 7})
    predictor: Any = build_output_lengths("guess", {}, inputs, registry)
    assert predictor.predict("r") == 7
