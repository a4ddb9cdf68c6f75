"""KVFlow: turns of agents, and what stays in a cache that is one prefix too small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vajra_policies.retention.kvflow import SPEC, Kvflow, KvflowConfig
from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.testing.simulated import serve, simulated_system
from vajra_py.workload import PromptContent, RequestSpec

TRIED = replace(SPEC, name="tried")
BLOCK, PREFIX = 16, 4
"""Tokens of a block, and blocks of an agent's prefix."""


class Hits(Observer):
    """Cached tokens by request."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.found[request.request_id] = request.num_cached_tokens


def cycles(num_agents: int, num_rounds: int) -> list[RequestSpec]:
    """One program whose agents have their turns in a circle, each with a prefix of its own."""
    specs = []
    for turn in range(num_agents * num_rounds):
        agent = f"agent{turn % num_agents}"
        content = PromptContent(((agent, PREFIX * BLOCK), (f"turn {turn}", 1)))
        specs.append(
            RequestSpec(f"t{turn}", 1.0 * turn, content.num_tokens, 1, content=content, program_id="flow", stage=agent)
        )
    return specs


def hits(retention: str, num_agents: int, num_rounds: int, num_blocks: int) -> list[int]:
    replica = {"max_batch_size": 4, "max_model_len": 400}
    memory = {"num_blocks": num_blocks, "watermark_fraction": 0.0, "prefix_cache": {}}
    controller, simulator = simulated_system(
        TRIED, {"retention": retention}, {"replica": {**replica, "memory": memory}}
    )
    specs = cycles(num_agents, num_rounds)
    watch = Hits()
    controller.watch([watch])
    serve(controller, simulator, specs)
    return [watch.found[spec.request_id] // (PREFIX * BLOCK) for spec in specs]


@pytest.mark.parametrize("num_agents", [3, 4, 6])
def test_a_circle_of_n_agents_in_room_for_n_minus_1_hits_as_often_as_any_rule_can(num_agents: int) -> None:
    rounds = 3 * (num_agents - 1)  # the pattern of misses has a period of n - 1 turns
    num_blocks = PREFIX * (num_agents - 1) + 1
    assert sum(hits("lru", num_agents, rounds, num_blocks)) == 0
    found = hits(TRIED.name, num_agents, rounds, num_blocks)[2 * num_agents * (num_agents - 1) :]
    assert sum(found) * (num_agents - 1) == len(found) * (num_agents - 2)


def test_steps_to_execution_follow_the_graph_or_what_was_seen() -> None:
    program: Any = type("Program", (), {})()
    stated = Kvflow(KvflowConfig(next_stages={"plan": ("code", "search"), "code": ("test",), "test": ("plan",)}))
    planning = Hashable(program, "plan")
    stated.on_arrivals([planning], 0.0)  # type: ignore[list-item]
    assert stated.steps_to_execution(program) == {"plan": 0, "code": 1, "search": 1, "test": 2}
    stated.on_departures([planning], 1.0)  # type: ignore[list-item]
    assert stated.steps_to_execution(program) == {"code": 1, "search": 1, "test": 2, "plan": 3}
    learned = Kvflow(KvflowConfig())
    for stage in ("plan", "code", "plan"):
        one = Hashable(program, stage)
        learned.on_arrivals([one], 0.0)  # type: ignore[list-item]
        learned.on_departures([one], 0.0)  # type: ignore[list-item]
    assert learned.steps_to_execution(program) == {"code": 1, "plan": 2}


def test_no_more_stages_are_learned_than_may_be() -> None:
    program: Any = type("Program", (), {})()
    policy = Kvflow(KvflowConfig(max_learned_stages=2))
    for stage in ("plan", "a", "plan", "b", "plan", "c", "plan"):
        one = Hashable(program, stage)
        policy.on_arrivals([one], 0.0)  # type: ignore[list-item]
        policy.on_departures([one], 0.0)  # type: ignore[list-item]
    assert policy.steps_to_execution(program) == {"a": 1, "b": 1, "plan": 2}


def test_shared_content_counts_for_the_agent_whose_turn_is_next_and_content_of_nobody_goes_first() -> None:
    program: Any = type("Program", (), {})()
    policy = Kvflow(KvflowConfig(next_stages={"a": ("b",), "b": ("c",), "c": ("a",)}, hold_steps=5))
    running = Hashable(program, "a")
    policy.on_arrivals([running], 0.0)  # type: ignore[list-item]
    block = Content(Hashable(program, "c"))
    policy.on_stored([block], 0.0)  # type: ignore[list-item]
    assert policy.key(block, 1.0) == (-2.0, 0.0)  # type: ignore[arg-type]
    block.request = Hashable(program, "b")
    policy.on_used([block], 0.0)  # type: ignore[list-item]
    assert policy.key(block, 1.0) == (-1.0, 0.0)  # type: ignore[arg-type]
    assert policy.key(Content(running), 1.0) == (-7.0, 0.0)  # type: ignore[arg-type]
    policy.on_program_end(program, 2.0)
    assert policy.key(block, 2.0) == (-7.0, 0.0)  # type: ignore[arg-type]


class Hashable:
    """A call of a program."""

    def __init__(self, program: Any, stage: str) -> None:
        self.program, self.stage = program, stage


class Content:
    """A block of cached content."""

    last_used_at = 0.0

    def __init__(self, request: Hashable) -> None:
        self.request = request
