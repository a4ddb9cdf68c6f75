"""Are routing parts offered, refused and built with the same care as policies?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.policies.routing_views import context
from vajra_py.contract import (
    DeciderChoice,
    FilterChoice,
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
    from pydantic import BaseModel, ConfigDict

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
            "nothing ever asks for 'on_placements'. Did you mean",
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
