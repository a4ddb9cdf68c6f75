"""Memory tiers in whole runs: times of loads, prefetch rules, what comes back from where, and what users read of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from vajra_py.contract import KeyMotion, PolicyConfig, RequestView, RetentionSpec
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import ConfigError
from vajra_py.runtime.serving.controller import Controller
from vajra_py.testing.simulated import STEP_S, simulated_system
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

    def on_tier_hit(self, request: RequestView, replica_id: int, num_tokens: Mapping[str, int], load_s: float, now: float) -> None:
        self.by_tier.setdefault(request.request_id, Counter()).update(num_tokens)
        self.loaded_at[request.request_id] = now

    def on_tier_transfer(
        self,
        replicaset: str,
        replica_id: int,
        ends: tuple[str, str],
        num_blocks: int,
        num_bytes: int,
        started_at: float,
        now: float,
    ) -> None:
        assert num_bytes == num_blocks * BLOCK * BYTES_PER_TOKEN
        self.transfers.append((ends, num_blocks, started_at, now))


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
    controller, simulator = simulated_system(UNUSED, scheduling or {}, {"replica": replica, **changes})
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
    requests += [asked("busy", 4.99, [("busy", BLOCK)], num_output=20), asked("again", 5.0, [("chat", 8 * BLOCK), ("more", BLOCK)])]
    assert served(requests, {"levels": levels, "prefetch": "best_effort"}).hits["again"] > 0


def test_what_is_less_than_the_threshold_is_computed() -> None:
    assert served(chat(), {"levels": [tier()], "min_load_tokens": 1000}).hits["again"] < 8 * BLOCK


def test_selective_writing_keeps_what_came_twice() -> None:
    def requests(times: int) -> list[RequestSpec]:
        again = [asked(f"a{index}", index * 0.3, [("chat", 8 * BLOCK), (index, BLOCK)]) for index in range(times)]
        return [*again, asked("other", 2.0, [("other", 19 * BLOCK)]), asked("again", 4.0, [("chat", 8 * BLOCK), ("z", BLOCK)])]

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
    ("scheduler", "router"), [("fixed_chunk", "pull"), ("vllm_v1", "round_robin"), ("preemptive", "pull")]
)
def test_short_memory_neither_locks_up_nor_depends_on_how_time_passes(scheduler: str, router: str) -> None:
    """Prompts that share prefixes, more than fit, through a slow link: all end, and steps worked out at once change nothing."""
    requests = [
        asked(f"r{index}", 0.07 * index, [(index % 5, (4 + index % 5) * BLOCK), (("own", index), 40)], num_output=20 + index % 30)
        for index in range(40)
    ]
    levels = [tier(num_blocks=40, bandwidth_gb_s=0.7, exclusive=True), tier("disk", 200, bandwidth_gb_s=0.3, shared=True)]
    known = []
    for fast_forward in (True, False):
        scheduling = {"replica_scheduler": scheduler, "replicaset_scheduler": router}
        memory = {"reservation": "incremental"}
        controller, simulator, watch = built({"levels": levels}, 24, scheduling, num_replicas=2, memory=memory)
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
