"""Times of requests that move: held, in transfer and waiting at the target, beside what the state machine of requests says."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.split_pools import inject_faults, prepared
from tests.sim.split_pools import settings as split_settings
from tests.sim.test_sim_hand_off_machine import FAULTS, HAND_OFF, LINKS, requests
from tests.sim.test_sim_migration import mixed, registry_of
from vajra_py.contract import Move, RequestView
from vajra_py.metrics.tables.further_columns import FurtherColumns
from vajra_py.metrics.tables.movement_log import MovementLog, paths_of
from vajra_py.metrics.tables.recorder import Recorder
from vajra_py.metrics.tables.transfers import MOVE, Stays
from vajra_py.plugins import Registry
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.support.clock import to_seconds
from vajra_py.workload import RequestSpec

AWAY = (RequestState.HELD, RequestState.REMOTE)
"""A request's KV is at its source, or on its way."""


class Observed:
    """A run with its tables, and the time that each request spent in each state."""

    def __init__(self, mapping: Mapping[str, Any], registry: Registry | None = None) -> None:
        self.run, self.simulator, _ = prepared(mapping, registry=registry)
        controller = self.run.controller
        self._log = MovementLog(paths_of(controller))
        self._recorder = Recorder(
            controller.num_blocks_of, steps=False, further=FurtherColumns(movement=self._log.table)
        )
        controller.watch((self._recorder, self._log))
        self.spent: dict[int, dict[RequestState, float]] = defaultdict(lambda: defaultdict(float))
        self._since: dict[int, float] = {}

    def go(self, specs: Sequence[RequestSpec]) -> None:
        move_to = Request.move_to

        def noted(request: Request, state: RequestState) -> None:
            now = to_seconds(self.simulator._driver.now)
            since = self._since.get(request.index, request.arrived_at)
            self.spent[request.index][request.state] += now - since
            self._since[request.index] = now
            move_to(request, state)

        with patch.object(Request, "move_to", noted):
            self.simulator.run(specs)
        assert self.run.controller.num_alive == 0
        self._log.on_run_end(to_seconds(self.simulator._driver.now))
        self.requests = self._recorder.requests.to_table().to_pylist()
        self.transfers = self._log.table.to_table()

    def check(self) -> None:
        """Every second of every request is in one place, and in the place where it was."""
        for row in self.requests:
            spent = self.spent[row["index"]]
            away_s = known(row["held_s"]) + known(row["transfer_s"])
            assert away_s == pytest.approx(sum(spent[state] for state in AWAY), abs=1e-9)
            assert known(row["target_wait_s"]) == pytest.approx(spent[RequestState.ARRIVED], abs=1e-9)
            elsewhere_s = sum(time for state, time in spent.items() if state not in (*AWAY, RequestState.ARRIVED))
            total_s = row["ended_at"] - row["arrived_at"]
            assert elsewhere_s + away_s + known(row["target_wait_s"]) == pytest.approx(total_s, abs=1e-9)
        self._check_rows()

    def _check_rows(self) -> None:
        """The requests table is the sum of the rows of the transfers table, whose times are in order."""
        stays, rows = Stays(self.transfers), self.transfers.to_pylist()
        for name in ("held_s", "transfer_s", "target_wait_s"):
            seconds = getattr(stays, name)
            assert not (seconds < 0).any()
            for request in self.requests:
                own = [one for one, row in zip(seconds, rows, strict=True) if row["index"] == request["index"]]
                assert known(request[name]) == pytest.approx(float(np.nansum(own)), abs=1e-9)
        for row in rows:
            ticks = [row[name] for name in ("held_at", "start_at", "end_at", "arrived_at", "over_at")]
            for each in (
                ticks[1:],
                [ticks[0], *ticks[2:]],
            ):  # what is sent while it is computed leaves before it is held
                present = [one for one in each if one == one]
                assert present == sorted(present)
            assert row["source_replica_id"] != row["target_replica_id"] or row["kind"] == MOVE
            assert (row["outcome"] == "done") <= (row["end_at"] == row["end_at"])
        begins = [min(one for one in (row["held_at"], row["start_at"], row["over_at"]) if one == one) for row in rows]
        assert begins == sorted(begins)


def known(seconds: float) -> float:
    """Seconds, none where it is not a number."""
    return seconds if seconds == seconds else 0.0


@settings(max_examples=60)
@given(
    specs=requests(),
    hand_off=HAND_OFF,
    links=LINKS,
    num_blocks=st.sampled_from([20, 30, 200]),
    faults=FAULTS,
)
def test_held_transfer_and_wait_add_up_with_arrival_to_end_over_random_runs(
    specs: list[RequestSpec],
    hand_off: dict[str, Any],
    links: dict[str, Any],
    num_blocks: int,
    faults: list[tuple[str, float, int]],
) -> None:
    decode = {"num_replicas": 2, "replica": {"memory": {"num_blocks": num_blocks}}}
    pools = {"prefill": {"num_replicas": 2}, "decode": decode}
    observed = Observed(split_settings(pools=pools, hand_off=hand_off, links=links))
    inject_faults(observed.simulator, faults, 4)
    observed.go(specs)
    observed.check()
    for row in observed.transfers.to_pylist():
        assert (row["source_pool"], row["kind"]) == ("prefill", "hand_off")
        assert row["target_pool"] == ("decode" if row["target_replica_id"] >= 0 else "")
        assert row["num_bytes"] == 1_000_000 * row["num_tokens"]


@pytest.mark.parametrize("seed", range(25))
def test_migrations_and_moves_add_up_too(seed: int) -> None:
    draw = random.Random(seed)
    times = [round(draw.uniform(0, 2), 3) for _ in range(20)]
    specs = [
        RequestSpec(f"r{one}", round(draw.uniform(0, 1), 3), draw.randint(1, 600), draw.randint(1, 120))
        for one in range(12)
    ]

    def choose(alive: dict[str, RequestView], now: float) -> Iterable[Move]:
        up = [one for one in (0, 1) if observed.run.controller.replicasets["default"].is_up(one)]
        for one in alive.values():
            elsewhere = [other for other in up if other != one.replica_id]
            if one.state.value in ("running", "waiting", "preempted") and elsewhere and one.replica_id >= 0:  # type: ignore[attr-defined]
                yield Move(one, elsewhere[0])

    mapping = mixed(migration={"last_stage_max_blocks": 2, "max_per_replica": 3})
    observed = Observed(mapping, registry_of(times, choose))
    faults = [(draw.choice(["abort", "fail"]), round(draw.uniform(0, 2), 3), draw.randrange(12)) for _ in range(4)]
    inject_faults(observed.simulator, faults, 2)
    observed.go(sorted(specs, key=lambda one: one.arrived_at))
    observed.check()
    rows = observed.transfers.to_pylist()
    assert {row["kind"] for row in rows} <= {"migration", "move"}
    live = [row for row in rows if row["is_live"]]
    assert all(row["held_at"] != row["held_at"] for row in live)
    for request in observed.requests:
        own = [row for row in rows if row["index"] == request["index"]]
        assert request["num_moves"] == sum(row["kind"] == "move" for row in own)
        assert request["num_migrations"] == sum(row["kind"] == "migration" and row["arrived_at"] > 0 for row in own)
        whole = [row for row in own if row["end_at"] == row["end_at"]]
        assert request["moved_tokens"] == sum(row["num_tokens"] for row in whole)
