"""A server's metrics of movement: requests between replicas, KV, and replicas by pool and state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.fake_runner import runner_that_takes_its_time
from tests.serve.test_serve_admission import SPEC
from tests.sim.test_sim_migration import registry_of
from vajra_py.contract import Move, RequestView
from vajra_py.plugins import load_registry
from vajra_py.runtime.requests.request import Request, RequestState

WHOLE = {"max_batch_size": 8, "max_model_len": 512, "memory": {"num_blocks": 300}}


def numbers(server: Any, name: str, **headers: str) -> dict[tuple[str, ...], float]:
    """Samples of one metric by its labels other than model and replicaset, in order of the labels' names."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", headers=headers).text):
        for one in family.samples:
            if one.name == f"vajra:{name}":
                labels = {key: value for key, value in one.labels.items() if key not in ("model_name", "replicaset")}
                found[tuple(labels[key] for key in sorted(labels))] = one.value
    return found


def ask(server: Any, number: int, max_tokens: int) -> threading.Thread:
    """Send a request of 300 prompt tokens."""
    body = {"prompt": [number, 2, 3] * 100, "max_tokens": max_tokens, "ignore_eos": True}
    thread = threading.Thread(target=lambda: server.post(timeout=120, **body))
    thread.start()
    return thread


def test_hand_offs_are_counted_by_pools_and_those_under_way_by_where_they_are(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    """The decode replica has room for one request: others are held at the source meanwhile."""
    decode = {"replica": {"memory": {"num_blocks": 32}}}
    settings = {
        "replica": WHOLE,
        "pools": {"prefill": {"num_replicas": 2}, "decode": decode},
        "hand_off": "distserve",
    }
    server = puppet_server(settings, load=runner_that_takes_its_time)
    first = ask(server, 1, 200)
    until(lambda: numbers(server, "moves_total"), "the first one decodes")
    others = [ask(server, number, 60) for number in (2, 3, 4)]
    until(lambda: numbers(server, "num_requests_moving")["held",] > 0, "a request is held, for the target is full")
    for thread in (first, *others):
        thread.join(120)
    way = "hand_off", "prefill", "decode"
    assert numbers(server, "moves_total") == {way: 4}
    assert numbers(server, "kv_transfer_tokens_total") == {way: 4 * 300}
    (num_bytes,) = numbers(server, "kv_transfer_bytes_total").values()
    (replicaset,) = server.service.controller.replicasets.values()
    assert num_bytes == 4 * 300 * replicaset.hand_off.bytes_per_token > 0
    assert numbers(server, "num_requests_moving") == {
        (stage,): 0 for stage in ("computing", "held", "in_transfer", "at_target")
    }
    assert not numbers(server, "moves_not_made_total")
    states = {(pool, state): 0 for pool in ("prefill", "decode") for state in ("starting", "up", "draining", "down")}
    assert numbers(server, "replicas") == states | {("prefill", "up"): 2, ("decode", "up"): 1}


def test_a_request_that_is_taken_back_on_its_way_is_counted_with_its_end(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    decode = {"replica": {"memory": {"num_blocks": 32}}}
    settings = {"replica": WHOLE, "pools": {"prefill": {}, "decode": decode}, "hand_off": "distserve"}
    server = puppet_server(settings, load=runner_that_takes_its_time)
    first = ask(server, 1, 200)
    until(lambda: numbers(server, "moves_total"), "the first one decodes")
    body = {"model": "puppet", "prompt": [7, 8, 9] * 100, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        until(lambda: numbers(server, "num_requests_moving")["held",] == 1, "the second one is held")
    until(lambda: numbers(server, "moves_not_made_total") == {("hand_off", "ended", "aborted"): 1}, "it has left")
    assert numbers(server, "num_requests_moving")["held",] == 0
    first.join(120)


def test_migrations_are_counted_with_all_their_copies(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    def away(alive: dict[str, RequestView], now: float) -> Iterable[Move]:
        running = [one for one in alive.values() if isinstance(one, Request) and one.state is RequestState.RUNNING]
        return [Move(one, 1, "to make room") for one in running if one.replica_id == 0 and one.num_output_tokens]

    settings = {
        "num_replicas": 2,
        "replica": WHOLE,
        "scheduling": {"replicaset_scheduler": "mover"},
        "migration": {"last_stage_max_blocks": 0},
    }
    registry = registry_of([0.05 * n for n in range(600)], away)
    server = puppet_server(settings, load=runner_that_takes_its_time, registry=registry)
    ask(server, 1, 100).join(120)
    way = "migration", "default", "default"
    assert numbers(server, "moves_total") == {way: 1}
    (num_tokens,) = numbers(server, "kv_transfer_tokens_total").values()
    assert 300 <= num_tokens < 400, "no token twice"


def test_refusals_and_deferrals_are_counted_by_reason_for_those_who_may_know_names(
    puppet_server: Callable[..., Any],
) -> None:
    registry = load_registry().with_policies([SPEC])
    settings = {"scheduling": {"preset": "vllm-v1", "admission": "by_class"}}
    server = puppet_server(settings, registry=registry, api_key="k")
    key = {"Authorization": "Bearer k"}
    for slo_class in ("shed", "shed", "plain"):
        body = {"model": "puppet", "prompt": [5] * 8, "max_tokens": 2}
        headers = key | {"x-slo-class": slo_class}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert numbers(server, "admission_reasons_total", **key) == {("refused", "not now"): 2}
    assert not numbers(server, "admission_reasons_total")
