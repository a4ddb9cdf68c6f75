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

    def on_tier_hit(self, request: RequestView, replica_id: int, num_tokens: Mapping[str, int], now: float) -> None:
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
    assert up == [(("host", "device"), from_host // BLOCK, 3.0, pytest.approx(3.0 + 0.5 + from_host // BLOCK * BLOCK_S))]
    assert watch.admitted_at["again"] == pytest.approx(3.0 + 0.5 + from_host // BLOCK * BLOCK_S)
