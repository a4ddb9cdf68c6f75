"""Policies of programs: Autellix's prioritizers on the paper's example, and ThunderAgent's router on replicas that are too small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.policies.routing_views import replicas
from vajra_policies.programs.attained_service import Atlas, AttainedServiceConfig, Plas
from vajra_policies.routers.thunderagent import ThunderAgent
from vajra_policies.routers.thunderagent_programs import ThunderAgentConfig
from vajra_policies.routers.thunderagent_rules import ThunderTable
from vajra_py.contract import EndReason, KeyMotion, RequestPrioritizer, RequestView
from vajra_py.contract.context import NoWakeUps
from vajra_py.contract.observer import Observer
from vajra_py.errors import ConfigError
from vajra_py.latency import AffineModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload import PromptContent, RequestSpec

SECOND = AffineModel(base_s=1.0, per_token_s=0.0)
EXAMPLE = {"A": (4, 3, 1, 1), "B": (3, 3, 4), "C": (1, 2), "D": (4,)}
"""Decode steps of the calls of four programs that come at once (Autellix, arXiv:2502.13965)."""


class Requests(Observer):
    """Keeps every request."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}
        self.placed: list[tuple[str, int | None, float]] = []

    def on_arrival(self, request: RequestView, now: float) -> None:
        self.of[request.request_id] = request

    def on_assigned(self, request: RequestView, replica_id: int | None, now: float) -> None:
        self.placed.append((request.request_id, replica_id, now))

    @property
    def total_wait_s(self) -> float:
        return sum(one.admitted_at - one.arrived_at for one in self.of.values())

    def ended_at(self, program: str) -> float:
        return max(one.ended_at for one in self.of.values() if one.program_id == program)


def chains(lengths: Mapping[str, Sequence[int]]) -> list[RequestSpec]:
    specs = []
    for program, outputs in lengths.items():
        for index, output in enumerate(outputs):
            before = f"{program}{index - 1}" if index else None
            is_last = index == len(outputs) - 1
            specs.append(
                RequestSpec(
                    f"{program}{index}", 0.0, 1, output, program_id=program, follows=before, is_last_call=is_last
                )
            )
    return specs


def served(specs: Sequence[RequestSpec], prioritizer: Any, router: Any = "round_robin", **options: Any) -> Requests:
    harness = Harness(prioritizer, router, "fixed_chunk", HarnessOptions(latency=SECOND, **options))
    requests = Requests()
    harness.controller.watch((requests,))
    harness.simulator(SimulationOptions()).run(specs)
    assert all(one.end_reason is EndReason.STOP for one in requests.of.values())
    return requests


def test_both_are_prioritizers() -> None:
    policies: list[RequestPrioritizer] = [Plas(AttainedServiceConfig()), Atlas(AttainedServiceConfig())]
    assert {one.key_motion for one in policies} == {KeyMotion.STATIC}
    assert Plas(AttainedServiceConfig(queue_bounds_s=(1.0,))).key_motion is KeyMotion.PROGRESS
    assert Atlas(AttainedServiceConfig(starvation_ratio=3.0)).key_motion is KeyMotion.ARBITRARY


def test_the_example_of_four_programs_waits_18_under_fcfs_and_at_most_14_under_plas() -> None:
    waits = {name: served(chains(EXAMPLE), name, max_batch_size=2).total_wait_s for name in ("fcfs", "plas", "atlas")}
    assert waits["fcfs"] == 18.0
    assert waits["plas"] <= 14.0
    assert waits["atlas"] == waits["plas"], "chains are programs of one thread"


def fan(program: str, width: int, output: int) -> list[RequestSpec]:
    """A call, others side by side, and one that joins them."""
    work = tuple(f"{program}w{index}" for index in range(width))
    return [
        RequestSpec(f"{program}plan", 0.0, 1, 2, program_id=program),
        *(RequestSpec(name, 0.0, 1, output, program_id=program, follows=f"{program}plan") for name in work),
        RequestSpec(f"{program}join", 0.0, 1, 2, program_id=program, follows=work, is_last_call=True),
    ]


def test_atlas_counts_calls_side_by_side_once_and_plas_all_of_them() -> None:
    """After 2 + 4 x 6 seconds of service along a path of 8, the join of the wide program meets the calls of a chain of 10."""
    chain = chains({"chain": (5, 5, 5, 5)})
    by_plas, by_atlas = (served([*fan("wide", 4, 6), *chain], name, max_batch_size=5) for name in ("plas", "atlas"))
    assert by_plas.of["widejoin"].arrived_at == by_atlas.of["widejoin"].arrived_at
    slots = [served([*fan("wide", 4, 6), *chain], name, max_batch_size=4) for name in ("plas", "atlas")]
    assert slots[1].ended_at("wide") <= slots[0].ended_at("wide")


def test_a_call_that_runs_beyond_its_bound_goes_to_the_next_queue() -> None:
    policy = Plas(AttainedServiceConfig(queue_bounds_s=(5.0, 20.0)))
    request: Any = type("R", (), {"program": None, "arrived_at": 0.0})()
    policy.on_arrivals([request], 0.0)
    policy.on_admission(request, 0, 1.0)
    assert [policy.key(request, now) for now in (1.0, 6.0, 6.5, 21.5)] == [0.0, 0.0, 1.0, 2.0]
    policy.on_preemption(request, 0, 7.0)
    assert policy.key(request, 100.0) == 1.0, "waiting is no service"
    policy.on_admission(request, 0, 100.0)
    policy.on_moved(request, 0, 1, 110.0)
    assert policy.key(request, 200.0) == 1.0, "16 s of service"
    policy.on_admission(request, 1, 200.0)
    assert [policy.key(request, now) for now in (204.0, 204.5)] == [1.0, 2.0], "service before the move counts"
    policy.on_departures([request], 205.0)


def test_a_call_that_starves_goes_first() -> None:
    program: Any = type("P", (), {"run_s": 10.0, "wait_s": 5.0})()
    request: Any = type("R", (), {"program": program, "arrived_at": 100.0})()
    policy = Plas(AttainedServiceConfig(starvation_ratio=2.0))
    policy.on_arrivals([request], 100.0)
    assert [policy.key(request, now) for now in (100.0, 114.9, 115.0)] == [10.0, 10.0, -1.0]


def test_bounds_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ConfigError, match="are not ascending"):
        Harness(("plas", {"queue_bounds_s": [5.0, 5.0]}), "round_robin", "fixed_chunk")


# ThunderAgent's router


def talks(number: int, turns: int, gap_s: float = 4.0) -> list[RequestSpec]:
    """Programs whose prompts grow by 200 tokens a turn."""
    specs = []
    for program in range(number):
        segments: tuple[tuple[Any, int], ...] = ()
        for turn in range(turns):
            name = f"{program}.{turn}"
            answer = ((("out", f"{program}.{turn - 1}"), 20),) if turn else ()
            segments = (*segments, *answer, (name, 180))
            content = PromptContent(segments)
            specs.append(
                RequestSpec(
                    name,
                    float(program),
                    content.num_tokens,
                    20,
                    content=content,
                    program_id=f"p{program}",
                    follows=f"{program}.{turn - 1}" if turn else None,
                    think_time_s=gap_s if turn else 0.0,
                    is_last_call=turn == turns - 1,
                )
            )
    return specs


SMALL: dict[str, Any] = {
    "num_replicas": 2,
    "num_blocks": 150,
    "max_batch_size": 8,
    "prefix_cache": PrefixCacheOptions(),
}
"""2,400 tokens a replica."""
EAGER = {"scheduler_interval_s": 2.0}


def replicas_of(requests: Requests) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in requests.of.values():
        found.setdefault(one.program_id, []).append(one.replica_id)
    return found


def test_programs_keep_their_replica_and_their_prefixes_where_contexts_fit() -> None:
    requests = served(talks(4, 5), "fcfs", ("thunderagent", EAGER), **SMALL)
    assert all(len(set(replicas)) == 1 for replicas in replicas_of(requests).values())
    later = [one for one in requests.of.values() if not one.request_id.endswith(".0")]
    assert all(one.num_cached_tokens > 0.7 * (one.num_prompt_tokens - 200) for one in later)
    assert all(replica is not None for _, replica, _ in requests.placed)


def test_programs_are_paused_as_wholes_where_contexts_do_not_fit() -> None:
    specs = talks(14, 5)
    spread, paused = (served(specs, "fcfs", router, **SMALL) for router in ("round_robin", ("thunderagent", EAGER)))
    held = {name for name, replica, _ in paused.placed if replica is None}
    assert held, "some calls wait for their programs to be resumed"
    cached = [sum(one.num_cached_tokens for one in requests.of.values()) for requests in (spread, paused)]
    assert cached[1] > 2 * cached[0], "what is kept whole is found again"


def test_a_paused_program_is_resumed_after_the_timeout_whatever_room_there_is() -> None:
    params = {"pause_threshold": 0.3, "pause_target": 0.2, "resume_hysteresis": 0.29, "resume_timeout_s": 40.0, **EAGER}
    requests = served(talks(6, 4), "fcfs", ("thunderagent", params), **SMALL)
    waits = [one.admitted_at - one.arrived_at for one in requests.of.values()]
    assert max(waits) >= 40.0
    assert all(
        later.arrived_at >= earlier.ended_at for earlier, later in pairwise(requests.of[f"0.{n}"] for n in range(4))
    )


def test_no_turn_is_its_programs_last_once_pauses_have_brought_the_replica_down_to_the_target() -> None:
    table = ThunderTable(ThunderAgentConfig(pause_target=0.8, buffer_tokens=0), {"only": 1000})
    table.before_call("talks", 800, 0.0)
    table.before_call("acts", 150, 0.0)
    table.after_call("acts", 300, 1.0)
    table.tick(5.0)
    table.after_call("talks", 800, 6.0)
    assert {name: one.is_paused for name, one in table.programs.items()} == {"talks": False, "acts": True}


def test_calls_side_by_side_and_requests_without_a_program_are_served() -> None:
    alone = [RequestSpec(f"alone{index}", index * 0.5, 64, 8) for index in range(20)]
    specs = sorted([*talks(6, 3), *alone], key=lambda one: one.arrived_at)
    requests = served([*specs, *fan("wide", 6, 8)], "plas", ("thunderagent", EAGER), **SMALL)
    assert len(requests.of) == 18 + 20 + 8


@dataclass(eq=False)
class Call:
    """A call, with the attributes that the router reads."""

    request_id: str
    index: int
    num_known_tokens: int
    program: Any
    arrived_at: float = 0.0
    end_reason: EndReason = EndReason.STOP


def test_a_program_is_resumed_on_a_replica_that_is_up() -> None:
    policy = ThunderAgent(ThunderAgentConfig(), 16, NoWakeUps(), lambda *_: None)
    views = replicas(num_blocks=[100, 100])
    calls: list[Any] = [
        Call(name, index, tokens, SimpleNamespace(program_id=name))
        for index, (name, tokens) in enumerate((("large", 1400), ("small", 1000), ("held", 500)))
    ]
    assert [policy.assign(one, views, 0.0) for one in calls] == [0, 1, None]
    for call in (calls[1], calls[0]):
        policy.on_departures([call], 1.0)
        policy.on_program_end(call.program, 1.0)
        views[1].is_up = False
        policy.on_wake("tick", 5.0)
    assert list(policy.pull(views[0], calls[2:], 10.0)) == ["held"]
