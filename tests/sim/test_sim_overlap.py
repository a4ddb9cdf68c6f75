"""KV that is sent while its prompt is computed: what is left after the prompt, who shares the links, and every way in which it may end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.sim.handing_off import registry_of
from tests.sim.split_pools import POLICIES, Ways, prepared, settings
from tests.sim.test_sim_migration import registry_of as moving_at
from vajra_py.config import config_from_mapping
from vajra_py.contract import Move, RequestView
from vajra_py.contract.observer import EndReason
from vajra_py.errors import ConfigError
from vajra_py.metrics.report.timeline_movement import stops_of, transfer_events
from vajra_py.metrics.tables.movement_log import MovementLog, paths_of
from vajra_py.metrics.tables.transfers import Stays
from vajra_py.plugins import Registry
from vajra_py.runtime.records.input_log import Failure
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.transfers import KV_LOST, PREEMPTED
from vajra_py.runtime.support.clock import to_seconds, to_ticks
from vajra_py.workload import PromptContent, RequestSpec

NUM_LAYERS = 32
MB = 1e6


def prompt_s(num_tokens: int) -> float:
    """Seconds of a step of so many tokens."""
    return 0.01 + 0.0001 * num_tokens


def overlapping(bandwidth_gb_s: float = 10.0, *, chunk: int = 2048, **rules: Any) -> dict[str, Any]:
    """Settings of one replica of each kind, layer by layer, with 1 MB of KV a token."""
    hand_off = {
        "kv_bytes_per_token": 1_000_000,
        "reserve": "before_prompt",
        "overlap": "by_layer",
        "num_layers": NUM_LAYERS,
    }
    replica = {"memory": {"num_blocks": 100, "watermark_fraction": 0.0}, "max_batch_tokens": chunk}
    return settings(hand_off=hand_off | rules, links={"bandwidth_gb_s": bandwidth_gb_s}, replica=replica)


class Outcome:
    """A run that has ended: ways of its requests, and the rows of its transfers table."""

    def __init__(
        self,
        mapping: dict[str, Any],
        specs: Sequence[RequestSpec],
        *,
        registry: Registry | None = None,
        losses: Sequence[tuple[float, int]] = (),
        aborts: Sequence[tuple[float, str]] = (),
    ) -> None:
        run, simulator, ways = prepared(mapping, registry=registry)
        log = MovementLog(paths_of(run.controller))
        run.controller.watch((ways, log))
        for at, replica_id in losses:
            failure = Failure(to_ticks(at), "default", replica_id, "broke", max_reruns=3)
            simulator.inject(to_ticks(at), Phase.FAILURE, failure)
        for at, request_id in aborts:
            simulator.abort_at(at, request_id)
        simulator.run(specs)
        run.controller.check_conservation()
        assert run.controller.num_alive == 0
        for replica in run.controller.replicas():
            assert replica.memory.free_blocks == replica.memory.num_blocks
            assert not replica.lifecycle.held
        log.on_run_end(to_seconds(simulator.now))
        self.ways: Ways = ways
        self.table = log.table.to_table()
        self.rows = self.table.to_pylist()

    def delay(self, request_id: str) -> float:
        """Seconds from the end of a prompt until its KV is at the target."""
        way = self.ways.of[request_id]
        assert way.arrived is not None
        assert way.held is not None
        return way.arrived - way.held

    def shown(self, *names: str) -> list[tuple[Any, ...]]:
        """Some columns of the rows."""
        return [tuple(row[name] for name in names) for row in self.rows]


# What is left after the prompt


@pytest.mark.parametrize("num_layers", [1, 4, 32, 80])
@pytest.mark.parametrize("bandwidth_gb_s", [100.0, 10.0, 8.0, 4.0, 0.5])
def test_only_what_could_not_be_hidden_is_left_after_the_prompt(num_layers: int, bandwidth_gb_s: float) -> None:
    done = Outcome(overlapping(bandwidth_gb_s, num_layers=num_layers), [RequestSpec("a", 0.0, 400, 5)])
    computing_s, transfer_s = prompt_s(400), 400 * MB / (bandwidth_gb_s * 1e9)
    left_s = transfer_s / num_layers if transfer_s <= computing_s else transfer_s - computing_s * (1 - 1 / num_layers)
    assert done.ways.of["a"].held == pytest.approx(computing_s)
    assert done.delay("a") == pytest.approx(left_s, rel=1e-9, abs=1e-9)
    assert done.ways.of["a"].num_moved == 400


@pytest.mark.parametrize("overlap", ["by_layer", "by_chunk"])
@pytest.mark.parametrize("bandwidth_gb_s", [100.0, 1.0])
def test_chunks_of_a_prompt_are_sent_behind_their_steps(overlap: str, bandwidth_gb_s: float) -> None:
    """Four steps of 20 ms, each with 100 MB: a fast link has the last part left, a slow one all but the time since the first part."""
    done = Outcome(overlapping(bandwidth_gb_s, chunk=100, overlap=overlap), [RequestSpec("a", 0.0, 400, 5)])
    num_parts = NUM_LAYERS if overlap == "by_layer" else 1
    chunk_s = 100 * MB / (bandwidth_gb_s * 1e9)
    hidden_s = (4 - 1 / num_parts) * prompt_s(100)
    left_s = chunk_s / num_parts if chunk_s <= prompt_s(100) else 4 * chunk_s - hidden_s
    assert done.delay("a") == pytest.approx(left_s, rel=1e-9)


def test_the_latency_of_the_links_is_hidden_for_all_layers_but_the_last() -> None:
    mapping = overlapping(100.0) | {"links": {"bandwidth_gb_s": 100.0, "latency_s": 0.003}}
    done = Outcome(mapping, [RequestSpec("a", 0.0, 400, 5)])
    assert done.delay("a") == pytest.approx(0.003 + 0.004 / NUM_LAYERS)


def test_prompts_below_the_threshold_are_sent_when_they_are_computed() -> None:
    specs = [RequestSpec("short", 0.0, 399, 2), RequestSpec("long", 1.0, 400, 2)]
    done = Outcome(overlapping(overlap_min_tokens=400), specs)
    assert done.ways.of["short"].sent == done.ways.of["short"].held
    assert done.delay("short") == pytest.approx(0.0399)
    assert done.ways.of["long"].sent == 1.0
    assert done.delay("long") == pytest.approx(0.04 / NUM_LAYERS)


def test_two_prompts_of_a_step_share_the_link_of_their_source() -> None:
    """Both send a layer of 10 MB every 1/32 of 50 ms over 1 GB/s: the link is never idle from the first layer on."""
    done = Outcome(overlapping(1.0), [RequestSpec(name, 0.0, 200, 2) for name in "ab"])
    left_s = 0.4 - prompt_s(400) * (1 - 1 / NUM_LAYERS)
    assert [done.delay(name) for name in "ab"] == [pytest.approx(left_s)] * 2


def test_what_either_cache_holds_is_sent_at_once_or_not_at_all() -> None:
    content = [PromptContent((("shared", 320), (name, 80))) for name in "abc"]
    whole = {"moves": "whole_prompt"}
    for rules, num_moved, left_s in (({}, 80, 0.008 / NUM_LAYERS), (whole, 400, 0.04 - prompt_s(80))):
        specs = [RequestSpec(f"r{n}", float(n), 400, 2, content=one) for n, one in enumerate(content)]
        done = Outcome(overlapping(**rules), specs)
        # The source computes 80 of the 400 tokens; the target lacks these, or all are sent, those of the cache first.
        assert done.ways.of["r1"].held == pytest.approx(1.0 + prompt_s(80))
        assert done.ways.of["r1"].num_moved == num_moved
        assert done.delay("r1") == pytest.approx(left_s)


# Ends before the time


def test_a_preempted_prompt_is_sent_anew() -> None:
    """Three chunks of both fill the source's 20 blocks; for a's last one b gives its blocks up."""
    mapping = overlapping(1.0)
    mapping["scheduling"] = {**POLICIES, "replica_scheduler": "hands_off"}
    mapping["pools"] = {
        "prefill": {"replica": {"memory": {"num_blocks": 20, "reservation": "incremental"}}},
        "decode": {},
    }
    specs = [RequestSpec("a", 0.0, 200, 2), RequestSpec("b", 0.0, 200, 2)]
    done = Outcome(mapping, specs, registry=registry_of(lambda request: False))
    assert done.shown("request_id", "outcome", "reason", "num_tokens") == [
        ("a", "done", "", 200),
        ("b", "called_off", PREEMPTED, 200),
        ("b", "done", "", 200),
    ]
    assert done.rows[1]["held_at"] != done.rows[1]["held_at"], "it was not held yet"
    assert done.ways.of["b"].reason is EndReason.STOP


def test_a_request_that_is_aborted_while_it_is_sent_gives_the_link_back() -> None:
    specs = [RequestSpec("a", 0.0, 400, 2), RequestSpec("b", 0.0, 400, 2)]
    mapping = overlapping(1.0, chunk=400)
    done = Outcome(mapping, specs, aborts=[(0.08, "b")])
    assert done.ways.of["b"].reason is EndReason.ABORTED
    assert done.shown("request_id", "outcome", "reason") == [
        ("a", "done", ""),
        ("b", "ended", "aborted: taken back by the client"),
    ]
    # a has the link to itself until 50 ms + 1 / 32 of b's step and from the end of that step on, when b has gone.
    alone = Outcome(mapping, specs[:1]).delay("a")
    assert done.delay("a") == pytest.approx(alone + prompt_s(400) * (1 - 1 / NUM_LAYERS) / 2, rel=1e-6)


def test_a_lost_target_lets_the_prompt_go_whole_to_another() -> None:
    mapping = overlapping(chunk=100)
    mapping["pools"] = {"prefill": {}, "decode": {"num_replicas": 2}}
    done = Outcome(mapping, [RequestSpec("a", 0.0, 400, 5)], losses=[(0.05, 1)])
    assert done.ways.of["a"].reason is EndReason.STOP
    assert done.shown("target_replica_id", "outcome", "reason") == [(1, "called_off", KV_LOST), (2, "done", "")]
    assert done.ways.of["a"].sent == done.ways.of["a"].held
    assert done.delay("a") == pytest.approx(0.04)


def test_a_lost_source_begins_again_elsewhere() -> None:
    mapping = overlapping(chunk=100)
    mapping["pools"] = {"prefill": {"num_replicas": 2}, "decode": {}}
    done = Outcome(mapping, [RequestSpec("a", 0.0, 400, 5)], losses=[(0.05, 0)])
    assert done.shown("source_replica_id", "start_at", "outcome", "reason") == [
        (0, 0.0, "called_off", KV_LOST),
        (1, 0.05, "done", ""),
    ]
    assert done.ways.of["a"].held == pytest.approx(0.05 + 4 * prompt_s(100))


@pytest.mark.parametrize("moves", ["missing", "whole_prompt"])
def test_a_request_that_leaves_in_the_middle_of_its_prompt_sends_what_is_computed(moves: str) -> None:
    def at_half(request: RequestView) -> bool:
        return 2 * request.num_computed_tokens == request.num_prompt_tokens

    mapping = overlapping(100.0, moves=moves)
    mapping["scheduling"] = {**POLICIES, "replica_scheduler": "hands_off"}
    done = Outcome(mapping, [RequestSpec("a", 0.0, 400, 5)], registry=registry_of(at_half))
    assert done.shown("num_tokens", "num_bytes", "outcome") == [(200, 200_000_000, "done")]
    assert done.ways.of["a"].held == pytest.approx(4 * prompt_s(50))
    assert done.delay("a") == pytest.approx(0.0005 / NUM_LAYERS)
    assert done.ways.of["a"].reason is EndReason.STOP


@pytest.mark.parametrize("overlap", ["none", "by_layer"])
@pytest.mark.parametrize("target", [1, 2])
def test_a_prompt_migrates_only_to_where_it_is_not_to_go_and_before_it_is_sent(overlap: str, target: int) -> None:
    """It is to go to replica 1 when it is computed; the blocks that are set aside there are free once it has migrated."""

    def away(alive: dict[str, RequestView], now: float) -> list[Move]:
        return [Move(one, target, "") for one in alive.values()]

    mapping = overlapping(100.0, chunk=100, overlap=overlap)
    mapping["pools"] = {"prefill": {}, "decode": {"num_replicas": 2}}
    mapping["scheduling"] = {**POLICIES, "replicaset_scheduler": "mover"}
    done = Outcome(mapping, [RequestSpec("a", 0.0, 400, 5)], registry=moving_at([0.05], away))
    assert done.ways.of["a"].reason is EndReason.STOP
    last = ("migration", 2) if target == 2 and overlap == "none" else ("hand_off", 1)
    assert done.shown("kind", "target_replica_id")[-1] == last
    assert done.rows[-1]["outcome"] == "done"


# What is shown


def test_times_in_which_a_request_stands_still_do_not_count_what_was_hidden() -> None:
    done = Outcome(overlapping(4.0), [RequestSpec("a", 0.0, 400, 5)])
    (row,) = done.rows
    assert row["start_at"] == 0.0 < row["held_at"]
    stays = Stays(done.table)
    left_s = 0.1 - prompt_s(400) * (1 - 1 / NUM_LAYERS)
    assert (stays.held_s[0], stays.transfer_s[0]) == (0.0, pytest.approx(left_s))
    (stop,) = (one for one in stops_of(done.rows) if one.name.startswith("in transfer"))
    assert (stop.start, stop.end) == (round(1e9 * row["held_at"]), round(1e9 * row["arrived_at"]))
    assert not any(one.name == "held" for one in stops_of(done.rows))
    events = list(transfer_events(done.rows, {("default", 0): 1, ("default", 1): 2}, 0.0, 10.0))
    spans = [one for one in events if one["ph"] == "X"]
    assert [(one["pid"], one["ts"], one["dur"]) for one in spans] == [
        (pid, 0.0, pytest.approx(1e6 * row["arrived_at"])) for pid in (1, 2)
    ]


# What is refused


@pytest.mark.parametrize("reserve", ["after_prompt", "at_admission"])
def test_without_blocks_of_the_target_nothing_can_be_sent(reserve: str) -> None:
    with pytest.raises(
        ConfigError, match=f"overlap: by_layer needs the target's blocks before_prompt .got reserve: {reserve}"
    ):
        config_from_mapping(overlapping(reserve=reserve))


def test_layers_that_nobody_knows_are_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"hand_off\.num_layers: is missing, and the latency model does not know"):
        prepared(overlapping(num_layers=None))
    prepared(overlapping(num_layers=None, overlap="by_chunk"))


def test_a_model_says_how_many_layers_it_has() -> None:
    mapping = overlapping(num_layers=None)
    latency = {"type": "roofline", "model": "llama-3.1-8b", "device": "h100-sxm"}
    mapping["backend"] = {"simulator": {"latency": latency}}
    run, _, _ = prepared(mapping)
    (replicaset,) = run.controller.replicasets.values()
    assert replicaset.hand_off is not None
    assert replicaset.hand_off.num_parts == 32


def test_pipeline_stages_are_refused() -> None:
    mapping = overlapping()
    mapping["replica"] = mapping["replica"] | {"pipeline_stages": 2}
    with pytest.raises(
        ConfigError, match=r"hand_off\.overlap: KV is not sent while its prompt goes through pipeline stages"
    ):
        prepared(mapping)
