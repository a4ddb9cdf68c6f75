"""Retention policies, pins and events of content in whole runs: what users choose, read in logs, and see in routers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import (
    AnyPolicySpec,
    BatchBuilder,
    KeyMotion,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicySpec,
    QueueView,
    Refusal,
    ReplicaLoadView,
    RequestView,
    RetentionSpec,
    fill,
)
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import ConfigError, PolicyError
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.retention_log import RETENTION_FILE, RetentionLog, read_retention
from vajra_py.testing.simulated import simulated_system
from vajra_py.workload import PromptContent, RequestSpec

BLOCK = 16


class Unused:
    key_motion = KeyMotion.STATIC

    def key(self, block: Any, now: float) -> float:
        return 0.0


UNUSED = RetentionSpec("unused", PolicyConfig, lambda config, context: Unused(), "For this test.")


class Ends(Observer):
    """Cached tokens and reasons of the end, by request."""

    def __init__(self) -> None:
        self.hits: dict[str, int] = {}
        self.reasons: dict[str, EndReason] = {}

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.hits[request.request_id] = request.num_cached_tokens
        self.reasons[request.request_id] = reason


def asked(
    name: str, at: float, content: Sequence[tuple[Hashable, int]], num_output: int = 2, **facts: Any
) -> RequestSpec:
    prompt = PromptContent(tuple(content))  # type: ignore[arg-type]
    return RequestSpec(name, at, prompt.num_tokens, num_output, content=prompt, **facts)


def served(
    requests: Iterable[RequestSpec],
    scheduling: Mapping[str, Any],
    spec: AnyPolicySpec = UNUSED,
    observers: Sequence[Observer] = (),
    **changes: Any,
) -> Ends:
    num_blocks = changes.pop("num_blocks", 20)
    cache = changes.pop("prefix_cache", {})
    memory = {"num_blocks": num_blocks, "watermark_fraction": 0.0, "prefix_cache": cache}
    replica = {"max_batch_size": 4, "max_model_len": 400, "memory": memory}
    controller, simulator = simulated_system(spec, scheduling, {"replica": replica, **changes})
    ends = Ends()
    controller.watch((ends, *observers))
    simulator.run(requests)
    for one in observers:
        if isinstance(one, RetentionLog):
            one.close()
    controller.check_conservation()
    assert controller.num_alive == 0
    return ends


def conversation(gap_s: float, between: int = 16 * BLOCK) -> list[RequestSpec]:
    """Two turns of a session, and in between a prompt that needs nearly all blocks."""
    first = [("chat", 8 * BLOCK)]
    return [
        asked("first", 0.0, first, session_id="s"),
        asked("other", 0.5, [("other", between)]),
        asked("second", gap_s, [*first, (("out", "first"), 2), ("more", 2 * BLOCK)], session_id="s"),
    ]


# Orders


def test_priorities_keep_what_urgent_requests_use() -> None:
    prompts = [
        asked("urgent", 0.0, [("a", 6 * BLOCK)], priority=-1),
        *(asked(f"r{index}", 0.5 + index, [(index, 10 * BLOCK)]) for index in range(4)),
        asked("again", 9.0, [("a", 6 * BLOCK), ("b", BLOCK)]),
    ]
    assert served(prompts, {"retention": "lru"}).hits["again"] == 0
    assert served(prompts, {"retention": "priority"}).hits["again"] == 6 * BLOCK


@pytest.mark.parametrize(("gap_s", "hit"), [(1.0, True), (2.9, True), (3.2, False)])
def test_content_is_found_until_its_time_is_over(gap_s: float, hit: bool) -> None:
    first = [("chat", 8 * BLOCK)]
    requests = [asked("first", 0.0, first), asked("second", gap_s, [*first, ("more", BLOCK)])]
    scheduling = {"retention": {"policy": "ttl", "params": {"ttl_s": 3.0}}}
    assert served(requests, scheduling).hits["second"] == (8 * BLOCK if hit else 0)


def test_a_class_of_service_has_its_own_time_to_live() -> None:
    first = [("chat", 8 * BLOCK)]
    scheduling = {"retention": {"policy": "ttl", "params": {"ttl_s": 9.0, "ttl_by_slo_class_s": {"batch": 0.5}}}}
    for slo_class, hit in (("batch", 0), ("chat", 8 * BLOCK)):
        requests = [
            asked("first", 0.0, first, slo_class=slo_class),
            asked("second", 2.0, [*first, ("more", BLOCK)]),
        ]
        assert served(requests, scheduling).hits["second"] == hit


def test_lru_by_name_decides_as_without_a_name_and_another_order_does_not() -> None:
    spec = RetentionSpec("searched", PolicyConfig, load_registry().retention_policy("lru").spec.build, "As a tree.")
    requests = [
        asked(f"r{index}", 0.2 * index, [(index % 7, 5 * BLOCK + index), (("tail", index), 3 * BLOCK)])
        for index in range(60)
    ]
    plain = served(requests, {}).hits
    assert served(requests, {"retention": "lru"}).hits == plain
    assert served(requests, {"retention": "searched"}, spec).hits == plain
    assert served(requests, {"retention": "mru"}).hits != plain


def test_each_pool_may_have_its_own() -> None:
    spec = replace(UNUSED, name="pool_order")
    pools = {"first": {"num_replicas": 1, "retention": "pool_order"}, "second": {"num_replicas": 1}}
    controller, _ = simulated_system(spec, {"retention": "lfu"}, {"pools": pools})
    (replicaset,) = controller.replicasets.values()
    assert replicaset.policies is not None
    assert [one.name for one in replicaset.policies.retention if one] == ["pool_order", "lfu"]
    assert replicaset.policies.retention[0] is not replicaset.policies.retention[1]


# Pins


@pytest.mark.parametrize(("gap_s", "pin_s", "hit"), [(1.5, 3.0, True), (3.5, 3.0, False), (1.5, 0.1, False)])
def test_a_pinned_session_finds_its_content_again(gap_s: float, pin_s: float, hit: bool) -> None:
    scheduling = {"retention": {"policy": "session_pin", "params": {"pin_s": pin_s}}}
    hits = served(conversation(gap_s, 11 * BLOCK), scheduling).hits["second"]
    assert hits == 8 * BLOCK if hit else hits < 8 * BLOCK or pin_s < gap_s


def test_pins_never_lock_a_replica_up(tmp_path: Path) -> None:
    """The prompt in between needs blocks that are pinned for an hour: the pin goes, and the log says so."""
    scheduling = {"retention": {"policy": "session_pin", "params": {"pin_s": 3600.0}}}
    log = RetentionLog(tmp_path / RETENTION_FILE)
    ends = served(conversation(2.0), scheduling, observers=[log])
    assert set(ends.reasons.values()) == {EndReason.STOP}
    lines = list(read_retention(tmp_path / RETENTION_FILE))
    assert [line.get("why", "pinned") for line in lines][:2] == ["pinned", "forced"]
    assert lines[0]["request_id"] == "first"
    assert lines[0]["until"] == pytest.approx(lines[0]["at"] + 3600.0)
    assert lines[1]["at"] == pytest.approx(0.5)


class Pinner:
    """A replica scheduler that pins what it admits."""

    def __init__(self, seconds: float, told: list[Any]) -> None:
        self._seconds = seconds
        self._told = told

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        fill(replica, batch, lambda request, batch, replica: batch.max_chunk(request))
        for request in replica.running():
            self._told.append((request.request_id, batch.pin(request, self._seconds)))

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Listen, to be called at all."""


def pinner(seconds: float, told: list[Any]) -> PolicySpec:
    return PolicySpec(
        "pinner", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda config, context: Pinner(seconds, told), "For this test."
    )


def test_a_scheduler_pins_up_to_the_part_of_memory_that_pins_may_hold() -> None:
    told: list[Any] = []
    requests = [asked(f"r{index}", float(index), [(index, 6 * BLOCK)]) for index in range(3)]
    served(requests, {"replica_scheduler": "pinner"}, pinner(100.0, told), prefix_cache={"max_pinned_fraction": 0.7})
    answers = dict(told)
    assert answers == {"r0": None, "r1": None, "r2": Refusal.PINS}


class PatientPinner(Pinner):
    """Takes a request a second after it has come."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        newest = max((one.arrived_at for one in replica.waiting()), default=-1.0)
        if now < newest + 1.0:
            batch.idle_until(newest + 1.0)
        else:
            super().schedule(replica, batch, now)


def test_a_scheduler_that_waits_on_purpose_keeps_its_pins(tmp_path: Path) -> None:
    spec = PolicySpec(
        "patient",
        Layer.REPLICA_SCHEDULER,
        PolicyConfig,
        lambda config, context: PatientPinner(100.0, []),
        "For this test.",
    )
    log = RetentionLog(tmp_path / RETENTION_FILE)
    requests = [asked("first", 0.0, [("a", 4 * BLOCK)]), asked("second", 5.0, [("b", 4 * BLOCK)])]
    served(requests, {"replica_scheduler": "patient"}, spec, observers=[log])
    lines = list(read_retention(tmp_path / RETENTION_FILE))
    assert {line.get("pinned") for line in lines} == {"first", "second"}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), "long"])
def test_a_negative_time_to_live_is_refused(seconds: Any) -> None:
    with pytest.raises(
        PolicyError, match=re.escape(f"a pin lasts a number of seconds (got {seconds!r}). Allowed: 0 to")
    ):
        served([asked("r", 0.0, [("a", 32)])], {"replica_scheduler": "pinner"}, pinner(seconds, []))


def test_a_policy_that_breaks_the_contract_ends_the_run_by_name() -> None:
    class Broken(Unused):
        def on_stored(self, blocks: Any, now: float) -> None:
            raise ZeroDivisionError("no")

    spec = RetentionSpec("broken", PolicyConfig, lambda config, context: Broken(), "For this test.")
    with pytest.raises(PolicyError, match=r"broken.*ZeroDivisionError: no"):
        served([asked("r", 0.0, [("a", 64)])], {"retention": "broken"}, spec)


@pytest.mark.parametrize("at", [10**400, np.float32(1e9)], ids=["int", "numpy"])
def test_content_may_expire_later_than_any_event(at: Any) -> None:
    class Lasting(Unused):
        def expires_at(self, block: Any) -> Any:
            return at

    spec = RetentionSpec("lasting", PolicyConfig, lambda config, context: Lasting(), "For this test.")
    assert served(conversation(5.0, between=BLOCK), {"retention": "lasting"}, spec).hits["second"] > 0


# Events of content


class Looker:
    """A router that notes what it sees and hears."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        self.held: dict[int, set[Hashable]] = {}

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
        hits = [one.prefix_hit_tokens(request) for one in replicas]
        heard = []
        for one in replicas:
            held, hashes = self.held.get(one.replica_id, set()), request.block_hashes()
            most = (request.num_prompt_tokens - 1) // BLOCK
            heard.append(next((at for at, each in enumerate(hashes[:most]) if each not in held), most) * BLOCK)
        self.told.append((request.request_id, hits, heard))
        return len(self.told) % len(replicas)

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        return ()

    def on_blocks_stored(self, replica_id: int, hashes: Sequence[Hashable], now: float) -> None:
        held = self.held.setdefault(replica_id, set())
        assert held.isdisjoint(hashes)
        held.update(hashes)

    def on_blocks_removed(self, replica_id: int, hashes: Sequence[Hashable], now: float) -> None:
        assert self.held[replica_id].issuperset(hashes)
        self.held[replica_id].difference_update(hashes)

    def on_cache_cleared(self, replica_id: int, now: float) -> None:
        self.held[replica_id] = set()


def looker(told: list[Any]) -> PolicySpec:
    return PolicySpec(
        "looker", Layer.REPLICASET_SCHEDULER, PolicyConfig, lambda config, context: Looker(told), "For this test."
    )


def many(count: int) -> list[RequestSpec]:
    return [
        asked(f"r{index}", 0.15 * index, [(index % 5, (3 + index % 4) * BLOCK), (("tail", index), 30)], 9)
        for index in range(count)
    ]


@pytest.mark.parametrize(
    "scheduling", [{}, {"retention": "lfu"}, {"retention": {"policy": "ttl", "params": {"ttl_s": 0.7}}}]
)
def test_events_say_what_the_caches_hold(scheduling: Mapping[str, Any]) -> None:
    told: list[Any] = []
    served(many(60), {"replicaset_scheduler": "looker", **scheduling}, looker(told), num_replicas=2)
    assert all(hits == heard for _, hits, heard in told)
    assert sum(max(hits) > 0 for _, hits, _ in told) > 30


def test_a_lag_delays_what_routers_see_and_hear() -> None:
    def sight(lag_s: float) -> list[Any]:
        told: list[Any] = []
        requests = [asked(f"r{index}", 0.5 * index, [("a", 4 * BLOCK), (index, 8)]) for index in range(6)]
        served(requests, {"replicaset_scheduler": "looker"}, looker(told), kv_event_lag_s=lag_s)
        assert all(hits == heard for _, hits, heard in told)
        return [max(hits) for _, hits, _ in told]

    full = 4 * BLOCK
    assert sight(0.0) == [0, full, full, full, full, full]
    assert sight(1.2) == [0, 0, 0, full, full, full]
    assert sight(100.0) == [0] * 6


# Log entries


@pytest.mark.parametrize("retention", ["slru", "arc"])
def test_equal_runs_log_the_same_evictions(tmp_path: Path, retention: str) -> None:
    logs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / RETENTION_FILE
        served(many(40), {"retention": retention}, observers=[RetentionLog(path)])
        logs.append(path.read_bytes())
    assert logs[0] == logs[1]
    rows = [row for row in read_retention(path) if "evicted" in row]
    assert rows
    assert all(row["at"] >= 0 and row["replicaset"] == "default" and row["evicted"] for row in rows)


def test_a_run_that_keeps_to_the_default_logs_nothing(tmp_path: Path) -> None:
    served(many(40), {}, observers=[RetentionLog(tmp_path / RETENTION_FILE)])
    assert not list(tmp_path.iterdir())


def test_evictions_of_one_time_and_replica_are_one_line(tmp_path: Path) -> None:
    log = RetentionLog(tmp_path / RETENTION_FILE)
    for replica_id, depth, now in ((0, 3, 1.0), (0, 2, 1.0), (1, 5, 1.0), (1, 4, 2.0)):
        block: Any = SimpleNamespace(request=SimpleNamespace(request_id="r"), depth=depth)
        log.on_evicted("default", replica_id, block, now)
    log.close()
    rows = [(row["at"], row["replica_id"], row["evicted"]) for row in read_retention(tmp_path / RETENTION_FILE)]
    assert rows == [(1.0, 0, [["r", 3], ["r", 2]]), (1.0, 1, [["r", 5]]), (2.0, 1, [["r", 4]])]


# Bad input


def problem_of(scheduling: Mapping[str, Any], cache: Mapping[str, Any] | None = None) -> str:
    memory = {"num_blocks": 20, "prefix_cache": dict(cache or {})}
    with pytest.raises(ConfigError) as raised:
        simulated_system(UNUSED, scheduling, {"replica": {"memory": memory}})
    return str(raised.value)


@pytest.mark.parametrize(
    ("scheduling", "cache", "said"),
    [
        (
            {"retention": "lruu"},
            {},
            "Did you mean 'lru'? Allowed: arc, continuum_pins, fifo, filo, kvflow, lfu, lru, mru",
        ),
        ({"retention": {"policy": "ttl", "params": {"ttl_s": -1.0}}}, {}, "scheduling.retention.params.ttl_s"),
        ({"retention": {"policy": "slru", "params": {"protected_threshold": 0}}}, {}, "protected_threshold"),
        ({"retention": {"policy": "lfu", "params": {"age": 1}}}, {}, "scheduling.retention.params.age"),
        (
            {"retention": "lfu"},
            {"enabled": False},
            "there is no prefix cache. Allowed: null, or prefix_cache.enabled: true",
        ),
        (
            {"retention": "lfu"},
            {"reuse_order": "fifo"},
            "replica.memory.prefix_cache.reuse_order: cannot be combined with",
        ),
        ({"retention": "lfu"}, {"retain_freed": False}, "Allowed: True"),
        (
            {"retention": "lfu"},
            {"drop_last_hit": True},
            "replica.memory.prefix_cache.drop_last_hit: cannot be combined with",
        ),
        ({}, {"max_pinned_fraction": 1.5}, "max_pinned_fraction"),
        ({"retention": 3}, {}, "must be a policy's name"),
    ],
)
def test_a_wrong_choice_is_refused(scheduling: Mapping[str, Any], cache: Mapping[str, Any], said: str) -> None:
    assert said in problem_of(scheduling, cache)
