"""Memory tiers in whole runs: times of loads, prefetch rules, what comes back from where, and what users read of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import vajra_py.api as api
from vajra_py.config import config_from_mapping
from vajra_py.config.replica import MemoryConfig
from vajra_py.config.tiers import TiersConfig
from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicySpec,
    QueueView,
    ReplicaLoadView,
    RequestView,
    RetentionSpec,
    SchedulerTraits,
)
from vajra_py.contract.observer import EndReason, Observer, TierTransfer
from vajra_py.engine.refusals import check_tiers
from vajra_py.errors import ConfigError, PolicyError
from vajra_py.runtime.records.input_log import CacheReset, Failure, Restart
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.testing.simulated import simulated_system
from vajra_py.vllm.config import problems_of
from vajra_py.workload import PromptContent, RequestSpec

BLOCK = 16
BYTES_PER_TOKEN = 1_000_000
BLOCK_S = 0.016
"""Time that a block takes on a link of 1 GB/s."""


class Unused:
    key_motion = KeyMotion.STATIC

    def key(self, block: Any, now: float) -> float:
        return 0.0


UNUSED = RetentionSpec("unused", PolicyConfig, lambda config, context: Unused(), "For this test.")


class Watch(Observer):
    """What became of each request, and of content."""

    def __init__(self) -> None:
        self.hits: dict[str, int] = {}
        self.by_tier: dict[str, Counter[str]] = {}
        self.reasons: dict[str, EndReason] = {}
        self.admitted_at: dict[str, float] = {}
        self.loaded_at: dict[str, float] = {}
        self.transfers: list[tuple[tuple[str, str], int, float, float]] = []

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.hits[request.request_id] = request.num_cached_tokens
        self.reasons[request.request_id] = reason

    def on_admitted(self, request: RequestView, replica_id: int, now: float) -> None:
        self.admitted_at.setdefault(request.request_id, now)

    def on_tier_hit(
        self, request: RequestView, replica_id: int, num_tokens: Mapping[str, int], load_s: float, now: float
    ) -> None:
        self.by_tier.setdefault(request.request_id, Counter()).update(num_tokens)
        self.loaded_at[request.request_id] = now

    def on_tier_transfer(self, transfer: TierTransfer, now: float) -> None:
        assert transfer.num_bytes == transfer.num_blocks * BLOCK * BYTES_PER_TOKEN
        ends = transfer.source, transfer.target
        self.transfers.append((ends, transfer.num_blocks, transfer.started_at, now))


def asked(
    name: str, at: float, content: Sequence[tuple[Hashable, int]], num_output: int = 2, **facts: Any
) -> RequestSpec:
    prompt = PromptContent(tuple(content))  # type: ignore[arg-type]
    return RequestSpec(name, at, prompt.num_tokens, num_output, content=prompt, **facts)


def tier(name: str = "host", num_blocks: int = 1000, **more: Any) -> dict[str, Any]:
    return {"name": name, "num_blocks": num_blocks, "bandwidth_gb_s": 1.0, **more}


def built(
    tiers: Any, num_blocks: int = 20, scheduling: Mapping[str, Any] | None = None, **changes: Any
) -> tuple[Controller, Any, Watch]:
    if isinstance(tiers, list):
        tiers = {"levels": tiers}
    memory = {"num_blocks": num_blocks, "watermark_fraction": 0.0, **changes.pop("memory", {})}
    if tiers is not None:
        memory["tiers"] = {"kv_bytes_per_token": BYTES_PER_TOKEN, **tiers}
    replica = {"max_batch_size": 4, "max_model_len": 4000, "memory": memory}
    spec = changes.pop("spec", UNUSED)
    controller, simulator = simulated_system(spec, scheduling or {}, {"replica": replica, **changes})
    watch = Watch()
    controller.watch([watch])
    return controller, simulator, watch


def served(requests: Iterable[RequestSpec], tiers: Any, **changes: Any) -> Watch:
    controller, simulator, watch = built(tiers, **changes)
    simulator.run(list(requests))
    controller.check_conservation()
    assert controller.num_alive == 0
    return watch


def chat(second_at: float = 3.0, num_blocks: int = 8) -> list[RequestSpec]:
    """A prompt, another that takes its place, and the first one again with a little more."""
    first = [("chat", num_blocks * BLOCK)]
    return [
        asked("first", 0.0, first),
        asked("other", 1.0, [("other", 16 * BLOCK)]),
        asked("again", second_at, [*first, ("more", BLOCK)]),
    ]


def test_a_prompt_given_up_by_the_device_comes_back_from_the_host() -> None:
    assert served(chat(), None).hits["again"] < 8 * BLOCK
    watch = served(chat(), [tier()])
    assert watch.hits["again"] == 8 * BLOCK


def test_a_load_takes_latency_plus_bytes_by_bandwidth() -> None:
    watch = served(chat(), [tier(latency_s=0.5, write="write_through")], num_blocks=20)
    from_host = watch.by_tier["again"]["host"]
    up = [one for one in watch.transfers if one[0] == ("host", "device")]
    assert up == [
        (("host", "device"), from_host // BLOCK, 3.0, pytest.approx(3.0 + 0.5 + from_host // BLOCK * BLOCK_S))
    ]
    assert watch.admitted_at["again"] == pytest.approx(3.0 + 0.5 + from_host // BLOCK * BLOCK_S)


def test_a_prefetch_and_a_load_follow_each_other() -> None:
    """What the host has given up to the disk comes back through it: two links, one after the other."""
    levels = [tier(num_blocks=20, write="write_through"), tier("disk", bandwidth_gb_s=0.5)]
    watch = served(chat(5.0), levels)
    found = watch.by_tier["again"]
    assert found["disk"] > 0
    at = 5.0 + found["disk"] // BLOCK * 2 * BLOCK_S
    upwards = [one for one in watch.transfers if one[0] in (("disk", "host"), ("host", "device"))]
    assert [(one[0], one[2], one[3]) for one in upwards] == [
        (("disk", "host"), 5.0, pytest.approx(at)),
        (("host", "device"), pytest.approx(at), pytest.approx(at + found.total() // BLOCK * BLOCK_S)),
    ]


@pytest.mark.parametrize(
    ("rules", "num_found"),
    [
        ({"prefetch": "wait_complete"}, 8),
        ({"prefetch": "best_effort"}, 0),
        ({"prefetch": "timeout", "prefetch_timeout_s": 0.05, "prefetch_timeout_s_per_1k_tokens": 0.0}, 3),
        ({"prefetch": "timeout", "prefetch_timeout_s": 1.0}, 8),
        ({"prefetch": "timeout", "prefetch_timeout_s": 0.0, "prefetch_timeout_s_per_1k_tokens": 0.8}, 6),
        ({"min_prefetch_tokens": 129}, 0),
    ],
)
def test_prefetch_rules_decide_how_long_a_request_waits(rules: dict[str, Any], num_found: int) -> None:
    levels = [tier(num_blocks=16, write="write_through"), tier("disk")]
    requests = [asked("first", 0.0, [("chat", 8 * BLOCK)])]
    requests += [asked(f"o{index}", 1.0 + index, [(index, 18 * BLOCK)]) for index in range(2)]
    requests += [asked("again", 5.0, [("chat", 8 * BLOCK), ("more", BLOCK)])]
    watch = served(requests, {"levels": levels, **rules})
    assert watch.hits["again"] == num_found * BLOCK
    assert watch.by_tier.get("again", Counter())["disk"] == num_found * BLOCK
    if rules.get("prefetch") == "timeout":
        assert watch.admitted_at["again"] >= 5.0


def test_a_busy_replica_lets_a_late_prompt_use_what_came_meanwhile() -> None:
    """With best_effort the prefetch has as long as the request waits in line for the present step to end."""
    levels = [tier(num_blocks=16, write="write_through"), tier("disk", bandwidth_gb_s=10.0)]
    requests = [asked("first", 0.0, [("chat", 8 * BLOCK)])]
    requests += [asked(f"o{index}", 1.0 + index, [(index, 18 * BLOCK)]) for index in range(2)]
    requests += [
        asked("busy", 4.99, [("busy", BLOCK)], num_output=20),
        asked("again", 5.0, [("chat", 8 * BLOCK), ("more", BLOCK)]),
    ]
    assert served(requests, {"levels": levels, "prefetch": "best_effort"}).hits["again"] > 0


@pytest.mark.parametrize("prefetch_from", ["arrival", "admission"])
@pytest.mark.parametrize(("least", "num_found"), [(4, 8), (5, 4)])
def test_a_prefetch_brings_what_lies_beyond_the_first_tier(prefetch_from: str, least: int, num_found: int) -> None:
    """The first tier holds half of a prompt, the second one the other half: that alone is compared with the threshold."""
    levels = [tier(num_blocks=16, write="write_through"), tier("disk")]
    rules = {"prefetch_from": prefetch_from, "min_prefetch_tokens": least * BLOCK}
    requests = [
        asked("first", 0.0, [("chat", 8 * BLOCK)]),
        asked("other", 1.0, [("other", 12 * BLOCK)]),
        asked("again", 5.0, [("chat", 8 * BLOCK), ("more", BLOCK)]),
    ]
    watch = served(requests, {"levels": levels, **rules}, num_blocks=13)
    assert watch.by_tier["again"] == {"host": 4 * BLOCK, "disk": (num_found - 4) * BLOCK}


def test_what_is_less_than_the_threshold_is_computed() -> None:
    assert served(chat(), {"levels": [tier()], "min_load_tokens": 1000}).hits["again"] < 8 * BLOCK


def test_selective_writing_keeps_what_came_twice() -> None:
    def requests(times: int) -> list[RequestSpec]:
        again = [asked(f"a{index}", index * 0.3, [("chat", 8 * BLOCK), (index, BLOCK)]) for index in range(times)]
        return [
            *again,
            asked("other", 2.0, [("other", 19 * BLOCK)]),
            asked("again", 4.0, [("chat", 8 * BLOCK), ("z", BLOCK)]),
        ]

    levels = [tier(write="write_through_selective")]
    assert served(requests(1), levels).by_tier.get("again", Counter())["host"] == 0
    assert served(requests(2), levels).by_tier["again"]["host"] > 0


def test_replicas_find_in_a_shared_store_what_others_computed() -> None:
    first = [("chat", 8 * BLOCK)]
    requests = [asked("first", 0.0, first), asked("second", 3.0, [*first, ("more", BLOCK)])]
    for shared, hit in ((True, 8 * BLOCK), (False, 0)):
        levels = [tier("store", write="write_through", shared=shared)]
        watch = served(requests, levels, num_replicas=2, scheduling={"replicaset_scheduler": "round_robin"})
        assert watch.hits["second"] == hit


def test_replicas_share_the_bandwidth_of_a_store() -> None:
    levels = [tier("store", write="write_through", shared=True, shared_bandwidth_gb_s=1.0)]
    first = [asked(f"f{index}", index * 1.0, [("chat", 8 * BLOCK)]) for index in range(1)]
    both = [asked(f"b{index}", 3.0, [("chat", 8 * BLOCK), (index, BLOCK)]) for index in range(1, 3)]
    scheduling = {"replicaset_scheduler": "round_robin"}
    watch = served([*first, *both], levels, num_replicas=3, scheduling=scheduling)
    loads = [one for one in watch.transfers if one[0] == ("store", "device")]
    assert [one[3] - one[2] for one in loads] == [pytest.approx(2 * 8 * BLOCK_S)] * 2


@pytest.mark.parametrize(
    ("scheduler", "router", "rules"),
    [
        ("fixed_chunk", "pull", {}),
        ("vllm_v1", "round_robin", {}),
        ("preemptive", "pull", {}),
        ("vllm_v1", "round_robin", {"loads": "reserved"}),
        ("preemptive", "pull", {"loads": "reserved", "load_order": "urgency"}),
    ],
)
def test_short_memory_neither_locks_up_nor_depends_on_how_time_passes(
    scheduler: str, router: str, rules: dict[str, Any]
) -> None:
    """Prompts that share prefixes, more than fit, through a slow link: all end, and steps worked out at once change nothing."""
    requests = [
        asked(
            f"r{index}",
            0.07 * index,
            [(index % 5, (4 + index % 5) * BLOCK), (("own", index), 40)],
            num_output=20 + index % 30,
        )
        for index in range(40)
    ]
    levels = [
        tier(num_blocks=40, bandwidth_gb_s=0.7, exclusive=True),
        tier("disk", 200, bandwidth_gb_s=0.3, shared=True),
    ]
    known = []
    for fast_forward in (True, False):
        scheduling = {"replica_scheduler": scheduler, "replicaset_scheduler": router}
        memory = {"reservation": "incremental"}
        controller, simulator, watch = built({"levels": levels, **rules}, 24, scheduling, num_replicas=2, memory=memory)
        if not fast_forward:
            for one in simulator._driver.replicas_of("default"):
                one.runs = None
        simulator.run(requests)
        controller.check_conservation()
        assert len(watch.reasons) == 40
        assert set(watch.reasons.values()) <= {EndReason.STOP, EndReason.LENGTH}
        assert any(watch.by_tier.values())
        known.append((watch.admitted_at, watch.hits, watch.by_tier, watch.transfers, simulator.now))
    assert known[0] == known[1]


@pytest.mark.parametrize("loads", ["in_turn", "reserved"])
def test_reserved_loads_leave_prompts_under_way_their_blocks(loads: str) -> None:
    """One prompt loads 8 of its 13 blocks, of 20; another whose load takes 8 waits until the first has what it lacks."""
    levels = [tier(write="write_through")]
    requests = [asked(name, at, [(name, 8 * BLOCK)]) for at, name in enumerate(("one", "two"))]
    requests.append(asked("between", 2.0, [("between", 18 * BLOCK)]))
    requests.append(asked("first", 5.0, [("one", 8 * BLOCK), ("more", 5 * BLOCK)], num_output=1))
    requests.append(asked("second", 5.0, [("two", 8 * BLOCK), ("less", BLOCK)], num_output=1))
    scheduler = {"policy": "vllm_v1", "params": {"long_prefill_threshold_tokens": 4 * BLOCK}}
    memory = {"reservation": "incremental"}
    rules = {"levels": levels, "loads": loads}
    watch = served(requests, rules, scheduling={"replica_scheduler": scheduler}, memory=memory)
    begins = [one[2] for one in watch.transfers if one[0] == ("host", "device")]
    assert len(begins) == 2
    assert begins[0] == 5.0
    assert (begins[1] == 5.0) == (loads == "in_turn")


def test_an_order_of_loads_needs_reserved_loads() -> None:
    with pytest.raises(ConfigError, match=r"load_order applies only to loads: reserved \(got in_turn\)"):
        built({"levels": [tier()], "load_order": "urgency"})


# Loads that depend on size


def alone(prompts: Sequence[Sequence[tuple[Hashable, int]]]) -> list[RequestSpec]:
    """Each prompt long after the one before has ended."""
    return [asked(f"r{index}", 2.0 * index, content, num_output=1) for index, content in enumerate(prompts)]


def zipf_prompts(count: int) -> list[list[tuple[Hashable, int]]]:
    """Prompts of four blocks and a bit, some far more often than others, as a small generator of numbers gives them."""
    state, prompts = 7, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        prompts.append([(("p", int(12 * (state / 2**31) ** 2)), 4 * BLOCK), (("own", state), 1)])
    return prompts  # type: ignore[return-value]


@pytest.mark.parametrize("num_host", [4, 12, 20, 32])
def test_device_and_exclusive_host_find_what_one_cache_of_both_sizes_finds(num_host: int) -> None:
    """LRU in both, write-back, one request at a time: the host is the lower part of one LRU stack."""
    requests = alone(zipf_prompts(60))
    together = served(requests, None, num_blocks=9 + num_host)
    apart = served(requests, [tier(num_blocks=num_host, exclusive=True)], num_blocks=9)
    assert apart.hits == together.hits
    assert sum(together.hits.values()) > 0


def test_with_room_below_every_prefix_comes_back() -> None:
    prompts = zipf_prompts(40)
    for write in ("write_back", "write_through"):
        watch = served(alone(prompts), [tier(num_blocks=10_000, write=write)], num_blocks=9)
        seen: set[Hashable] = set()
        for index, prompt in enumerate(prompts):
            assert watch.hits[f"r{index}"] == (4 * BLOCK if prompt[0] in seen else 0)
            seen.add(prompt[0])


def test_a_larger_host_never_finds_less_under_lru() -> None:
    requests = alone(zipf_prompts(60))
    found = [
        sum(served(requests, [tier(num_blocks=size, exclusive=True)], num_blocks=9).hits.values())
        for size in (1, 8, 16, 40)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


# Early ends, and losses


def test_a_request_that_is_called_off_while_it_loads_gives_its_content_back() -> None:
    levels = [tier(bandwidth_gb_s=0.01, exclusive=True)]
    requests = [*chat(100.0), asked("later", 140.0, [("chat", 8 * BLOCK), ("more", BLOCK)])]
    controller, simulator, watch = built(levels)
    simulator.abort_at(101.0, "again")
    simulator.run(requests)
    controller.check_conservation()
    assert watch.reasons["again"] is EndReason.ABORTED
    assert watch.hits["later"] == 8 * BLOCK
    assert next(one[1] for one in watch.transfers if one[0] == ("host", "device")) == 0


def test_nothing_is_found_of_a_load_that_was_called_off_even_in_blocks_of_one_token() -> None:
    tiers = {
        "levels": [tier(write="write_through", bandwidth_gb_s=0.01)],
        "kv_bytes_per_token": BLOCK * BYTES_PER_TOKEN,
    }
    again = [("chat", 8), ("more", 1)]
    requests = [
        asked("first", 0.0, [("chat", 8)]),
        asked("other", 1.0, [("other", 19)]),
        asked("again", 100.0, again),
        asked("later", 140.0, again),
    ]
    controller, simulator, watch = built(tiers, memory={"block_size": 1})
    simulator.abort_at(100.01, "again")
    simulator.run(requests)
    controller.check_conservation()
    assert watch.reasons["again"] is EndReason.ABORTED
    assert watch.by_tier["later"]["host"] == 8


def test_a_lost_replica_loses_its_own_tiers_and_not_the_shared_one() -> None:
    for shared, hit in ((True, 8 * BLOCK), (False, 0)):
        controller, simulator, watch = built([tier("store", write="write_through", shared=shared)])
        failure = Failure(to_ticks(2.0), "default", 0, "test", max_reruns=1)
        simulator.inject(failure.tick, Phase.FAILURE, failure)
        simulator.inject(to_ticks(2.5), Phase.FAILURE, Restart(to_ticks(2.5), "default", 0))
        simulator.run(
            [asked("first", 0.0, [("chat", 8 * BLOCK)]), asked("again", 3.0, [("chat", 8 * BLOCK), ("x", 1)])]
        )
        controller.check_conservation()
        assert watch.hits["again"] == hit


def test_a_replica_lost_while_requests_load_serves_them_again() -> None:
    levels = [tier(bandwidth_gb_s=0.02), tier("store", bandwidth_gb_s=0.02, shared=True, write="write_through")]
    controller, simulator, watch = built(levels, num_replicas=2)
    failure = Failure(to_ticks(30.5), "default", 0, "test", max_reruns=3)
    simulator.inject(failure.tick, Phase.FAILURE, failure)
    requests = [
        asked(f"r{index}", index * 1.0, [(index % 4, 9 * BLOCK), (("own", index), 20)], 30) for index in range(40)
    ]
    simulator.run(requests)
    controller.check_conservation()
    assert len(watch.reasons) == 40
    assert EndReason.FAILED not in watch.reasons.values()


# What policies read, and their notifications


class Follows:
    """A router that keeps an index of what each tier holds, and notes what views say."""

    traits = SchedulerTraits()

    def __init__(self) -> None:
        self.index: dict[str, set[Hashable]] = {}
        self.stored_at: list[tuple[str, float]] = []
        self.seen: list[tuple[str, Mapping[str, int]]] = []
        self.indexed: list[tuple[str, int]] = []

    def on_tier_blocks_stored(self, replica_id: int, tier: str, hashes: Sequence[Hashable], now: float) -> None:
        self.index.setdefault(tier, set()).update(hashes)
        self.stored_at.append((tier, now))

    def on_tier_blocks_removed(self, replica_id: int, tier: str, hashes: Sequence[Hashable], now: float) -> None:
        self.index[tier].difference_update(hashes)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
        self.seen.append((request.request_id, replicas[0].tier_hit_tokens(request)))
        held = self.index.get("host", set())
        self.indexed.append((request.request_id, sum(one in held for one in request.block_hashes())))
        return 0

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Sequence[str]:
        return ()


def following(made: list[Follows]) -> PolicySpec:
    def build(config: PolicyConfig, context: Any) -> Follows:
        made.append(Follows())
        return made[-1]

    return PolicySpec(
        layer=Layer.REPLICASET_SCHEDULER,
        name="follows",
        config=PolicyConfig,
        build=build,
        summary="For this test.",
        source="test",
    )


def test_a_router_sees_and_hears_what_each_tier_holds() -> None:
    made: list[Follows] = []
    spec = following(made)
    memory = {"num_blocks": 20, "tiers": {"levels": [tier()], "kv_bytes_per_token": BYTES_PER_TOKEN}}
    replica = {"max_batch_size": 4, "max_model_len": 400, "memory": memory}
    controller, simulator = simulated_system(spec, {"replicaset_scheduler": "follows"}, {"replica": replica})
    watch = Watch()
    controller.watch([watch])
    simulator.run(chat())
    (router,) = [one for one in made if one.seen]
    name, hits = router.seen[-1]
    assert name == "again"
    assert hits["device"] + hits["host"] == watch.hits["again"]
    assert hits["host"] == watch.by_tier["again"]["host"]
    assert router.indexed[-1][1] * BLOCK >= hits["host"]
    assert router.seen[0][1] == {"device": 0, "host": 0}


def test_nothing_of_a_prefetch_is_heard_that_is_lost_on_its_way() -> None:
    """Of 8 blocks that take 1.28 s each none has arrived after a second."""
    made: list[Follows] = []
    levels = [tier(num_blocks=16, write="write_through"), tier("disk", bandwidth_gb_s=0.0125)]
    requests = [asked("first", 0.0, [("chat", 8 * BLOCK)]), asked("other", 1.0, [("other", 17 * BLOCK)])]
    requests += [asked("again", 100.0, [("chat", 8 * BLOCK), ("more", BLOCK)]), asked("last", 200.0, [("last", BLOCK)])]
    scheduling = {"replicaset_scheduler": "follows"}
    _, simulator, watch = built(levels, scheduling=scheduling, spec=following(made))
    simulator.inject(to_ticks(101.0), Phase.FAILURE, CacheReset(to_ticks(101.0), "default", 0))
    simulator.run(requests)
    (router,) = [one for one in made if one.seen]
    assert ("disk", "host") in [one[0] for one in watch.transfers]
    assert [one for one in router.stored_at if 100.0 < one[1] <= 101.0] == []


def test_without_tiers_views_name_none() -> None:
    controller, simulator, _ = built(None)
    simulator.run(chat())
    (load,) = controller.replicasets["default"].live_loads()
    assert load.tier_hit_tokens(chat()[0]) == {}  # type: ignore[arg-type]


# Invalid combinations


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([{"name": "host", "num_blocks": 10}], "bandwidth_gb_s"),
        ([tier(num_blocks=0)], "num_blocks"),
        ([tier(bandwidth_gb_s=0.0)], "bandwidth_gb_s"),
        ([tier(latency_s=-1.0)], "latency_s"),
        ([], "levels"),
        ([tier(retention="lruu")], "no installed package offers a retention policy of that name"),
        ([tier(retention={"policy": "slru", "params": {"x": 1}})], "x"),
        ([tier(retention="session_pin")], "pins content, which a tier does not"),
        ([tier(retention="ttl")], "ttl"),
        ([tier(write="through")], "write_through"),
        ([tier(write="write_through", exclusive=True)], "exclusive cannot be combined with write_through"),
        ([tier(shared=True, exclusive=True)], "a shared tier cannot be exclusive"),
        ([tier(shared=True), tier("disk")], "only the last tier may be shared"),
        ([tier(), tier()], "two tiers have one name"),
        ([tier("device")], "device"),
        ([tier(shared_bandwidth_gb_s=3.0)], "shared_bandwidth_gb_s applies only to a shared tier"),
        ({"levels": [tier()], "prefetch": "best_effort", "prefetch_from": "admission"}, "best_effort"),
        ({"levels": [tier()], "preset": "lmcache"}, "preset"),
        ({"levels": [tier()], "kv_bytes_per_token": None}, "kv_bytes_per_token"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(tiers: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        built(tiers)


def test_tiers_of_pools_have_blocks_of_one_size() -> None:
    pools = {
        name: {"num_replicas": 1, "replica": {"memory": {"block_size": size}}} for name, size in (("a", 16), ("b", 32))
    }
    with pytest.raises(ConfigError, match="are of pools whose blocks differ in size"):
        built([tier()], pools=pools)


def test_a_tiers_policy_that_breaks_the_contract_ends_the_run_by_name() -> None:
    class Broken(Unused):
        def on_stored(self, blocks: Any, now: float) -> None:
            raise ZeroDivisionError("no")

    spec = RetentionSpec("broken", PolicyConfig, lambda config, context: Broken(), "For this test.")
    with pytest.raises(PolicyError, match=r"broken of tier host.*ZeroDivisionError: no"):
        served(chat(), [tier(retention="broken")], spec=spec)


def test_tiers_want_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="need a prefix cache that keeps freed blocks"):
        built([tier()], memory={"prefix_cache": {"enabled": False}})


@pytest.mark.parametrize("preset", ["vllm_offloading", "sglang_hicache"])
def test_presets_fill_what_is_left_out(preset: str) -> None:
    config = TiersConfig.model_validate(
        {"preset": preset, "levels": [tier(), tier("disk", write="write_back")], "min_load_tokens": 3}
    )
    assert [one.write for one in config.levels] == ["write_through", "write_back"]
    assert config.min_load_tokens == 3
    assert config.prefetch == ("timeout" if preset == "sglang_hicache" else "wait_complete")
    assert config.loads == ("reserved" if preset == "vllm_offloading" else "in_turn")
    for one in (config, TiersConfig.model_validate({"preset": preset, "levels": [tier()], "loads": "in_turn"})):
        assert TiersConfig.model_validate(one.model_dump(mode="json")) == one


def test_offloading_of_prompts_leaves_generated_tokens_out() -> None:
    requests = [asked("first", 0.0, [("chat", 4 * BLOCK)], num_output=4 * BLOCK)]
    requests += [asked("other", 4.0, [("other", 19 * BLOCK)])]
    requests += [asked("again", 8.0, [("chat", 4 * BLOCK), (("out", "first"), 4 * BLOCK), ("more", BLOCK)])]
    for prompts_only, num_found in ((False, 7), (True, 4)):
        watch = served(requests, {"levels": [tier(write="write_through")], "prompts_only": prompts_only})
        assert watch.hits["again"] == num_found * BLOCK


def test_a_run_without_tiers_says_nothing_of_them() -> None:
    assert "tiers" not in MemoryConfig().model_dump()


TIERED = {
    "version": 1,
    "name": "tiered",
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": "fixed_chunk",
    },
    "num_replicas": 2,
    "replica": {
        "max_batch_tokens": 4096,
        "max_model_len": 12000,
        "memory": {
            "num_blocks": 760,
            "tiers": {
                "levels": [
                    {"name": "host", "num_blocks": 1500, "bandwidth_gb_s": 25.0, "retention": "slru"},
                    {"name": "store", "num_blocks": 9000, "bandwidth_gb_s": 5.0, "shared": True},
                ]
            },
        },
    },
    "workload": {"type": "profile", "profile": "mooncake_conversation_sessions", "num_requests": 40, "rate": 4.0},
    "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}},
}


def test_results_say_where_prompts_were_found_and_are_the_same_again(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "again")]
    runs = [api.run(api.load(TIERED), folder=folder) for folder in folders]
    for name in ("requests.parquet", "decisions.parquet", "summary.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    table = runs[0].requests()
    hits = {name: table.column(f"hit_tokens_{name}").to_numpy() for name in ("device", "host", "store")}
    assert (sum(hits.values()) == table.column("num_cached_tokens").to_numpy()).all()
    section = json.loads((folders[0] / "summary.json").read_text())["tiers"]
    assert section["hit_tokens"] == {name: int(count.sum()) for name, count in hits.items()}
    assert section["hit_tokens"]["store"] > 0
    links = {(one["source"], one["target"]): one for one in section["links"]}
    assert links.keys() == {("device", "host"), ("host", "device"), ("host", "store"), ("store", "host")}
    loaded = section["hit_tokens"]["host"] + section["hit_tokens"]["store"]
    assert links["host", "device"]["num_blocks"] * 16 >= loaded
    assert all(0 < one["utilisation"] < 1 for one in section["links"])
    assert section["load_s"]["count"] == ((hits["host"] + hits["store"]) > 0).sum()


def test_the_engine_and_vllm_refuse_tiers_by_name() -> None:
    replica = config_from_mapping(TIERED).replica
    problems = [str(one) for one in check_tiers("replica", replica)]
    assert problems[0].startswith("replica.memory.tiers.levels: the engine has one tier")
    assert "host, store" in problems[0]
    (problem,) = problems_of("replica", replica)
    assert str(problem).startswith("replica.memory.tiers: cached content stays on the device")


@pytest.mark.parametrize(
    "changes",
    [
        {
            "pools": {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}},
            "hand_off": {"kv_bytes_per_token": 1000},
        },
        {"scheduling": {"retention": "session_pin"}},
    ],
    ids=["pools", "pins"],
)
def test_tiers_go_with_pools_and_with_pins(changes: dict[str, Any]) -> None:
    requests = [
        asked(f"r{index}", 0.07 * index, [(index % 5, (4 + index % 5) * BLOCK), (("own", index), 40)], 20 + index % 30)
        for index in range(30)
    ]
    levels = [tier(num_blocks=40, bandwidth_gb_s=0.7), tier("disk", 200, bandwidth_gb_s=0.3, shared=True)]
    watch = served(requests, levels, num_blocks=30, **changes)
    assert len(watch.reasons) == 30
    assert sum(sum(found.values()) for found in watch.by_tier.values()) > 0


def test_a_reset_of_the_cache_empties_every_tier_and_loads_begin_anew() -> None:
    levels = [tier(bandwidth_gb_s=0.01), tier("store", shared=True, write="write_through")]
    controller, simulator, watch = built(levels)
    simulator.inject(to_ticks(101.0), Phase.FAILURE, CacheReset(to_ticks(101.0), "default", 0))
    simulator.run(chat(100.0))
    controller.check_conservation()
    assert watch.reasons["again"] is EndReason.STOP
    assert watch.hits["again"] == 0
    (replica,) = controller.replicas()
    assert replica.memory.tiers is not None
    assert len(replica.memory.tiers.stores[1]) == 0
