"""Experiments with policies and predictors that no installed package offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pydantic import BaseModel, ConfigDict, field_validator

import vajra_py as vajra
from vajra_py.contract import (
    KeyMotion,
    Layer,
    LengthEstimate,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    RequestView,
    fill,
)
from vajra_py.contract.hookspecs import OutputLengthSpec
from vajra_py.errors import ConfigError, PluginError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import PluginSource, Registry, load_registry

SMALL: dict[str, Any] = {
    "version": 1,
    "name": "own",
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "pull",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 128}},
    },
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 60},
        "num_requests": 40,
        "prompt_tokens": {"type": "uniform", "min": 20, "max": 300},
        "output_tokens": {"type": "uniform", "min": 2, "max": 60},
    },
    "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
    "replica": {"max_model_len": 4096, "max_batch_size": 4, "memory": {"num_blocks": 400}},
}


class ShortestOutput:
    """Fewest expected output tokens first."""

    key_motion = KeyMotion.STATIC

    def __init__(self, context: PolicyContext) -> None:
        self._lengths = context.output_lengths

    def key(self, request: RequestView, now: float) -> float:
        estimate = self._lengths.predict(request)
        return 0.0 if estimate is None else estimate.mean_tokens


SHORTEST = PolicySpec(
    "shortest_output",
    Layer.REQUEST_PRIORITIZER,
    PolicyConfig,
    lambda config, context: ShortestOutput(context),
    "Fewest expected output tokens first.",
    aliases=("so",),
)


class _NoParams(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Informed:
    """A predictor of a plug-in that reads the truth."""

    def __init__(self, truth: Mapping[str, int]) -> None:
        self._truth = truth

    def predict(self, request: Any) -> LengthEstimate | None:
        known = float(self._truth[request.request_id])
        return LengthEstimate(known, known, known)


def with_predictor(registry: Registry) -> Registry:
    """The registry with a predictor called `informed`."""
    spec = OutputLengthSpec("informed", _NoParams, lambda params, streams, truth: Informed(truth), "Reads the truth.")
    source = PluginSource("lab", "1", "lab")

    def lazy(hook: str) -> Any:
        return [*registry.lazy(hook), *([(source, spec)] if hook == "vajra_output_length_predictors" else [])]

    return structs.replace(registry, lazy=lazy)


@pytest.fixture
def mean_ttft(tmp_path: Path) -> Callable[..., float]:
    """Mean time to first token of a small experiment under `shortest_output` with this predictor."""

    def run(predictor: str) -> float:
        registry = with_predictor(load_registry().with_policies([SHORTEST]))
        experiment = {**SMALL, "backend": {"simulator": {**SMALL["backend"]["simulator"], "output_length": predictor}}}
        experiment["scheduling"] = {**SMALL["scheduling"], "request_prioritizer": "shortest_output"}
        config = vajra.api.config_from_mapping(experiment, registry=registry)
        done = run_experiment(config, folder=tmp_path / predictor, registry=registry)
        return float(done.requests_frame("ttft_s").ttft_s.mean())

    return run


def test_the_truth_reaches_every_predictor_that_asks_for_it(mean_ttft: Callable[..., float]) -> None:
    assert mean_ttft("informed") == mean_ttft("oracle") != mean_ttft("none")


def test_a_policy_runs_without_being_installed(tmp_path: Path) -> None:
    experiment = {**SMALL, "scheduling": {**SMALL["scheduling"], "request_prioritizer": "so"}}
    config = vajra.load(experiment, policies=[SHORTEST])
    run = vajra.run(config, folder=tmp_path / "run", policies=[SHORTEST])
    assert run.is_finished
    chosen = run.manifest["policies"]["default"]["request_prioritizer"]
    assert (chosen["policy"], chosen["version"]) == ("shortest_output", "not installed")
    with pytest.raises(ConfigError, match="no installed package offers a request prioritizer of that name"):
        vajra.load(experiment)


def test_an_own_policy_is_run_anew_and_an_installed_one_is_not(tmp_path: Path) -> None:
    built: list[str] = []

    def build(config: Any, context: PolicyContext) -> ShortestOutput:
        built.append("again")
        return ShortestOutput(context)

    spec = replace(SHORTEST, build=build)
    for chosen, times in (("fcfs", 0), ("shortest_output", 2)):
        experiment = {**SMALL, "scheduling": {**SMALL["scheduling"], "request_prioritizer": chosen}}
        config = vajra.load(experiment, policies=[spec])
        built.clear()  # what loading made to see whether it can be made
        for _ in range(2):
            vajra.run(config, folder=tmp_path / chosen, policies=[spec])
        assert len(built) == times


def test_a_sweep_compares_an_own_policy_with_installed_ones(tmp_path: Path) -> None:
    sweep = {"scheduling.request_prioritizer": ["fcfs", "shortest_output"]}
    config = vajra.load({**SMALL, "output": {"dir": str(tmp_path)}, "sweep": sweep}, policies=[SHORTEST])
    result = vajra.sweep(config, policies=[SHORTEST])
    assert [run.is_finished for run in result.runs] == [True, True]
    assert not result.failures
    with pytest.raises(ConfigError, match=r"workers: policies that are not installed are run in this process \(2\)"):
        vajra.sweep(config, policies=[SHORTEST], workers=2)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(PluginError, match="offers a request prioritizer named 'fcfs', and so does plug-in"):
        vajra.load(SMALL, policies=[replace(SHORTEST, name="fcfs")])


# What an experiment sets for routers and replicasets


def test_a_router_sees_loads_as_old_as_the_experiment_says(tmp_path: Path) -> None:
    ages: dict[float, list[float]] = {}

    class Looking:
        def __init__(self, seen: list[float]) -> None:
            self._seen = seen

        def assign(self, request: RequestView, replicas: Any, now: float) -> int:
            self._seen.append(max(replica.age_s for replica in replicas))
            return 0

        def pull(self, replica: Any, queued: Any, now: float) -> Any:
            return ()

    for interval_s in (0.0, 0.1):
        seen = ages[interval_s] = []
        spec = PolicySpec(
            "looking", Layer.REPLICASET_SCHEDULER, PolicyConfig, lambda c, x, s=seen: Looking(s), "Looks."
        )
        scheduling = {**SMALL["scheduling"], "replicaset_scheduler": "looking"}
        config = vajra.load({**SMALL, "scheduling": scheduling, "view_interval_s": interval_s}, policies=[spec])
        vajra.run(config, folder=tmp_path / str(interval_s), policies=[spec])
    assert set(ages[0.0]) == {0.0}
    assert 0.05 < max(ages[0.1]) < 0.1


TWO_SETS: dict[str, Any] = {
    **SMALL,
    "replicasets": {"small": {"select": {"max_prompt_tokens": 150}}, "large": {}},
}


def test_each_replicaset_may_have_its_own_step_times(tmp_path: Path) -> None:
    latency = {"type": "constant", "step_time_s": 0.01}
    own = {"large": {"latency": {"type": "constant", "step_time_s": 0.05}}}
    simulator = {"latency": latency, "replicasets": own}
    run = vajra.run(vajra.load({**TWO_SETS, "backend": {"simulator": simulator}}), folder=tmp_path / "run")
    steps = run.steps_frame("replicaset", "duration_s")
    times = steps.groupby("replicaset").duration_s
    assert (round(times.min()["small"], 9), round(times.max()["small"], 9)) == (0.01, 0.01)
    assert (round(times.min()["large"], 9), round(times.max()["large"], 9)) == (0.05, 0.05)


def test_the_origin_of_step_times_is_told_for_each_replicaset(tmp_path: Path) -> None:
    large = {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}
    simulator = {**SMALL["backend"]["simulator"], "replicasets": {"large": large}}
    run = vajra.run(vajra.load({**TWO_SETS, "backend": {"simulator": simulator}}), folder=tmp_path / "run")
    sentence = run.summary.value("step_times.sentence")
    assert sentence.startswith("given: small: given, ")
    assert "; large: analytic, roofline of " in sentence


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        (
            {"larg": {"latency": "constant"}},
            "backend.simulator.replicasets.larg: no such replicaset. Did you mean 'large'?",
        ),
        ({"large": {"latency": {"type": "constan"}}}, "Did you mean 'constant'?"),
        ({"large": {"latency": {"type": "constant", "step_time_s": -1}}}, "replicasets.large.latency.step_time_s"),
    ],
)
def test_a_mistake_in_a_replicasets_latency_is_told(own: dict[str, Any], complaint: str) -> None:
    simulator = {**SMALL["backend"]["simulator"], "replicasets": own}
    with pytest.raises(ConfigError) as caught:
        vajra.load({**TWO_SETS, "backend": {"simulator": simulator}})
    assert complaint in str(caught.value)


class Served:
    """Tokens by tenant, which the policies of one replicaset share."""

    def __init__(self) -> None:
        self.by: list[str] = []


def test_policies_of_a_replicaset_share_state_and_those_of_another_do_not(tmp_path: Path) -> None:
    found: dict[str, list[Served]] = {}

    def build(config: Any, context: PolicyContext) -> ShortestOutput:
        found.setdefault("prioritizer", []).append(context.shared.get(Served))
        return ShortestOutput(context)

    class Plain:
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))

    def build_scheduler(config: Any, context: PolicyContext) -> Plain:
        found.setdefault("scheduler", []).append(context.shared.get(Served))
        return Plain()

    own = [
        replace(SHORTEST, build=build),
        PolicySpec("plain", Layer.REPLICA_SCHEDULER, PolicyConfig, build_scheduler, "Whole prompts."),
    ]
    scheduling = {**SMALL["scheduling"], "request_prioritizer": "shortest_output", "replica_scheduler": "plain"}
    config = vajra.load({**TWO_SETS, "scheduling": scheduling, "num_replicas": 2}, policies=own)
    found.clear()  # what loading made to see whether it can be made
    vajra.run(config, folder=tmp_path / "run", policies=own)
    small, large = found["prioritizer"]
    assert small is not large
    assert found["scheduler"] == [small, small, large, large]


def test_parameters_are_validated_once_however_many_policies_are_built(tmp_path: Path) -> None:
    seen: list[float] = []

    class Counted(PolicyConfig):
        weight: float = 1.0

        @field_validator("weight")
        @classmethod
        def _note(cls, value: float) -> float:
            seen.append(value)
            return value + 1  # validating what was validated would add once more

    built: list[float] = []

    def build(config: Counted, context: PolicyContext) -> ShortestOutput:
        built.append(config.weight)
        return ShortestOutput(context)

    spec = PolicySpec("counted", Layer.REQUEST_PRIORITIZER, Counted, build, "Counts.")
    scheduling = {**SMALL["scheduling"], "request_prioritizer": {"policy": "counted", "params": {"weight": 5}}}
    config = vajra.load({**SMALL, "scheduling": scheduling, "num_replicas": 3}, policies=[spec])
    vajra.run(config, policies=[spec], folder=tmp_path / "run")
    assert seen == [5.0]
    assert set(built) == {6.0}
