"""Does the composed router put its parts together as llm-d's endpoint picker does?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.policies.routing_views import Replica, Request, context, prompt, replicas, seeded
from tests.sim.split_pools import settings, simulate
from vajra_policies.routers import figures
from vajra_policies.routers.endpoint_picker import EndpointPicker, EndpointPickerPolicyConfig, build
from vajra_policies.routers.pickers import MaxScorePicker
from vajra_policies.routers.profile import LISTENING
from vajra_py.contract import (
    Layer,
    PlacesAfterPrompt,
    PolicyConfig,
    PolicyContext,
    ReplicaState,
    RoutingPartKind,
    RoutingPartSpec,
)
from vajra_py.contract.context import no_routing_parts
from vajra_py.errors import PolicyError
from vajra_py.plugins import load_registry, routing_part_builder
from vajra_py.plugins.shapes import CACHE_METHODS, LISTENING_METHODS
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload import RequestSpec
from vajra_py.workload.request import PromptContent


def router(params: Mapping[str, Any] | None = None, services: PolicyContext | None = None, **more: Any) -> Any:
    return build(EndpointPickerPolicyConfig.model_validate({**(params or {}), **more}), services or context())


class Told:
    """A part that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def scores(self, request: Any, views: Sequence[Any], now: float) -> list[float | None]:
        return [request.metadata.get(f"score{one.replica_id}") for one in views]

    def keeps(self, request: Any, views: Sequence[Any], now: float) -> Sequence[Any]:
        return [one for one in views if one.replica_id not in request.metadata.get("dropped", ())]

    def on_placement(self, request: Any, placements: Mapping[str, Any], now: float) -> None:
        self.heard.append(("placed", {name: one.replica_id for name, one in placements.items()}))

    def on_arrivals(self, requests: Sequence[Any], now: float) -> None:
        self.heard.append(("arrivals", len(requests), now))

    def on_departures(self, requests: Sequence[Any], now: float) -> None:
        self.heard.append(("departures", len(requests), now))

    def on_wake(self, key: str, now: float) -> None:
        self.heard.append(("wake", key, now))


def own_parts(told: Told, stream: Any = None) -> PolicyContext:
    """Services with a scorer and a filter `told`, which are one object."""
    specs = [
        RoutingPartSpec("told", kind, PolicyConfig, lambda config, context: told, "Notes what it is told.")
        for kind in (RoutingPartKind.SCORER, RoutingPartKind.FILTER)
    ]
    registry = load_registry().with_policies(specs)
    services = context(4, stream=stream or seeded())
    return replace(services, build_part=routing_part_builder(registry))


# One profile


def test_without_parameters_llm_ds_defaults_hold() -> None:
    config = EndpointPickerPolicyConfig()
    assert config.scorers is not None
    assert [(one.name, one.weight) for one in config.scorers] == [
        ("queue-scorer", 2.0),
        ("kv-cache-utilization-scorer", 2.0),
        ("prefix-cache-scorer", 3.0),
    ]
    assert config.picker is not None
    assert config.picker.name == "max-score-picker"
    made = router()
    assert not isinstance(made, PlacesAfterPrompt)
    sent = prompt("a", blocks=8)
    first = made.assign(sent, replicas(num_waiting=[0, 0, 0]), 0.0)
    # 2 x 1 for the shortest queue and 2 x 1 for memory are less than these and 3 x 1 for the prefix.
    later = [made.assign(prompt("a", blocks=8), replicas(num_waiting=[0, 0, 0]), 0.0) for _ in range(5)]
    assert later == [first] * 5
    waiting = [0, 0, 0]
    waiting[first] = 9
    # The longest queue loses 2; 3 for the prefix outweigh it.
    assert made.assign(prompt("a", blocks=8), replicas(num_waiting=waiting), 0.0) == first
    free = [100, 100, 100]
    free[first] = 0
    assert made.assign(prompt("a", blocks=8), replicas(num_waiting=waiting, free_blocks=free), 0.0) != first


def test_scores_are_clamped_weighted_and_summed() -> None:
    told = Told()
    made = router(services=own_parts(told), scorers=[{"scorer": "told", "weight": 2.0}, "queue-scorer"])
    views = replicas(num_waiting=[0, 5, 10])
    facts: dict[str, Any] = {"score0": -3.0, "score1": 7.0, "score2": None}
    assert made.assign(Request(metadata=facts), views, 0.0) == 1  # 0 + 1, 2 + 0.5, 0 + 0
    assert made.assign(Request(metadata={"score0": 0.4, "score1": 0.2}), views, 0.0) == 0
    assert made.assign(Request(metadata={"score2": 0.6}), views, 0.0) == 2  # 1.2 against 1


def test_a_negative_weight_turns_a_scorer_round() -> None:
    made = router(scorers=[{"scorer": "queue-scorer", "weight": -1}])
    assert made.assign(Request(), replicas(num_waiting=[0, 5, 3]), 0.0) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0.5], "1 scores for 2 replicas"),
        ([0.5, float("nan")], "not a number"),
        ([None, float("nan")], "not a number"),
    ],
)
def test_wrong_scores_name_their_scorer(answer: list[Any], message: str) -> None:
    class Wrong(Told):
        def scores(self, request: Any, views: Sequence[Any], now: float) -> list[float | None]:
            return answer

    made = router(services=own_parts(Wrong()), scorers=["told"])
    with pytest.raises(ValueError, match=rf"scorer .told. returned .*{message}"):
        made.assign(Request(), replicas(num_waiting=[0, 0]), 0.0)


def test_filters_narrow_in_order_and_scores_are_of_those_left() -> None:
    told = Told()
    made = router(
        services=own_parts(told),
        filters=[
            "told",
            {"filter": "utilization-filter", "params": {"conditions": [{"metric": "waiting-queue", "max_value": 5}]}},
        ],
        scorers=["queue-scorer"],
    )
    views = replicas(num_waiting=[0, 4, 2, 9])
    assert made.assign(Request(metadata={"dropped": (0,)}), views, 0.0) == 2


def test_where_filters_leave_nobody_the_request_waits_for_one_that_they_keep() -> None:
    made = router(services=own_parts(Told()), filters=["told"], scorers=[])
    views = replicas(num_waiting=[0, 0])
    stuck, free = Request(metadata={"dropped": (0, 1)}), Request(request_id="f", metadata={"dropped": (0,)})
    assert made.assign(stuck, views, 0.0) is None
    queue: Any = [stuck, free]
    assert list(made.pull(views[0], queue, 0.0)) == []
    assert list(made.pull(views[1], queue, 0.0)) == ["f"]
    assert list(made.pull(Replica(1, num_running=64), queue, 0.0)) == []


def test_replicas_that_are_down_get_nothing() -> None:
    made = router()
    assert {made.assign(Request(), replicas(is_up=[False, True, False]), 0.0) for _ in range(5)} == {1}
    assert made.assign(Request(), replicas(is_up=[False]), 0.0) is None


def test_ties_are_uniform_from_the_runs_stream() -> None:
    counts = Counter(
        router(services=context(stream=seeded(seed)), scorers=["queue-scorer"]).assign(
            Request(), replicas(num_waiting=[1, 0, 0, 0]), 0.0
        )
        for seed in range(600)
    )
    assert set(counts) == {1, 2, 3}
    assert all(abs(count / 600 - 1 / 3) < 0.07 for count in counts.values())


def test_parts_are_told_what_they_listen_to() -> None:
    told = Told()
    made = router(services=own_parts(told), scorers=["told"])
    request = Request(metadata={"score2": 1.0})
    made.on_arrivals([request], 1.0)
    assert made.assign(request, replicas(num_waiting=[0] * 4), 1.0) == 2
    made.on_wake("tick", 2.0)
    made.on_departures([request], 3.0)
    assert told.heard == [
        ("arrivals", 1, 1.0),
        ("placed", {"default": 2}),
        ("wake", "tick", 2.0),
        ("departures", 1, 3.0),
    ]


def test_the_router_forwards_whatever_a_part_may_listen_to() -> None:
    assert set(LISTENING) == {*LISTENING_METHODS, *CACHE_METHODS} - {"on_step_run"}


@pytest.mark.parametrize(
    "name", ["on_arrivals", "on_admission", "on_preemption", "on_step_end", "on_departures", "on_wake"]
)
def test_a_router_listens_to_nothing_that_no_part_wants(name: str) -> None:
    assert not hasattr(router(scorers=["queue-scorer"]), name)


def test_what_rests_on_prefixes_sees_them_as_they_were_before_the_placement() -> None:
    made = router(scorers=["no-hit-lru-scorer", "token-load-scorer"])
    views = replicas(num_waiting=[0, 0, 0])
    # Each prompt is new: the router takes replicas in turn, although each prompt is indexed where it was placed.
    assert [made.assign(prompt(f"p{index}", blocks=4), views, 0.0) for index in range(6)] == [0, 1, 2, 0, 1, 2]


# In a run


def test_routed_by_name_in_a_run() -> None:
    params: Any = {"scorers": [{"scorer": "prefix-cache-scorer", "weight": 3}, "active-request-scorer"]}
    harness = Harness("fcfs", ("endpoint_picker", params), "fixed_chunk", HarnessOptions(num_replicas=3, num_blocks=64))
    for index in range(12):
        content = PromptContent(((f"prefix{index % 3}", 128), (f"r{index}", 10)))
        harness.submit(f"r{index}", content.num_tokens, 3, content=content)
    at = {index: harness.controller.find(f"r{index}").replica_id for index in range(12)}  # type: ignore[union-attr]
    for prefix in range(3):
        assert len({at[index] for index in range(prefix, 12, 3)}) == 1
    assert len(set(at.values())) == 3


def test_a_broken_scorer_is_named_with_its_request() -> None:
    class Broken:
        def scores(self, request: Any, views: Sequence[Any], now: float) -> list[float]:
            raise KeyError("lost")

    spec = RoutingPartSpec("broken", RoutingPartKind.SCORER, PolicyConfig, lambda config, context: Broken(), "Breaks.")
    registry = load_registry().with_policies([spec])
    scheduling = {
        **settings()["scheduling"],
        "replicaset_scheduler": {"policy": "endpoint_picker", "params": {"scorers": ["broken"]}},
    }
    mapping = settings(scheduling=scheduling)
    del mapping["pools"], mapping["hand_off"], mapping["links"]
    with pytest.raises(PolicyError, match=r"endpoint_picker.*lost"):
        simulate(mapping, [RequestSpec("a", 0.0, 100, 5)], registry=registry)


# Two profiles

PROFILES: dict[str, Any] = {
    "prefill": {"filters": ["prefill-filter"], "scorers": ["queue-scorer"]},
    "decode": {"filters": ["decode-filter"], "scorers": ["running-requests-size-scorer"]},
}
SPLIT = replicas(role=["prefill", "prefill", "decode", "decode"], num_waiting=[3, 1, 0, 0], num_running=[0, 0, 5, 2])


def split(order: str = "decode-first", decider: Any = "always-disagg-pd-decider", **params: Any) -> Any:
    how = {"order": order, **({} if decider is None else {"decider": decider})}
    return router(profiles=PROFILES, disaggregation=how, **params)


def test_decode_first_remembers_the_replica() -> None:
    made, request = split(), Request()
    assert isinstance(made, PlacesAfterPrompt)
    assert made.assign(request, SPLIT, 0.0) == 1
    busier = replicas(role=["prefill", "prefill", "decode", "decode"], num_running=[0, 0, 0, 99])
    assert made.place_after_prompt(request, busier[2:], 1.0) == 3
    assert made.place_after_prompt(request, busier[2:], 2.0) == 3, "asked again while that one is full"


def test_another_replica_where_the_remembered_one_is_gone() -> None:
    made, request = split(), Request()
    made.assign(request, SPLIT, 0.0)
    left = replicas(role=["prefill", "prefill", "decode", "decode"], is_up=[True, True, True, False])
    assert made.place_after_prompt(request, left, 1.0) == 2
    assert made.place_after_prompt(request, SPLIT, 2.0) == 2, "it stays with what was chosen anew"


def test_prefill_first_chooses_both_at_arrival() -> None:
    made, request = split("prefill-first", None), Request()
    assert made.assign(request, SPLIT, 0.0) == 1
    busier = replicas(role=["prefill", "prefill", "decode", "decode"], num_running=[0, 0, 0, 99])
    assert made.place_after_prompt(request, busier, 1.0) == 3


def test_decode_after_prompt_chooses_when_the_prompt_is_computed() -> None:
    made, request = split("decode-after-prompt", None), Request()
    assert made.assign(request, SPLIT, 0.0) == 1
    busier = replicas(role=["prefill", "prefill", "decode", "decode"], num_running=[0, 0, 0, 99])
    assert made.place_after_prompt(request, busier, 1.0) == 2


@pytest.mark.parametrize("decider", [None, "never-disagg-pd-decider", "prefix-based-pd-decider"])
def test_without_a_yes_the_decode_replica_computes_the_prompt(decider: Any) -> None:
    made, request = split(decider=decider), Request()
    assert made.assign(request, SPLIT, 0.0) == 3


def test_the_decider_asks_about_the_decode_replica() -> None:
    decider = {"decider": "prefix-based-pd-decider", "params": {"non_cached_tokens": 100}}
    made = split(decider=decider)
    short, first, again = prompt("s", blocks=6), prompt("a", blocks=8), prompt("a", blocks=8)
    assert made.assign(short, SPLIT, 0.0) == 3  # 96 tokens to compute
    assert made.assign(first, SPLIT, 0.0) == 1  # 128
    assert made.assign(again, SPLIT, 0.0) == 3, "its decode replica has got the prompt by now"


@pytest.mark.parametrize("order", ["decode-first", "prefill-first", "decode-after-prompt"])
def test_without_prefill_replicas_decode_does_it_all(order: str) -> None:
    made = split(order, "always-disagg-pd-decider" if order == "decode-first" else None)
    assert made.assign(Request(), SPLIT[2:], 0.0) == 3


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_without_decode_replicas_a_request_waits(order: str) -> None:
    made = split(order, "always-disagg-pd-decider" if order == "decode-first" else None)
    assert made.assign(Request(), SPLIT[:2], 0.0) is None


def test_one_mixed_replica_keeps_both() -> None:
    made, request = split(), Request()
    assert made.assign(request, replicas(role=["mixed"]), 0.0) == 0
    assert made.place_after_prompt(request, replicas(role=["mixed"]), 0.0) == 0


def test_parts_learn_both_placements() -> None:
    told = Told()
    profiles = {**PROFILES, "decode": {"filters": ["decode-filter"], "scorers": ["told"]}}
    how = {"decider": "always-disagg-pd-decider"}
    made = router(services=own_parts(told), profiles=profiles, disaggregation=how)
    request = Request(metadata={"score2": 1.0})
    made.assign(request, SPLIT, 0.0)
    assert told.heard == [("placed", {"decode": 2, "prefill": 1})]
    made.on_departures([request], 1.0)
    assert told.heard[-1] == ("departures", 1, 1.0)


POOLS: dict[str, Any] = {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}}


def ways(order: str, decider: Any = None, count: int = 6, reserve: str = "after_prompt") -> Any:
    how = {"order": order, **({} if decider is None else {"decider": decider})}
    params = {"profiles": PROFILES, "disaggregation": how}
    scheduling = {**settings()["scheduling"], "replicaset_scheduler": {"policy": "endpoint_picker", "params": params}}
    hand_off = {"kv_bytes_per_token": 1_000_000, "reserve": reserve}
    specs = [RequestSpec(f"r{index}", 0.05 * index, 100, 5) for index in range(count)]
    return simulate(settings(scheduling=scheduling, pools=POOLS, hand_off=hand_off), specs).ways


@pytest.mark.parametrize(
    ("order", "decider"),
    [("decode-first", "always-disagg-pd-decider"), ("prefill-first", None), ("decode-after-prompt", None)],
)
@pytest.mark.parametrize("reserve", ["before_prompt", "after_prompt", "at_admission"])
def test_pools_split_prompts_and_decodes_in_a_run(order: str, decider: Any, reserve: str) -> None:
    found = ways(order, decider, reserve=reserve)
    assert {way.assigned[0] for way in found.values()} <= {0, 1}
    assert {way.target for way in found.values()} <= {2, 3}
    assert all(way.ended is not None and way.arrived is not None for way in found.values())


def test_decode_replicas_compute_what_the_decider_keeps_there_in_a_run() -> None:
    found = ways("decode-first", "never-disagg-pd-decider")
    assert {way.assigned[0] for way in found.values()} <= {2, 3}
    assert all(way.target is None and way.ended is not None for way in found.values())


# Parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"profiles": {"prefill": {}}}, "one named decode"),
        ({"profiles": {"decode": {}}, "scorers": ["queue-scorer"]}, "also filters"),
        ({"profiles": {"decode": {}}, "picker": "random-picker"}, "also filters"),
        ({"disaggregation": {}}, "needs profiles"),
        ({"profiles": {"encode": {}}}, "decode"),
        (
            {
                "profiles": {"decode": {}},
                "disaggregation": {"order": "prefill-first", "decider": "always-disagg-pd-decider"},
            },
            "decode-first",
        ),
        ({"scorers": [{"scorer": "queue-scorer", "weight": "much"}]}, "weight"),
        ({"filters": [{"scorer": "queue-scorer"}]}, "filter"),
    ],
)
def test_wrong_compositions_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EndpointPickerPolicyConfig.model_validate(params)


def test_profiles_need_kv_that_can_move() -> None:
    with pytest.raises(ValueError, match="KV-parallel groups"):
        router({"profiles": PROFILES}, context(kv_parallel_groups=2, kv_group_tokens=320))


def test_mixed_replicas_hand_over_too() -> None:
    params = {"profiles": PROFILES, "disaggregation": {"decider": "always-disagg-pd-decider"}}
    scheduling = {**settings()["scheduling"], "replicaset_scheduler": {"policy": "endpoint_picker", "params": params}}
    mapping = settings(scheduling=scheduling, num_replicas=3)
    del mapping["pools"]
    found = simulate(mapping, [RequestSpec(f"r{index}", 0.01 * index, 100, 5) for index in range(6)]).ways
    assert any(way.target is not None for way in found.values())
    assert all(way.ended is not None for way in found.values())


def test_a_producer_is_given_once() -> None:
    with pytest.raises(ValueError, match="given twice"):
        router(producers=["approx-prefix-cache-producer", "approx-prefix-cache-producer"])


def test_a_producer_of_another_kind_is_refused() -> None:
    scorer = {"scorer": "latency-scorer", "params": {"latency_prediction_info_producer_name": "inflight-load-producer"}}
    with pytest.raises(Exception, match="does not predict latencies"):
        router(scorers=[scorer])


def test_settings_of_a_producer_reach_the_parts_that_read_it() -> None:
    producer = {"producer": "approx-prefix-cache-producer", "params": {"min_block_size_tokens": 16}}
    small = router(producers=[producer], scorers=["prefix-cache-scorer"])
    views = replicas(num_waiting=[0, 0])
    first = small.assign(prompt("a", blocks=1), views, 0.0)
    assert [small.assign(prompt("a", blocks=1), views, 0.0) for _ in range(8)] == [first] * 8


# Properties


@given(
    figures=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 100), st.booleans()), min_size=1, max_size=12
    ),
    weights=st.lists(st.floats(0, 10), min_size=3, max_size=3),
)
def test_the_choice_is_a_best_one_of_those_up(figures: list[tuple[int, int, int, bool]], weights: list[float]) -> None:
    waiting, running, free, up = (list(column) for column in zip(*figures, strict=True))
    views = replicas(num_waiting=waiting, num_running=running, free_blocks=free, is_up=up)
    names = ("queue-scorer", "running-requests-size-scorer", "kv-cache-utilization-scorer")
    made: EndpointPicker = router(
        scorers=[{"scorer": name, "weight": one} for name, one in zip(names, weights, strict=True)]
    )
    chosen = made.assign(Request(), views, 0.0)  # type: ignore[arg-type]
    living = [one for one in views if one.is_up]
    if not living:
        assert chosen is None
        return

    def relative(values: list[int], value: int) -> float:
        return 1.0 if max(values) == min(values) else (max(values) - value) / (max(values) - min(values))

    totals = {
        one.replica_id: weights[0] * relative([each.num_waiting for each in living], one.num_waiting)
        + weights[1] * relative([each.num_running for each in living], one.num_running)
        + weights[2] * one.free_blocks / 100
        for one in living
    }
    assert totals[chosen] == pytest.approx(max(totals.values()), abs=1e-9)  # type: ignore[index]


def test_it_is_offered_with_its_source() -> None:
    spec = load_registry().policy(Layer.REPLICASET_SCHEDULER, "endpoint_picker").spec
    assert "llm-d" in spec.source


def test_contexts_without_parts_say_so() -> None:
    with pytest.raises(ValueError, match="routing parts are not available"):
        router(services=replace(context(), build_part=no_routing_parts))


def test_figures_are_right_whoever_is_down() -> None:
    params: Any = {"scorers": ["queue-scorer", "running-requests-size-scorer", "kv-cache-utilization-scorer"]}
    harness = Harness("fcfs", ("endpoint_picker", params), "fixed_chunk", HarnessOptions(num_replicas=6, num_blocks=64))
    for index in range(40):
        harness.submit(f"r{index}", 10 + 11 * index % 300, 9)
    for replica_id in (0, 2, 3):
        harness.step(replica_id)
    for down in ((), (1,), (0, 5)):
        for replica_id in range(6):
            state = ReplicaState.DOWN if replica_id in down else ReplicaState.UP
            harness.replicaset.set_state(replica_id, state)
        fast, plain = (figures.those_up(views) for views in (harness.replicaset._live, [*harness.replicaset._live]))
        assert [one.replica_id for one in fast] == [one.replica_id for one in plain]
        for read in (figures.ids, figures.waiting, figures.running, figures.kv_usage, figures.context_tokens):
            assert read(fast).tolist() == read(plain).tolist()
        assert len(set(figures.waiting(fast).tolist())) > 1


def test_of_two_equally_good_replicas_each_is_drawn() -> None:
    picker = MaxScorePicker(seeded())
    views: Any = [Replica(number) for number in range(3)]
    request: Any = Request()
    assert {picker.pick(request, views, [1.0, 2.0, 2.0], 0.0) for _ in range(40)} == {1, 2}
    assert {picker.pick(request, views, [1.0, 2.0, 0.0], 0.0) for _ in range(5)} == {1}
