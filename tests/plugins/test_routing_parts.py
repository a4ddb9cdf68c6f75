"""Are routing parts offered, refused and built with the same care as policies?"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

import vajra_py as vajra
from tests.policies.routing_views import context
from vajra_py.config import json_schema, load_config
from vajra_py.contract import (
    DeciderChoice,
    FilterChoice,
    Layer,
    LoadColumns,
    PickerChoice,
    PolicyConfig,
    RoutingContext,
    RoutingPartChoice,
    RoutingPartKind,
    RoutingPartSpec,
    ScorerChoice,
)
from vajra_py.errors import ConfigError, PluginError, UnknownNameError
from vajra_py.plugins import load_registry, routing_part_builder
from vajra_py.plugins.scaffold import write_plugin
from vajra_py.testing import Harness, HarnessOptions


class Flat:
    """A scorer, filter, picker and decider at once."""

    def scores(self, request: Any, replicas: Any, now: float) -> list[float]:
        return [0.5 for _ in replicas]

    def keeps(self, request: Any, replicas: Any, now: float) -> Any:
        return replicas

    def pick(self, request: Any, replicas: Any, scores: Any, now: float) -> int:
        return int(replicas[0].replica_id)

    def disaggregates(self, request: Any, decode: Any, now: float) -> bool:
        return False


class FlatConfig(PolicyConfig):
    height: float = 0.5


def spec(**changed: Any) -> RoutingPartSpec:
    facts: dict[str, Any] = {
        "name": "flat-scorer",
        "kind": RoutingPartKind.SCORER,
        "config": FlatConfig,
        "build": lambda config, context: Flat(),
        "summary": "All the same.",
    }
    return RoutingPartSpec(**{**facts, **changed})


def built(given: RoutingPartSpec, choice: RoutingPartChoice | None = None) -> Any:
    registry = load_registry().with_policies([given])
    services = RoutingContext(context(), lambda name: None)
    return routing_part_builder(registry)(choice or ScorerChoice(scorer=given.name), services)


def test_parts_of_a_name_may_be_of_several_kinds() -> None:
    registry = load_registry()
    for kind in (RoutingPartKind.SCORER, RoutingPartKind.FILTER):
        assert registry.routing_part(kind, "context-length-aware").spec.kind is kind
    with pytest.raises(UnknownNameError, match="picker: no installed package offers that name"):
        registry.routing_part(RoutingPartKind.PICKER, "context-length-aware")


def test_every_part_says_what_it_follows() -> None:
    registry = load_registry()
    for kind in RoutingPartKind:
        for name, offer in registry.routing_parts(kind).items():
            assert offer.spec.summary.endswith("."), name
            assert offer.spec.source, name
            fields = offer.spec.config.model_fields.values()
            assert all(field.description for field in fields), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "Flat"}, "a name is made of"),
        ({"kind": "scorer"}, "of kind 'scorer'; expected one of RoutingPartKind.PRODUCER"),
        ({"config": dict}, "expected a pydantic model class"),
        ({"build": None}, "expected a callable"),
        ({"summary": " "}, "without a summary"),
        ({"name": "queue-scorer"}, "and so does plug-in 'builtin'"),
    ],
)
def test_a_broken_offer_is_refused(changed: dict[str, Any], message: str) -> None:
    registry = load_registry().with_policies([spec(**changed)])
    with pytest.raises(PluginError, match=message):
        registry.routing_parts(RoutingPartKind.SCORER)


def test_parameters_must_be_a_policys() -> None:
    class Plain(BaseModel):
        model_config = ConfigDict(extra="forbid")

    with pytest.raises(PluginError, match="not a PolicyConfig"):
        load_registry().with_policies([spec(config=Plain)]).routing_parts(RoutingPartKind.SCORER)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        (RoutingPartKind.SCORER, ScorerChoice(scorer="flat")),
        (RoutingPartKind.FILTER, FilterChoice(filter="flat")),
        (RoutingPartKind.PICKER, PickerChoice(picker="flat")),
        (RoutingPartKind.DECIDER, DeciderChoice(decider="flat")),
    ],
)
def test_a_part_must_have_the_method_of_its_kind(kind: RoutingPartKind, choice: RoutingPartChoice) -> None:
    assert isinstance(built(spec(name="flat", kind=kind), choice), Flat)
    with pytest.raises(PluginError, match=f"{kind.value} 'flat': object has no method"):
        built(spec(name="flat", kind=kind, build=lambda config, context: object()), choice)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Flat, "returned the class Flat"),
        (SimpleNamespace(scores=lambda request, replicas: []), "has the wrong signature"),
        (SimpleNamespace(scores=Flat().scores, on_placement=lambda request: None), "has the wrong signature"),
        (
            SimpleNamespace(scores=Flat().scores, on_placements=lambda *given: None),
            "nothing calls 'on_placements'. Did you mean",
        ),
    ],
)
def test_what_a_part_is_not_is_told(part: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        built(spec(build=lambda config, context: part))


def test_wrong_parameters_and_failures_are_told_apart() -> None:
    with pytest.raises(ConfigError, match=r"scorer flat-scorer: params.height.*got 'high'"):
        built(spec(), ScorerChoice(scorer="flat-scorer", params={"height": "high"}))

    def unbuildable(config: Any, context: Any) -> Any:
        raise ValueError("no such height")

    def faulty(config: Any, context: Any) -> Any:
        raise KeyError("height")

    with pytest.raises(ConfigError, match="cannot be built: no such height"):
        built(spec(build=unbuildable))
    with pytest.raises(PluginError, match="building 'flat-scorer' raised KeyError"):
        built(spec(build=faulty))
    with pytest.raises(UnknownNameError, match="Did you mean 'flat-scorer'"):
        built(spec(), ScorerChoice(scorer="flat-scorers"))


def test_a_choice_may_be_a_name_alone() -> None:
    choice = ScorerChoice.model_validate("queue-scorer")
    assert (choice.name, choice.weight, choice.params) == ("queue-scorer", 1.0, {})


def test_editors_complete_parts_and_their_parameters() -> None:
    registry = load_registry().with_policies([spec()])
    definitions = json_schema(registry)["$defs"]
    by_name, *variants = definitions["ScorerChoice"]["oneOf"]
    assert {"flat-scorer", "queue-scorer"} <= set(by_name["enum"])
    assert "endpoint-attribute-scorer" not in by_name["enum"], "it has parameters without defaults"
    flat = next(one for one in variants if one["title"] == "flat-scorer")
    assert set(flat["properties"]) == {"scorer", "weight", "params"}
    assert flat["properties"]["params"]["properties"]["height"]["default"] == 0.5
    attribute = next(one for one in variants if one["title"] == "endpoint-attribute-scorer")
    assert attribute["required"] == ["scorer", "params"]


@pytest.mark.parametrize("kind", ["scorer", "filter", "picker", "decider"])
def test_the_template_of_a_part_runs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_plugin(f"my-{kind}-lab", tmp_path, kind)
    monkeypatch.syspath_prepend(str(folder / "src"))
    (own,) = importlib.import_module(f"my_{kind}_lab").vajra_routing_parts()
    assert own.name == f"my-{kind}-lab-{kind}"
    registry = load_registry().with_policies([own])
    config = load_config(folder / "experiment.yaml", registry=registry)
    choice = config.scheduling.choice(Layer.REPLICASET_SCHEDULER)
    assert own.name in str(choice.params)


def test_a_part_without_a_package_is_given_to_a_run() -> None:
    experiment = {
        "version": 1,
        "name": "tried",
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": {"policy": "endpoint_picker", "params": {"scorers": ["flat-scorer"]}},
            "replica_scheduler": "fixed_chunk",
        },
        "num_replicas": 2,
        "workload": {"type": "profile", "profile": "azure2023_conv", "num_requests": 20, "rate": 6},
        "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}},
    }
    own = [spec()]
    run = vajra.run(vajra.load(experiment, policies=own), policies=own)
    assert run.summary.value("overall.ttft_s.mean") > 0


def test_figures_of_all_replicas_at_once_are_those_of_each() -> None:
    harness = Harness("fcfs", "endpoint_picker", "fixed_chunk", HarnessOptions(num_replicas=5, num_blocks=64))
    for index in range(30):
        harness.submit(f"r{index}", 20 + 7 * index, 9)
    for replica_id in (0, 2, 3):
        harness.step(replica_id)
    seen: list[Any] = []
    harness.replicaset.bind_policy(Peek(seen), "peek")
    harness.submit("last", 10)
    (replicas,) = seen
    assert isinstance(replicas, LoadColumns)
    figures = ("num_running", "num_waiting", "num_pending_tokens", "num_context_tokens", "free_blocks", "num_blocks")
    for name in (*figures, "replica_id", "max_batch_size"):
        assert list(replicas.column(name)) == [getattr(one, name) for one in replicas], name
    assert len({one.num_waiting for one in replicas}) > 1


class Peek:
    """Keeps the replicas that it is shown."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def assign(self, request: Any, replicas: Any, now: float) -> int:
        self._seen.append(replicas)
        return 0

    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        return ()
