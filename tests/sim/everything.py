"""Random worlds in which everything happens at once, each drawn from one seed.

Pools that split prompts and decodes or do not, moves of waiting and running requests, an admission policy that defers, degrades and
refuses, a scaler, wake-ups of each of them, lost and restored replicas, expiries and aborts. The policies decide by hashes of what they
see, so that a run may be repeated and worked out with and without fast-forward.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.sim.split_pools import Ways, inject_faults, nothing_is_left, prepared, settings
from vajra_py.config import PolicyChoice
from vajra_py.contract import (
    ACCEPT,
    Accept,
    AdmissionDecision,
    AdmissionSpec,
    Defer,
    Layer,
    Move,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    PoolView,
    QueueView,
    Refuse,
    ReplicaId,
    ReplicaLoadView,
    ReplicasetView,
    RequestView,
    ScalerSpec,
)
from vajra_py.errors import VajraError
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.input_log import PolicyChange
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.workload import PromptContent, RequestSpec

LAST_WAKE_S = 4.0
"""Policies do not ask to be woken after this time."""
_WAITING = {RequestState.WAITING, RequestState.PREEMPTED}


class Chance:
    """Numbers that depend on a seed and on what they are asked about, not on what was asked before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, below: int, *about: object) -> int:
        """A number from 0 to below it."""
        return zlib.crc32(repr((self._seed, *about)).encode()) % below


class Restless:
    """A replicaset scheduler that chooses, pulls and moves by chance, at arrivals and when it is woken."""

    def __init__(self, context: PolicyContext, chance: Chance) -> None:
        self._chance, self._wake = chance, context.wake
        self._alive: dict[str, RequestView] = {}
        context.wake.at(0.05)

    def on_wake(self, key: str, now: float) -> None:
        """Come back."""
        if now < LAST_WAKE_S:
            self._wake.at(now + 0.01 * (1 + self._chance(12, "wake", round(now, 6))))

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Remember them."""
        self._alive.update({one.request_id: one for one in requests})

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget them."""
        for one in requests:
            self._alive.pop(one.request_id, None)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Some replica, or none for now."""
        return self._choose([one for one in replicas if one.is_up], request, now)

    def _choose(self, up: Sequence[ReplicaLoadView], request: RequestView, now: float) -> ReplicaId | None:
        may_wait = now < LAST_WAKE_S - 0.5
        choice = self._chance(len(up) + may_wait, "choose", request.request_id, round(now, 6)) if up or may_wait else 0
        return up[choice].replica_id if choice < len(up) else None

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Requests that wait, for replicas that compute prompts."""
        return () if replica.role == "decode" else (one.request_id for one in queued)

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """Some of the requests that may move."""
        for request_id, request in sorted(self._alive.items()):
            if not isinstance(request, Request) or self._chance(3, "moves", request_id, round(now, 6)):
                continue
            is_running = request.state is RequestState.RUNNING
            if not is_running and request.state not in _WAITING:
                continue
            avoided = "prefill" if is_running else "decode"
            targets: list[int | None] = [
                one.replica_id
                for one in replicas
                if one.is_up and one.role != avoided and one.replica_id != request.replica_id and _fits(request, one)
            ]
            again = (one for one in replicas if one.role != "decode")
            if not is_running and any(request.num_known_tokens <= _num_tokens(one) for one in again):
                targets.append(None)
            if targets:
                yield Move(request, targets[self._chance(len(targets), "target", request_id, round(now, 6))])


class RestlessPlacing(Restless):
    """One that sees all pools, and also decides where requests go when their prompt is computed."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Some replica that computes prompts, or none for now."""
        return self._choose([one for one in replicas if one.is_up and one.role != "decode"], request, now)

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Some replica that decodes, or none for now."""
        return self._choose(replicas, request, now)


def _fits(request: Request, replica: ReplicaLoadView) -> bool:
    return request.num_prompt_tokens + request.max_tokens <= _num_tokens(replica)


def _num_tokens(replica: ReplicaLoadView) -> int:
    return replica.num_blocks * replica.limits.block_size


class Moody:
    """An admission policy that decides by chance, and looks at what it has deferred when it is woken."""

    def __init__(self, context: PolicyContext, chance: Chance) -> None:
        self._chance, self._wake = chance, context.wake
        self._asked: dict[str, int] = {}

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Accept most, and defer nobody for ever."""
        times = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        choice = self._chance(12, "admit", request.request_id, times)
        if times < 4 and choice < 2:
            return Defer(now + 0.02 + 0.01 * choice)
        if times < 4 and choice == 2:
            self._wake.at(now + 0.05, request.request_id)
            return Defer()
        if choice == 3:
            return Refuse("not today", 1.0)
        return Accept(max_tokens=2) if choice == 4 else ACCEPT


class Scaler:
    """Asks for other numbers of replicas again and again; in the end for all of them."""

    def __init__(self, context: PolicyContext, chance: Chance, most: Mapping[str, int]) -> None:
        self._chance, self._wake, self._most = chance, context.wake, most
        context.wake.at(0.1)

    def on_wake(self, key: str, now: float) -> None:
        """Come back."""
        if now < LAST_WAKE_S:
            self._wake.at(now + 0.15)

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """At least one of each."""
        moment = round(now * 5)
        return {
            one.name: self._most[one.name]
            if now >= LAST_WAKE_S
            else 1 + self._chance(self._most[one.name], "targets", one.name, moment)
            for one in pools
        }


@dataclass(frozen=True)
class World:
    """Settings, requests and accidents of one run."""

    seed: int
    mapping: Mapping[str, Any]
    requests: Sequence[RequestSpec]
    accidents: Sequence[tuple[str, float, int]]
    places: bool
    most: Mapping[str, int]
    swaps: Sequence[tuple[float, PolicyChange]] = ()
    """Replacements of policies, each with its time in seconds."""

    @property
    def num_replicas(self) -> int:
        """Replicas in all."""
        return sum(self.most.values())

    def registry(self) -> Registry:
        """The registry with new policies of this world."""
        chance = Chance(self.seed)
        router = RestlessPlacing if self.places else Restless
        return load_registry().with_policies(
            [
                PolicySpec(
                    "restless",
                    Layer.REPLICASET_SCHEDULER,
                    PolicyConfig,
                    lambda config, context: router(context, chance),
                    "Decides by chance.",
                ),
                AdmissionSpec("moody", PolicyConfig, lambda config, context: Moody(context, chance), "By chance."),
                ScalerSpec(
                    "fickle", PolicyConfig, lambda config, context: Scaler(context, chance, self.most), "By chance."
                ),
            ]
        )


def drawn_world(
    seed: int,
    num_requests: int = 40,
    *,
    overlaps: bool = False,
    agents: bool = False,
    policies: bool = False,
    swaps: bool = False,
) -> World:
    """The world of a seed. `overlaps`: KV is sent while its prompt is computed, and prompts are computed in chunks. `agents`: requests
    are calls of programs, some with adapters, whose content outlives them by retention policies, pins and tiers; decodes have drafts.
    `policies`: any built-in prioritizer and replica scheduler. `swaps`: policies are replaced during the run, and most pools that
    scale drain by migration.
    """
    draw = random.Random(seed)
    elastic = draw.random() < 0.5
    names = draw.choice([("prefill", "decode"), ("prefill", "decode", "mixed"), ("mixed",)])
    most = {name: draw.randint(1, 3) for name in names}
    pools: dict[str, Any] = {}
    for name in names:
        blocks = draw.choice([24, 40, 200])
        pools[name] = {
            "num_replicas": most[name],
            "replica": {"memory": {"num_blocks": blocks, "watermark_fraction": 0.0}},
        }
        if elastic:
            pools[name]["elastic"] = {
                "min_replicas": 1,
                "max_replicas": most[name],
                "startup_s": draw.choice([0.0, 0.1]),
            }
    scheduling = {
        "request_prioritizer": draw.choice(["fcfs", "priority"]),
        "replicaset_scheduler": "restless",
        "replica_scheduler": draw.choice(["vllm_v1", "fixed_chunk", "nano_vllm"]),
        "admission": "moody",
        **({"scaling": "fickle"} if elastic else {}),
    }
    mapping = settings(
        scheduling=scheduling,
        pools=pools,
        replica={"max_batch_size": draw.choice([2, 8]), "max_batch_tokens": 512, "memory": {"num_blocks": 100}},
        hand_off={
            "kv_bytes_per_token": 1_000_000,
            "reserve": draw.choice(["before_prompt", "after_prompt", "at_admission"]),
            "reservations": draw.choice(["all_that_fit", "one_at_a_time"]),
            "when_full": draw.choice(["wait", "hold", "drop"]),
            "first_token": draw.choice(["source", "recompute"]),
            "takes_effect": draw.choice(["at_once", "at_step_boundary"]),
            "moves": draw.choice(["missing", "whole_prompt"]),
        },
        links={
            "bandwidth_gb_s": draw.choice([None, 0.5, 5.0]),
            "latency_s": draw.choice([0.0, 0.004]),
            "contention": draw.choice(["max_min", "none", "fixed_share", "exclusive"]),
        },
    )
    if overlaps:
        more = random.Random(f"overlap {seed}")
        mapping["hand_off"] |= {
            "reserve": "before_prompt",
            "overlap": more.choice(["by_chunk", "by_layer"]),
            "overlap_min_tokens": more.choice([0, 0, 60]),
            "num_layers": more.choice([1, 3, 32]),
        }
        mapping["replica"]["max_batch_tokens"] = more.choice([64, 512])
        mapping["replica"]["memory"]["reservation"] = more.choice(["prompt", "incremental"])
    if agents:
        _remember(mapping, random.Random(f"memory {seed}"))
    if policies:
        _choose_policies(mapping, random.Random(f"policies {seed}"))
    requests: list[RequestSpec] = []
    at = 0.0
    for index in range(num_requests):
        at += draw.expovariate(num_requests / 2.0)
        prompt = draw.randint(1, 200)
        shared = draw.randint(0, prompt)
        parts = tuple(part for part in (("shared", shared), (f"own-{index}", prompt - shared)) if part[1])
        expires = draw.uniform(0.01, 0.8) if draw.random() < 0.15 else None
        facts = {"priority": draw.randint(0, 2), "expires_after_s": expires, "content": PromptContent(parts)}
        requests.append(RequestSpec(f"r{index}", at, prompt, draw.randint(1, 60), **facts))
    if agents:
        requests = _as_programs(requests, random.Random(f"programs {seed}"))
    accidents: list[tuple[str, float, int]] = []
    for _ in range(draw.randint(0, num_requests // 3)):
        kind = draw.choice(["abort", "fail", "restart"])
        number = draw.randrange(num_requests if kind == "abort" else sum(most.values()))
        accidents.append((kind, draw.uniform(0.0, 3.5), number))
    changes = _replace_policies(mapping, random.Random(f"swaps {seed}")) if swaps else ()
    return World(seed, mapping, requests, accidents, draw.random() < 0.5, most, changes)


ADAPTERS = ("", "", "french", "legal", "code")
"""Adapters of requests; half of them have none."""
MOST_TOKENS = 400
"""Most tokens of a prompt that continues others, which the smallest replica can hold with its output."""


def _remember(mapping: dict[str, Any], draw: random.Random) -> None:
    """Give replicas adapters, drafts, tiers and a retention policy, each in most worlds, and an order by programs or tenants."""
    replica, memory = mapping["replica"], mapping["replica"]["memory"]
    scheduling = mapping["scheduling"]
    scheduling["request_prioritizer"] = draw.choice(["fcfs", "priority", "plas", "vtc", "lpm", "continuum"])
    retention = draw.choice(["lfu", "slru", "arc", "ttl", "session_pin", "continuum_pins", None])
    if retention is not None:
        params = {"ttl": {"ttl_s": 0.3}, "session_pin": {"pin_s": draw.choice([0.05, 5.0])}}.get(retention, {})
        scheduling["retention"] = {"policy": retention, "params": params}
    models = [
        {"name": name, "num_blocks": 2, "load_s": draw.choice([0.0, 0.03])} for name in sorted({*ADAPTERS} - {""})
    ]
    replica["adapters"] = {"max_loras": draw.choice([1, 2]), "models": models}
    if draw.random() < 0.7:
        rules = {"rejected_blocks": draw.choice(["free", "keep"]), "past_max_tokens": draw.random() < 0.5}
        replica["draft"] = {"num_tokens": draw.randint(1, 4), **rules}
        mapping["backend"] = {"simulator": {**mapping["backend"]["simulator"], "drafts": {"rate": draw.random()}}}
    if draw.random() < 0.7:
        link = {"bandwidth_gb_s": draw.choice([0.5, 20.0]), "latency_s": draw.choice([0.0, 0.002])}
        write = draw.choice(["write_back", "write_through", "write_through_selective"])
        levels = [{"name": "host", "num_blocks": draw.choice([10, 60]), "write": write, **link}]
        if draw.random() < 0.5:
            levels.append({"name": "store", "num_blocks": 80, "shared": True, **link})
        prefetch = draw.choice(["wait_complete", "timeout", "best_effort"])
        memory["tiers"] = {
            "levels": levels,
            "prefetch": prefetch,
            "prefetch_from": "arrival" if prefetch == "best_effort" else draw.choice(["arrival", "admission"]),
            "loads": draw.choice(["in_turn", "reserved"]),
            "kv_bytes_per_token": 1_000_000,
        }


def _choose_policies(mapping: dict[str, Any], draw: random.Random) -> None:
    """Let any prioritizer and replica scheduler decide, and some replicas have swap space."""
    registry, scheduling = load_registry(), mapping["scheduling"]
    scheduling["replica_scheduler"] = scheduler = draw.choice(sorted(registry.policies(Layer.REPLICA_SCHEDULER)))
    prioritizers = ["lrs"] if scheduler == "space_sharing" else sorted(registry.policies(Layer.REQUEST_PRIORITIZER))
    scheduling["request_prioritizer"] = draw.choice(prioritizers)
    if draw.random() < 0.3:
        mapping["replica"]["memory"]["host_blocks"] = 50


REPLACEMENTS: Mapping[Layer, Sequence[str]] = {
    Layer.REQUEST_PRIORITIZER: ("fcfs", "priority", "srpt", "edf", "lrs", "lpm", "vtc"),
    Layer.REPLICASET_SCHEDULER: ("round_robin", "restless", "least_loaded", "pull", "power_of_two"),
    Layer.REPLICA_SCHEDULER: ("vllm_v1", "fixed_chunk", "nano_vllm", "space_sharing", "prefill_first", "orca"),
}


def _replace_policies(mapping: dict[str, Any], draw: random.Random) -> list[tuple[float, PolicyChange]]:
    """Let most pools that scale drain by migration, and draw replacements of policies."""
    for pool in mapping["pools"].values():
        if "elastic" in pool and draw.random() < 0.8:
            pool["elastic"]["drain"] = "migrate"
    mapping["migration"] = {"last_stage_max_blocks": draw.choice([0, 1, 16]), "max_per_replica": draw.choice([1, 3])}
    found = []
    for _ in range(draw.randint(1, 4)):
        layer = draw.choice(list(REPLACEMENTS))
        choice = PolicyChoice(policy=draw.choice(REPLACEMENTS[layer]))
        found.append((draw.uniform(0.0, 3.0), PolicyChange("default", layer, choice)))
    return found


def _as_programs(requests: Sequence[RequestSpec], draw: random.Random) -> list[RequestSpec]:
    """Make most requests calls of programs, with chains, forks and joins; a call's prompt continues that of a call before it."""
    programs: dict[str, list[RequestSpec]] = {}
    found = []
    for one in requests:
        facts: dict[str, Any] = {"adapter": draw.choice(ADAPTERS), "tenant": draw.choice("abc")}
        if draw.random() < 0.8:
            name = f"p{draw.randrange(6)}"
            before = programs.setdefault(name, [])
            parents = draw.sample(before, min(len(before), draw.choice([0, 1, 1, 1, 2])))
            facts |= {"program_id": name, "session_id": draw.choice([name, ""]), "is_last_call": draw.random() < 0.1}
            if parents:
                ids = tuple(parent.request_id for parent in parents)
                facts |= {"follows": ids[0] if len(ids) == 1 else ids, "think_time_s": draw.choice([0.0, 0.02, 0.2])}
                facts |= {"parent_calls": ids} | _continued(parents[0], one)
            before.append(one := replace(one, **facts))
        else:
            one = replace(one, **facts)
        found.append(one)
    return found


def _continued(parent: RequestSpec, call: RequestSpec) -> dict[str, Any]:
    """Prompt of a call that continues its parent's prompt and output, if it may be so long."""
    assert parent.content is not None
    assert call.content is not None
    segments = (*parent.content.segments, (("out", parent.request_id), parent.num_output_tokens))
    content = PromptContent((*segments, (f"more-{call.request_id}", call.num_prompt_tokens)))
    if content.num_tokens > MOST_TOKENS - call.num_output_tokens:
        return {}
    return {"content": content, "num_prompt_tokens": content.num_tokens}


def run_world(world: World, *, steps_alone: bool, check_every_steps: int = 1) -> tuple[Ways, int]:
    """Run to the end, and check that every request has ended and every block is free. Returns what happened, and the number of steps."""
    run, simulator, ways = prepared(world.mapping, wants_steps=steps_alone, registry=world.registry(), seed=world.seed)
    simulator._driver._every = check_every_steps
    inject_faults(simulator, world.accidents, world.num_replicas, LAST_WAKE_S - 0.2)
    swap = simulator.on_policy_change

    def swap_if_allowed(change: PolicyChange) -> None:
        try:
            swap(change)
        except VajraError as error:  # as on a server, the old policy stays
            ways.order.append(("refused", str(error), 0.0))

    simulator.on_policy_change = swap_if_allowed  # type: ignore[method-assign]
    for at, change in world.swaps:
        simulator.inject(to_ticks(at), Phase.POLICY, change)
    simulator.run(world.requests)
    nothing_is_left(run)
    controller = run.controller
    assert sum(controller.num_ended.values()) == controller.num_submitted == len(world.requests)
    assert all(ways.of[one.request_id].reason is not None for one in world.requests)
    return ways, simulator.num_steps


def check_world(seed: int, num_requests: int = 40, **ways: bool) -> int:
    """Run a world with and without fast-forward, and again; all three must be equal. Returns the number of steps of all runs.
    `ways`: see `drawn_world`.
    """
    world = drawn_world(seed, num_requests, **ways)
    runs = [
        run_world(world, steps_alone=alone, check_every_steps=every)
        for alone, every in ((False, 1), (True, 1), (True, 7))
    ]
    (first, steps), *others = runs
    for other, other_steps in others:
        assert other.order == first.order
        assert other.of == first.of
        assert other_steps == steps
    return 3 * steps
