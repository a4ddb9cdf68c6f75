"""Hand-offs: who holds what, when, from one pool to the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.sim.split_pools import POLICIES, Finished, nothing_is_left, prepared, settings, simulate
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import ConfigError
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import Failure
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.runtime.support.clock import to_seconds, to_ticks
from vajra_py.workload import PromptContent, RequestSpec


def prompt_s(num_tokens: int) -> float:
    """Seconds of a step of so many tokens."""
    return 0.01 + 0.0001 * num_tokens


DECODE_S = prompt_s(1)


def test_a_request_leaves_with_its_kv_and_goes_on_in_the_other_pool() -> None:
    done = simulate(settings(), [RequestSpec("a", 0.0, 100, 5)])
    way = done.ways["a"]
    held = prompt_s(100)
    assert way.assigned == [0]
    assert (way.held, way.sent) == (pytest.approx(held), pytest.approx(held))
    assert (way.target, way.num_moved) == (1, 100)
    assert way.arrived == pytest.approx(held + 100 * 1e6 / 10e9)
    assert way.released == way.arrived
    assert way.first_token == way.held  # the source's token is the client's
    assert way.ended == pytest.approx(held + 0.01 + 4 * DECODE_S)


def test_a_replicaset_that_hands_off_serves_beside_one_that_does_not() -> None:
    mapping = settings()
    split = {name: mapping.pop(name) for name in ("pools", "hand_off")}
    mapping["replicasets"] = {"split": {"select": {"min_prompt_tokens": 100}, **split}, "whole": {}}
    ways = simulate(mapping, [RequestSpec("a", 0.0, 100, 5), RequestSpec("b", 0.0, 99, 5)]).ways
    assert {name: (way.target, way.reason) for name, way in ways.items()} == {
        "a": (1, EndReason.STOP),
        "b": (None, EndReason.STOP),
    }


@pytest.mark.parametrize(
    ("rule", "first_at", "num_steps"),
    [("source", 0.0, 4), ("recompute", 0.01 + DECODE_S, 5)],
)
def test_the_sources_token_is_the_clients_or_dropped(rule: str, first_at: float, num_steps: int) -> None:
    hand_off = {"kv_bytes_per_token": 1_000_000, "first_token": rule}
    way = simulate(settings(hand_off=hand_off), [RequestSpec("a", 0.0, 100, 5)]).ways["a"]
    assert way.first_token == pytest.approx(prompt_s(100) + first_at)
    assert way.ended == pytest.approx(prompt_s(100) + 0.01 + num_steps * DECODE_S)


def test_a_scheduler_that_binds_late_hands_off_when_a_replica_has_room() -> None:
    pools = {"prefill": {"replica": {"max_batch_tokens": 100}}, "decode": {"replica": {"max_batch_size": 1}}}
    scheduling = {**POLICIES, "replicaset_scheduler": "pull"}
    requests = [RequestSpec(name, 0.0, 100, 5) for name in "abc"]
    ways = simulate(settings(pools=pools, scheduling=scheduling), requests).ways
    assert ways["b"].held < ways["a"].ended  # its prompt was computed meanwhile
    assert ways["b"].sent == ways["a"].ended
    assert ways["c"].reason is EndReason.STOP


def test_one_token_is_never_moved_where_the_source_gives_it() -> None:
    way = simulate(settings(), [RequestSpec("a", 0.0, 100, 1)]).ways["a"]
    assert (way.held, way.arrived, way.ended) == (None, None, pytest.approx(prompt_s(100)))


def test_transfers_share_the_links_of_their_source() -> None:
    pools = {"prefill": {"replica": {"max_batch_tokens": 400}}, "decode": {"num_replicas": 2}}
    requests = [RequestSpec(name, 0.0, 200, 2) for name in "ab"]
    ways = simulate(settings(pools=pools), requests).ways
    # 2 x 200 MB leave one source at 10 GB/s, to two targets: 40 ms, where one alone takes 20 ms.
    assert [ways[name].arrived for name in "ab"] == [pytest.approx(prompt_s(400) + 0.04)] * 2
    assert {ways[name].target for name in "ab"} == {1, 2}


def test_a_full_target_lets_the_request_wait_while_the_source_holds_it() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 8}}}}
    requests = [RequestSpec("a", 0.0, 100, 20), RequestSpec("b", 0.0, 100, 20)]
    ways = simulate(settings(pools=pools), requests).ways
    assert ways["a"].held == ways["b"].held
    assert ways["b"].sent == pytest.approx(ways["a"].ended)


def test_a_request_whose_target_is_full_ends_where_the_rule_says_so() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 8}}}}
    hand_off = {"kv_bytes_per_token": 1_000_000, "when_full": "drop"}
    requests = [RequestSpec("a", 0.0, 100, 20), RequestSpec("b", 0.0, 100, 20)]
    ways = simulate(settings(pools=pools, hand_off=hand_off), requests).ways
    assert ways["a"].reason is EndReason.STOP
    assert ways["b"].reason is EndReason.REJECTED
    assert "is full" in ways["b"].detail


def test_a_held_request_goes_to_whichever_target_has_room_first() -> None:
    pools = {"prefill": {}, "decode": {"num_replicas": 2, "replica": {"memory": {"num_blocks": 8}}}}
    hand_off = {"kv_bytes_per_token": 1_000_000, "when_full": "hold"}
    requests = [RequestSpec("long", 0.0, 100, 28), RequestSpec("short", 0.0, 100, 5), RequestSpec("last", 0.0, 100, 5)]
    ways = simulate(settings(pools=pools, hand_off=hand_off), requests).ways
    assert ways["last"].target == ways["short"].target
    assert ways["last"].sent == pytest.approx(ways["short"].ended)


def test_a_held_request_that_is_aborted_goes_nowhere_when_there_is_room() -> None:
    pools = {"prefill": {}, "decode": {"num_replicas": 2, "replica": {"memory": {"num_blocks": 8}}}}
    hand_off = {"kv_bytes_per_token": 1_000_000, "when_full": "hold"}
    run, simulator, ways = prepared(settings(pools=pools, hand_off=hand_off))
    simulator.abort_at(0.1, "last")
    simulator.run([RequestSpec(name, 0.0, 100, 28 if name == "long" else 12) for name in ("long", "short", "last")])
    assert ways.of["last"].held is not None
    assert ways.of["last"].held < 0.1
    assert (ways.of["last"].reason, ways.of["last"].sent) == (EndReason.ABORTED, None)
    assert [ways.of[name].reason for name in ("long", "short")] == [EndReason.STOP] * 2
    assert run.controller.num_alive == 0


@pytest.mark.parametrize(("max_reruns", "reason"), [(None, EndReason.FAILED), (1, EndReason.STOP)])
def test_a_held_request_is_lost_with_its_source(max_reruns: int | None, reason: EndReason) -> None:
    pools = {"prefill": {"num_replicas": 2}, "decode": {"replica": {"memory": {"num_blocks": 8}}}}
    run, simulator, ways = prepared(settings(pools=pools))
    for_b = 1  # by turns
    simulator.inject(to_ticks(0.1), Phase.FAILURE, Failure(to_ticks(0.1), "default", for_b, "broke", max_reruns))
    simulator.run([RequestSpec("a", 0.0, 100, 20), RequestSpec("b", 0.0, 100, 20)])
    assert ways.of["b"].assigned[0] == for_b
    assert ways.of["b"].held is not None
    assert ways.of["b"].reason is reason
    assert ways.of["a"].reason is EndReason.STOP
    assert run.controller.num_alive == 0


@pytest.mark.parametrize("reserve", ["at_admission", "after_prompt"])
def test_blocks_that_are_free_because_a_source_was_lost_serve_who_waits_for_them(reserve: str) -> None:
    decode = {"replica": {"memory": {"num_blocks": 12, "watermark_fraction": 0.0}}}
    mapping = settings(
        hand_off={"kv_bytes_per_token": 1_000_000, "reserve": reserve},
        links={"bandwidth_gb_s": 0.2},
        pools={"prefill": {"num_replicas": 2}, "decode": decode},
    )
    run, simulator, ways = prepared(mapping)
    lost_at = to_ticks(0.75)  # the KV of b is on its way, and a was preempted for lack of blocks
    simulator.inject(lost_at, Phase.FAILURE, Failure(lost_at, "default", 1, "lost", max_reruns=None))
    simulator.run([RequestSpec("a", 0.0, 60, 60), RequestSpec("b", 0.3, 110, 20)])
    assert (ways.of["a"].reason, ways.of["b"].reason) == (EndReason.STOP, EndReason.FAILED)
    nothing_is_left(run)


def test_at_step_boundaries_a_busy_target_takes_kv_when_its_step_ends() -> None:
    hand_off = {"kv_bytes_per_token": 1_000_000, "takes_effect": "at_step_boundary"}
    requests = [RequestSpec("a", 0.0, 100, 50), RequestSpec("b", 0.1, 100, 5)]
    for rules, on_boundary in ((hand_off, True), ({"kv_bytes_per_token": 1_000_000}, False)):
        ways = simulate(settings(hand_off=rules), requests).ways
        begun = prompt_s(100) + 0.01  # the target's first step
        assert ways["b"].sent is not None
        steps = (ways["b"].sent - begun) / DECODE_S
        assert (abs(steps - round(steps)) < 1e-6) is on_boundary


def test_a_prompt_waits_for_blocks_of_its_target_where_they_are_taken_first() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 8}}}}
    hand_off = {"kv_bytes_per_token": 1_000_000, "reserve": "before_prompt"}
    requests = [RequestSpec("a", 0.0, 100, 20), RequestSpec("b", 0.0, 100, 20)]
    ways = simulate(settings(pools=pools, hand_off=hand_off), requests).ways
    assert ways["a"].held == pytest.approx(prompt_s(100))
    assert ways["b"].held == pytest.approx(ways["a"].ended + prompt_s(100))
    assert ways["b"].sent == ways["b"].held  # blocks are there already


def test_a_request_waits_in_its_targets_queue_where_blocks_are_taken_at_admission() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"max_batch_size": 1}}}
    requests = [RequestSpec("a", 0.0, 100, 20), RequestSpec("b", 0.0, 100, 20)]
    ways = simulate(
        settings(pools=pools, hand_off={"preset": "vllm-pd", "kv_bytes_per_token": 1_000_000}), requests
    ).ways
    held = prompt_s(200)
    # Both are loaded at the same time: loading needs no batch slot, computing does.
    assert [ways[name].sent for name in "ab"] == [pytest.approx(held)] * 2
    assert ways["a"].first_token == pytest.approx(held + 0.02 + DECODE_S)
    assert ways["b"].first_token == pytest.approx(ways["a"].ended + DECODE_S)


def test_a_load_that_finds_no_blocks_waits_for_them_at_the_head_of_the_queue() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 10}}}}
    hand_off = {"preset": "vllm-pd", "kv_bytes_per_token": 1_000_000}
    requests = [RequestSpec("a", 0.0, 100, 20), RequestSpec("b", 0.0, 100, 20), RequestSpec("small", 0.0, 20, 2)]
    ways = simulate(settings(pools=pools, hand_off=hand_off), requests).ways
    assert ways["b"].sent == pytest.approx(ways["a"].ended)
    assert ways["small"].sent == ways["b"].sent


def test_tokens_in_the_targets_prefix_cache_are_not_moved_again() -> None:
    content = PromptContent((("shared", 96), ("own", 4)))
    requests = [
        RequestSpec("a", 0.0, 100, 3, content=content),
        RequestSpec("b", 1.0, 100, 3, content=PromptContent((("shared", 96), ("other", 4)))),
    ]
    ways = simulate(settings(), requests).ways
    assert [ways[name].num_moved for name in "ab"] == [100, 4]
    hand_off = {"kv_bytes_per_token": 1_000_000, "moves": "whole_prompt"}
    ways = simulate(settings(hand_off=hand_off), requests).ways
    assert [ways[name].num_moved for name in "ab"] == [100, 100]


@pytest.mark.parametrize("preset", ["vllm-pd", "sglang-pd", "dynamo-pd", "distserve", "splitwise"])
def test_results_do_not_depend_on_whether_repeated_steps_are_worked_out_at_once(preset: str) -> None:
    pools = {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2, "replica": {"memory": {"num_blocks": 40}}}}
    mapping = settings(pools=pools, hand_off={"preset": preset, "kv_bytes_per_token": 1_000_000})
    requests = [RequestSpec(f"r{one}", 0.013 * one, 50 + 37 * one % 200, 1 + 29 * one % 120) for one in range(60)]
    fast, slow = (simulate(mapping, requests, wants_steps=each) for each in (False, True))
    assert fast.ways == slow.ways
    assert fast.order == slow.order
    assert all(way.reason in (EndReason.LENGTH, EndReason.STOP) for way in fast.ways.values())


class StepRows(Observer):
    """What each step of the decode replica came to."""

    def __init__(self, *, wants_steps: bool) -> None:
        self.wants_steps = wants_steps
        self.of_target: list[tuple[int, float, int, int]] = []

    def on_step_end(self, step: Any) -> None:
        if step.replica_id == 1:
            self.of_target.append((step.step_index, step.ended_at, step.free_blocks, step.num_running))


def target_steps(
    num_blocks: int, requests: Sequence[RequestSpec], *, wants_steps: bool
) -> tuple[list[tuple[int, float, int, int]], list[float], Finished]:
    """Steps of the decode replica, when it formed them one by one, and the run, over slow links."""
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": num_blocks}}}}
    mapping = settings(pools=pools, links={"bandwidth_gb_s": 0.025})
    run, simulator, ways = prepared(mapping)
    rows = StepRows(wants_steps=wants_steps)
    run.controller.watch((rows, ways))
    formed: list[float] = []

    def form(replica: Replica, now: int) -> StepPlan | None:
        if replica.replica_id == 1:
            formed.append(to_seconds(now))
        return replica.next_plan(now)

    simulator._driver.form_through(form)
    simulator.run(requests)
    nothing_is_left(run)
    return rows.of_target, formed, Finished(simulator, ways.of, ways.order)


def test_blocks_are_set_aside_while_a_run_of_repeated_steps_goes_on() -> None:
    requests = [RequestSpec("a", 0.0, 100, 400), RequestSpec("b", 5.0, 100, 5)]
    steps, formed, done = target_steps(100, requests, wants_steps=False)
    stepped, each_formed, _ = target_steps(100, requests, wants_steps=True)
    assert steps == stepped
    sent = done.ways["b"].sent
    assert sent is not None
    before, after = (next(row[2] for row in steps if row[1] > sent + late) for late in (0.0, DECODE_S))
    assert before - after in (7, 8)  # blocks of 16 for b's prompt, and perhaps one for a
    soon = [at for at in formed if sent <= at < sent + 20 * DECODE_S]
    assert not soon
    assert len([at for at in each_formed if sent <= at < sent + 20 * DECODE_S]) == 20


@pytest.mark.parametrize("num_blocks", [20, 21, 22])
def test_a_run_ends_before_a_step_that_lacks_blocks_which_were_set_aside(num_blocks: int) -> None:
    requests = [RequestSpec("a", 0.0, 100, 200), RequestSpec("b", 4.4, 100, 150)]
    steps, formed, done = target_steps(num_blocks, requests, wants_steps=False)
    stepped, each_formed, slow = target_steps(num_blocks, requests, wants_steps=True)
    assert steps == stepped
    assert (done.ways, done.order) == (slow.ways, slow.order)
    assert min(row[2] for row in steps) == 0
    assert len(formed) < len(each_formed) / 2


def test_both_instances_of_a_plain_scheduler_are_woken_and_draw_their_own_numbers() -> None:
    woken: list[tuple[int, float]] = []
    drawn: list[float] = []

    class Ticks:
        def __init__(self, context: PolicyContext) -> None:
            self.number = len(drawn)
            drawn.append(context.random_stream("ties").random())
            context.wake.at(0.005 * (1 + self.number))

        def on_wake(self, key: str, now: float) -> None:
            woken.append((self.number, now))

        def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
            return replicas[0].replica_id

        def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
            return ()

    spec = PolicySpec(
        "ticks", Layer.REPLICASET_SCHEDULER, PolicyConfig, lambda config, context: Ticks(context), "Is woken once."
    )
    mapping = settings(scheduling={**POLICIES, "replicaset_scheduler": "ticks"})
    simulate(mapping, [RequestSpec("a", 0.0, 100, 5)], registry=load_registry().with_policies([spec]))
    assert woken == [(0, 0.005), (1, 0.01)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pools": {"prefill": {}}}, "no pool takes the requests that leave the prefill pool"),
        ({"pools": {"decode": {}}}, "no pool computes prompts for the decode pool"),
        ({"links": {"bandwidth_gb_s": 0.0}}, "links.bandwidth_gb_s"),
        ({"hand_off": {}}, "kv_bytes_per_token: is missing"),
        ({"hand_off": "vllm"}, "vllm-pd"),
        ({"pools": {"prefill": {}, "decode": {"replica_scheduler": "vllm_v2"}}}, "no installed package offers"),
    ],
)
def test_what_cannot_work_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(settings(**keys), [])


def test_a_request_that_no_decode_replica_can_hold_is_refused_at_the_door() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 8}}}}
    way = simulate(settings(pools=pools), [RequestSpec("a", 0.0, 120, 20, max_tokens=20)]).ways["a"]
    assert way.reason is EndReason.REJECTED
    assert "can never fit" in way.detail


@pytest.mark.parametrize(
    ("prefill", "words"),
    [
        (
            {"memory": {"num_blocks": 5}},
            r"the prompt \(120 tokens\) can never fit into the KV memory of a replica that computes prompts \(5 blocks of",
        ),
        (
            {"max_model_len": 100},
            r"prompt and output \(120 \+ 20 tokens\) are more than a replica that computes prompts takes \(max_model_len: 100\)",
        ),
    ],
)
def test_a_prompt_that_no_prefill_replica_can_hold_is_refused_with_the_sizes_of_these(
    prefill: dict[str, Any], words: str
) -> None:
    pools = {"prefill": {"replica": prefill}, "decode": {}}
    way = simulate(settings(pools=pools), [RequestSpec("a", 0.0, 120, 20, max_tokens=20)]).ways["a"]
    assert way.reason is EndReason.REJECTED
    assert re.match(words, way.detail)


ONE_AT_A_TIME = {
    "kv_bytes_per_token": 1_000_000,
    "takes_effect": "at_step_boundary",
    "reservations": "one_at_a_time",
}


def test_a_busy_target_takes_blocks_for_one_request_after_each_of_its_steps() -> None:
    requests = [RequestSpec("a", 0.0, 100, 100), *(RequestSpec(name, 0.2, 10, 2) for name in "bcd")]
    sent = {}
    for rule in ("all_that_fit", "one_at_a_time"):
        ways = simulate(settings(hand_off={**ONE_AT_A_TIME, "reservations": rule}), requests).ways
        sent[rule] = [ways[name].sent for name in "bcd"]
    assert len(set(sent["all_that_fit"])) == 1
    first, *others = sent["one_at_a_time"]
    assert first == sent["all_that_fit"][0]
    # After the next step one more, and one after the first has come then.
    assert others == [pytest.approx(first + DECODE_S)] * 2


def test_with_one_reservation_at_a_time_nobody_comes_while_the_batch_is_full() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"max_batch_size": 1}}}
    requests = [RequestSpec("a", 0.0, 100, 50), RequestSpec("b", 0.2, 100, 10)]
    ways = simulate(settings(pools=pools, hand_off=ONE_AT_A_TIME), requests).ways
    assert ways["b"].sent == ways["a"].ended


def test_an_idle_target_goes_on_when_what_it_waited_for_is_aborted() -> None:
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 9}}}}
    mapping = settings(pools=pools, hand_off=ONE_AT_A_TIME, links={"bandwidth_gb_s": 0.025})
    run, simulator, ways = prepared(mapping)
    simulator.abort_at(0.2, "a")
    simulator.run([RequestSpec("a", 0.0, 100, 10), RequestSpec("b", 0.0, 100, 10)])
    assert ways.of["b"].sent == pytest.approx(0.2)
    assert ways.of["b"].reason is EndReason.STOP
    assert run.controller.num_alive == 0


def test_all_that_fit_come_while_what_was_preempted_there_cannot_run() -> None:
    """`long` gives way to itself, for want of one block; until `big` has come nothing runs, and the line waits for no step."""
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 20}}}}
    mapping = settings(pools=pools, hand_off=ONE_AT_A_TIME, links={"bandwidth_gb_s": 0.1})
    requests = [
        RequestSpec("long", 0.0, 100, 80),
        RequestSpec("big", 0.9, 160, 2),
        *(RequestSpec(name, 1.5, 48, 2) for name in ("x", "y")),
    ]
    ways = simulate(mapping, requests).ways
    long, big = ways["long"], ways["big"]
    assert long.arrived is not None
    assert big.arrived is not None
    preempted_at = long.arrived + 60 * DECODE_S  # it has filled the 10 blocks that `big` leaves
    assert [ways[name].sent for name in ("x", "y")] == [pytest.approx(preempted_at)] * 2
    assert big.arrived > preempted_at


@pytest.mark.parametrize("seed", range(12))
def test_one_reservation_at_a_time_and_repeated_steps_give_the_same(seed: int) -> None:
    random = np.random.default_rng(seed)
    decode = {
        "memory": {"num_blocks": int(random.choice([40, 100, 400]))},
        "max_batch_size": int(random.choice([3, 128])),
    }
    pools = {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 1 + seed % 2, "replica": decode}}
    mapping = settings(pools=pools, hand_off={**ONE_AT_A_TIME, "kv_bytes_per_token": 1000})
    arrivals = np.cumsum(random.choice([0.0001, 0.0001, 0.3], 40))
    requests = [
        RequestSpec(f"r{number}", float(at), int(random.integers(10, 300)), int(random.integers(1, 150)))
        for number, at in enumerate(arrivals)
    ]
    fast, slow = (simulate(mapping, requests, wants_steps=each) for each in (False, True))
    assert fast.ways == slow.ways
    assert fast.order == slow.order


class DecodeReplicasInTurn:
    """Assigns prompts to replica 0, and decodes to each other replica in turn."""

    def __init__(self) -> None:
        self.num_placed = 0

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The first."""
        return 0

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Nothing."""
        return ()

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """The next of the others."""
        self.num_placed += 1
        return 1 + self.num_placed % 2


@pytest.mark.parametrize("first_token", ["source", "recompute"])
@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_a_scheduler_of_all_pools_is_asked_once_where_a_prompt_goes(first_token: str, role: str) -> None:
    """Also where the target samples the first token again: for this it computes the last token of the prompt."""
    scheduler = DecodeReplicasInTurn()
    spec = PolicySpec("in_turn", Layer.REPLICASET_SCHEDULER, PolicyConfig, lambda *_: scheduler, "In turn.")
    mapping = settings(
        scheduling={**POLICIES, "replicaset_scheduler": "in_turn"},
        pools={"prefill": {}, "others": {"num_replicas": 2, "role": role}},
        hand_off={"kv_bytes_per_token": 1000, "first_token": first_token},
    )
    requests = [RequestSpec(f"r{index}", 0.05 * index, 30, 4) for index in range(6)]
    finished = simulate(mapping, requests, registry=load_registry().with_policies([spec]))
    assert scheduler.num_placed == 6
    assert [what for what, _, _ in finished.order].count("transfer") == 6
    assert {way.target for way in finished.ways.values()} == {1, 2}
