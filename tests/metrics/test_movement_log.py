"""Rows of the transfers table, event by event: whatever happens on the way, every stretch of time is in one row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.metrics.test_movement_conservation import Observed
from tests.sim.split_pools import settings as split_settings
from tests.sim.split_pools import simulate
from tests.sim.test_sim_migration import mixed, registry_of
from vajra_py.contract import Move, RequestView
from vajra_py.contract.observer import EndReason
from vajra_py.metrics.tables.movement_log import GIVEN_UP, MovementLog, Paths
from vajra_py.metrics.tables.transfers import TransfersBuilder, movement_columns
from vajra_py.runtime.records.input_log import Failure
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.transfers import KV_LOST, REQUEST_ENDED
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.workload import RequestSpec

PATHS = {"default": Paths(("prefill", "decode", "decode"), 10, has_own_links=True, has_shared_link=True)}
REQUEST = cast("RequestView", SimpleNamespace(request_id="a", index=3, replicaset="default"))


def told(*events: tuple[str, Any]) -> list[dict[str, Any]]:
    """Rows of a log that is told these (event, arguments), which end with the time."""
    log = MovementLog(PATHS)
    for name, *arguments in events:
        about = () if name in ("replica_lost", "cache_reset", "run_end") else (REQUEST,)
        getattr(log, f"on_{name}")(*about, *arguments)
    log.on_run_end(100.0)
    return cast("list[dict[str, Any]]", log.table.to_table().to_pylist())


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Target, times (None: never), outcome and reason."""
    times = ("held_at", "start_at", "end_at", "arrived_at", "over_at")
    return [
        (row["target_replica_id"], *(None if row[key] != row[key] else row[key] for key in times), row["outcome"], row["reason"])
        for row in rows
    ]  # fmt: skip


HELD, SENT, THERE, ARRIVED = (
    ("held", 0, 1.0),
    ("transfer", 0, 1, 50, 2.0),
    ("transfer_end", 0, 1, "", 3.0),
    ("arrived", 0, 1, 4.0),
)


def test_a_hand_off_is_one_row() -> None:
    rows = told(HELD, SENT, THERE, ARRIVED, ("admitted", 1, 6.0))
    assert shown(rows) == [(1, 1.0, 2.0, 3.0, 4.0, 6.0, "done", "")]
    facts = {
        key: rows[0][key] for key in ("kind", "stage", "is_live", "num_tokens", "num_bytes", "link", "target_pool")
    }
    assert facts == {
        "kind": "hand_off", "stage": 1, "is_live": False, "num_tokens": 50, "num_bytes": 500, "link": "out 0, in 1, shared", "target_pool": "decode",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([HELD], (-1, 1.0, None, None, None, 5.0, "ended", "aborted: gone")),
        ([HELD, SENT, ("transfer_end", 0, 1, REQUEST_ENDED, 5.0)], (1, 1.0, 2.0, None, None, 5.0, "ended", "aborted: gone")),
        ([HELD, SENT, THERE], (1, 1.0, 2.0, 3.0, None, 5.0, "ended", "aborted: gone")),
        ([HELD, SENT, THERE, ARRIVED], (1, 1.0, 2.0, 3.0, 4.0, 5.0, "ended", "aborted: gone")),
    ],
)  # fmt: skip
def test_a_request_may_end_at_any_point_of_its_way(events: list[Any], expected: tuple[Any, ...]) -> None:
    assert shown(told(*events, ("ended", EndReason.ABORTED, "gone", 5.0))) == [expected]
    assert shown(told(*events))[0][-3:] == (100.0, "unfinished", "")


def test_a_lost_target_is_a_row_and_the_hold_goes_on() -> None:
    again = [("transfer", 0, 2, 50, 7.0), ("transfer_end", 0, 2, "", 8.0), ("arrived", 0, 2, 8.0), ("admitted", 2, 9.0)]
    cut = (1, 1.0, 2.0, None, None, 2.5, "called_off", KV_LOST)
    assert shown(told(HELD, SENT, ("transfer_end", 0, 1, KV_LOST, 2.5), *again)) == [
        cut, (2, 2.5, 7.0, 8.0, 8.0, 9.0, "done", ""),
    ]  # fmt: skip
    # Its KV was there, and would have been taken when the target's step ended.
    taken = (1, 1.0, 2.0, 3.0, None, 3.5, "called_off", KV_LOST)
    assert shown(told(HELD, SENT, THERE, ("replica_lost", "default", 1, "", 3.5), *again))[0] == taken
    assert shown(told(HELD, SENT, THERE, ("cache_reset", "default", 1, (), 3.5), *again))[0] == taken
    assert shown(told(HELD, SENT, THERE, ("replica_lost", "other", 1, "", 3.5)))[0][-2] == "unfinished"


def test_kv_that_is_lost_or_given_up_is_computed_again() -> None:
    there = (1, 1.0, 2.0, 3.0, 4.0, 5.0, "recomputed")
    assert shown(told(HELD, SENT, THERE, ARRIVED, ("preempted", "recompute", 5.0))) == [(*there, GIVEN_UP)]
    assert shown(told(HELD, SENT, THERE, ARRIVED, ("requeued", 1, 5.0))) == [(*there, KV_LOST)]
    assert shown(told(HELD, SENT, THERE, ARRIVED, ("cache_reset", "default", 1, (), 5.0))) == [(*there, KV_LOST)]
    held = (-1, 1.0, None, None, None, 5.0, "recomputed", KV_LOST)
    assert shown(told(HELD, ("cache_reset", "default", 0, (), 5.0))) == [held]
    assert shown(told(HELD, ("requeued", 0, 5.0))) == [held]


def test_a_request_that_stays_has_a_row_only_if_it_was_held_for_some_time() -> None:
    assert told(HELD, ("stayed", 0, 1.0)) == []
    assert shown(told(HELD, ("stayed", 0, 5.0))) == [(-1, 1.0, None, None, None, 5.0, "stayed", "")]


MIGRATES = ("migration_begun", 0, 1, "hot", 0.5)


def test_a_migration_has_a_row_for_each_copy_and_one_for_its_last_stage() -> None:
    rows = told(
        MIGRATES,
        ("transfer", 0, 1, 80, 0.5),
        ("transfer_end", 0, 1, "", 0.75),
        ("held", 0, 1.0),
        ("transfer", 0, 1, 8, 1.0),
        ("transfer_end", 0, 1, "", 1.25),
        ("arrived", 0, 1, 1.25),
        ("admitted", 1, 1.5),
    )
    assert shown(rows) == [
        (1, None, 0.5, 0.75, None, 0.75, "done", "hot"),
        (1, 1.0, 1.0, 1.25, 1.25, 1.5, "done", "hot"),
    ]
    assert [(row["kind"], row["stage"], row["is_live"]) for row in rows] == [
        ("migration", 1, True),
        ("migration", 2, False),
    ]


@pytest.mark.parametrize("is_copying", [True, False])
def test_a_migration_that_is_called_off_says_why_once(is_copying: bool) -> None:
    copy = [("transfer", 0, 1, 80, 0.5), ("transfer_end", 0, 1, "full", 0.75)] if is_copying else []
    rows = told(MIGRATES, *copy, ("migration_aborted", 0, 1, "full", 0.75))
    assert shown(rows) == [(1, None, 0.5 if is_copying else None, None, None, 0.75, "called_off", "full")]
    assert (
        told(MIGRATES, ("preempted", "recompute", 0.6), ("migration_aborted", 0, 1, "preempted", 0.75))[0]["reason"]
        == "preempted"
    )


def test_a_move_of_a_waiting_request_is_a_row_without_kv() -> None:
    (row,) = told(("moved", 0, None, "crowded", 2.0))
    assert (row["kind"], row["source_replica_id"], row["target_replica_id"], row["target_pool"]) == ("move", 0, -1, "")
    assert (row["num_bytes"], row["link"], row["reason"], row["over_at"]) == (0, "", "crowded", 2.0)


def test_columns_of_requests_are_of_the_rows_that_arrived() -> None:
    log = MovementLog(PATHS)
    for index, target in ((3, 1), (5, 2)):
        one = cast("RequestView", SimpleNamespace(request_id=str(index), index=index, replicaset="default"))
        log.on_held(one, 0, 1.0)
        log.on_transfer(one, 0, target, 7, 2.0)
        if index == 5:
            log.on_transfer_end(one, 0, target, "", 3.0)
            log.on_arrived(one, 0, target, 4.0)
    log.on_run_end(10.0)
    columns = movement_columns(log.table.to_table(), np.array([1, 3, 5, 9]))
    assert columns["num_hand_offs"].tolist() == [0, 0, 1, 0]
    assert columns["moved_bytes"].tolist() == [0, 0, 70, 0]
    assert columns["target_replica_id"].tolist() == [-1, -1, 2, -1]
    assert columns["target_pool"] == ["", "", "decode", ""]
    np.testing.assert_array_equal(columns["held_s"], [np.nan, 1, 1, np.nan])
    np.testing.assert_array_equal(columns["transfer_s"], [np.nan, 8, 2, np.nan])
    np.testing.assert_array_equal(columns["target_wait_s"], [np.nan, np.nan, 6, np.nan])
    whole = TransfersBuilder()
    whole.take(log.table.to_table())
    assert repr(whole.to_table().to_pylist()) == repr(log.table.to_table().to_pylist())
    assert movement_columns(TransfersBuilder().to_table(), np.array([1]))["held_s"].tolist() == pytest.approx(
        [np.nan], nan_ok=True
    )


def test_a_target_that_fails_before_it_takes_the_kv_is_seen() -> None:
    """Its step is long: the KV is there, and waits for the boundary at which the replica fails."""
    hand_off = {"kv_bytes_per_token": 1_000_000, "takes_effect": "at_step_boundary"}
    pools = {"prefill": {}, "decode": {"num_replicas": 2}}
    specs = [RequestSpec("first", 0.0, 100, 60), RequestSpec("second", 0.0, 100, 60), RequestSpec("a", 0.1, 100, 20)]
    mapping = split_settings(pools=pools, hand_off=hand_off)
    (way,) = [way for name, way in simulate(mapping, specs).ways.items() if name == "a"]
    assert way.sent is not None
    assert way.arrived is not None
    assert way.target is not None
    there_at = way.sent + 100 * 1e6 / 10e9
    assert there_at < way.arrived  # a step of the target was in flight
    observed = Observed(mapping)
    tick = to_ticks((there_at + way.arrived) / 2)
    observed.simulator.inject(tick, Phase.FAILURE, Failure(tick, "default", way.target, "lost", max_reruns=3))
    observed.go(specs)
    observed.check()
    rows = [row for row in observed.transfers.to_pylist() if row["request_id"] == "a"]
    assert [(row["outcome"], row["reason"]) for row in rows] == [("called_off", KV_LOST), ("done", "")]
    assert {row["target_replica_id"] for row in rows} == {1, 2}


def test_reasons_of_a_scheduler_are_kept_with_its_moves() -> None:
    """One request that waits is called to the other replica, and one that runs goes there live."""

    def choose(alive: dict[str, RequestView], now: float) -> list[Move]:
        return [Move(one, 1, "hot" if one.is_resident else "crowded") for one in alive.values() if one.replica_id == 0]

    specs = [RequestSpec(name, 0.0, 600, 60, max_tokens=60) for name in "abc"]
    observed = Observed(mixed(migration={"max_per_replica": 3}), registry_of([0.2], choose))
    observed.go(specs)
    observed.check()
    reasons = {(row["kind"], row["reason"]) for row in observed.transfers.to_pylist() if row["outcome"] == "done"}
    assert reasons == {("migration", "hot"), ("move", "crowded")}
