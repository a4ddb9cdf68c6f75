"""Pools to which no request can come by the parameters of a router are refused when settings are read; no others are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.split_pools import settings, simulate
from vajra_py.config import config_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.backends import check_backend
from vajra_py.plugins import load_registry
from vajra_py.workload import RequestSpec

LABEL = {"filter": "by-label", "params": {"label": "pool", "valid_values": ["a"]}}
SELECTOR = {"filter": "label-selector-filter", "params": {"match_labels": {"pool": "a"}}}
LENGTHS = {
    "filter": "context-length-aware",
    "params": {
        "enable_filtering": True,
        "ranges": [{"max_tokens": 9, "pools": ["a"]}, {"min_tokens": 10, "max_tokens": 999, "pools": ["b"]}],
    },
}
MIXED: dict[str, Any] = {"a": {"role": "mixed"}, "b": {"role": "mixed"}}
SPLIT: dict[str, Any] = {"a": {"role": "prefill"}, "b": {"role": "prefill"}, "c": {"role": "decode"}}
PAIR: dict[str, Any] = {"a": {"role": "prefill"}, "b": {"role": "decode"}}
PROFILES = {"prefill": {"filters": ["prefill-filter"]}, "decode": {"filters": ["decode-filter"]}}
ALWAYS = {"decider": "always-disagg-pd-decider"}
ELASTIC = {"min_replicas": 1, "max_replicas": 2}


def system(pools: dict[str, Any], params: dict[str, Any], **more: Any) -> dict[str, Any]:
    scheduling = {
        **settings()["scheduling"],
        "replicaset_scheduler": {"policy": "endpoint_picker", "params": params},
        **more,
    }
    mapping = settings(scheduling=scheduling, pools=pools)
    if pools.keys() == MIXED.keys() and pools["a"]["role"] == "mixed" and "profiles" not in params:
        del mapping["hand_off"], mapping["links"]
    return mapping


@pytest.mark.parametrize(
    ("pools", "params", "unreached"),
    [
        (MIXED, {"filters": [LABEL]}, {"b"}),
        (MIXED, {"filters": ["decode-filter", SELECTOR]}, {"b"}),
        (SPLIT, {"filters": [LABEL]}, {"b"}),
        (PAIR, {"profiles": PROFILES}, {"a"}),
        (PAIR, {"profiles": {"decode": {"filters": ["decode-filter"]}}}, {"a"}),
        (MIXED, {"profiles": {"prefill": {"filters": [LABEL]}, "decode": {"filters": [LABEL]}}}, {"b"}),
    ],
)
def test_a_pool_that_filters_leave_out_for_good_is_refused(
    pools: dict[str, Any], params: dict[str, Any], unreached: set[str]
) -> None:
    mapping, registry = system(pools, params), load_registry()
    with pytest.raises(ConfigError) as raised:
        check_backend(config_from_mapping(mapping, registry=registry), registry)
    (problem,) = raised.value.problems
    assert problem.where == "scheduling.replicaset_scheduler"
    assert [repr(one) in problem.message for one in pools] == [one in unreached for one in pools]
    ways = simulate(mapping, [RequestSpec(f"r{index}", 0.05 * index, 100, 5) for index in range(8)]).ways
    used = {one for way in ways.values() for one in (*way.assigned, way.target)}
    assert not used & {index for index, name in enumerate(pools) if name in unreached}
    assert all(way.ended is not None for way in ways.values())


@pytest.mark.parametrize(
    ("pools", "params", "more"),
    [
        (MIXED, {"filters": [LENGTHS]}, {}),
        (MIXED, {"filters": ["prefill-filter"]}, {}),
        (MIXED, {}, {}),
        (PAIR, {"filters": [LABEL]}, {}),
        (PAIR, {"profiles": PROFILES, "disaggregation": ALWAYS}, {}),
        (PAIR, {"profiles": PROFILES, "disaggregation": {"order": "prefill-first"}}, {}),
        (MIXED, {"profiles": {"prefill": {"filters": [LABEL]}, "decode": {}}}, {}),
        (
            {"a": {"role": "mixed", "elastic": ELASTIC}, "b": {"role": "mixed"}},
            {"filters": [LABEL]},
            {"scaling": {"policy": "target_utilization"}},
        ),
    ],
)
def test_a_pool_that_some_request_may_reach_is_not_refused(
    pools: dict[str, Any], params: dict[str, Any], more: dict[str, Any]
) -> None:
    registry = load_registry()
    check_backend(config_from_mapping(system(pools, params, **more), registry=registry), registry)
