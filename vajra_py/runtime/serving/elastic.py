"""Start and stop replicas according to the targets of their replicasets' scalers.

A change of a replica's state is an input of the run: it is decided by a scaler or, in a replay, read from the
recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

from vajra_py.contract.views import ReplicaState
from vajra_py.errors import PolicyError
from vajra_py.runtime.records.input_log import Failure, ReplicaChange, Restart
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.movement import Movement
from vajra_py.runtime.serving.scaling import Start, place_shared
from vajra_py.runtime.serving.services import DriverServices


class Elasticity(Generic[R]):
    """Replicas that start, drain and go down."""

    def __init__(self, movements: Mapping[str, Movement[R]], driver: DriverServices[R], *, asks: bool) -> None:
        """Schedule the first call of each scaler. `asks` is False in a replay, which applies recorded changes without
        calling scalers.
        """
        self._movements = movements
        self._driver = driver
        self._asks = asks
        self._asked_soon: set[str] = set()
        """Replicasets whose scaler is called later in this tick."""
        self.draining: set[int] = set()
        """Ranks of draining replicas, each of which goes down when it has no request left."""
        for name, replicaset in driver.controller.replicasets.items():
            if replicaset.scaling is not None:
                self.ask_soon(name)

    def ask_soon(self, name: str) -> None:
        """Schedule a call of a replicaset's scaler later in this tick."""
        if name not in self._asked_soon:
            self._asked_soon.add(name)
            self._driver.events.push(self._driver.now, Phase.SCALING, name)

    def happen(self, what: Start | ReplicaChange | str) -> None:
        """Handle an event of `Phase.SCALING`."""
        if isinstance(what, str):
            self._asked_soon.discard(what)
            controller = self._driver.controller
            controller.notify_states_once(controller.replicasets[what], self._driver.now)
            self._ask(what)
        else:
            self._change(what.change if isinstance(what, Start) else what)

    def wake(self, name: str, key: str) -> None:
        """Pass a wake-up to a replicaset's scaler, and schedule a call of the scaler later in this tick. Raises
        `PolicyError`.
        """
        scaling = self._driver.controller.replicasets[name].scaling
        if scaling is not None and not scaling.is_broken:
            scaling.on_wake(key, self._driver.now)
            self.ask_soon(name)

    def may_happen(self, what: Failure | Restart) -> bool:
        """Return True if a failure or restart is to be handled; without a scaler, always return True.

        With a scaler, return False if the failed replica is down or lost already, or if the replica to restart is not
        lost; else schedule a call of the scaler, and return True.
        """
        replicaset = self._driver.controller.replicasets[what.replicaset]
        if replicaset.scaling is None:
            return True
        is_lost, state = what.replica_id in replicaset.lost, replicaset.state_of(what.replica_id)
        if (not is_lost and state is ReplicaState.DOWN) or is_lost is isinstance(what, Failure):
            return False
        self.ask_soon(what.replicaset)
        return True

    def _ask(self, name: str) -> None:
        scaling = self._driver.controller.replicasets[name].scaling
        if scaling is None or scaling.is_broken or not self._asks:
            return
        self._driver.sync(name)
        try:
            changes = scaling.ask(self._driver.now)
        except PolicyError as error:
            self._driver.isolate(name, error)
            return
        for change in changes:
            self._change(change)

    def _change(self, change: ReplicaChange) -> None:
        """Set the state of a replica; move its requests, wake it or cancel its steps, as the new state requires."""
        driver, name, state = self._driver, change.replicaset, ReplicaState(change.state)
        driver.record(change)
        one, scaling = driver.replica(name, change.replica_id), driver.controller.replicasets[name].scaling
        driver.interrupt(name)
        try:
            if state is ReplicaState.DRAINING:
                self._drain(one)
            else:
                driver.controller.change_replica(one.replica, state, driver.now)
            if state is ReplicaState.UP:
                self._take_up(one)
        except PolicyError as error:
            driver.isolate(name, error)
            return
        if state is ReplicaState.STARTING and scaling is not None and self._asks:
            start = scaling.begin_start(change.replica_id, driver.now)
            driver.events.push(start.change.tick, Phase.SCALING, start)
        elif state is ReplicaState.UP:
            driver.wake(one)
            self.ask_soon(name)
        elif state is ReplicaState.DOWN:
            driver.call_off(one, is_lost=True)

    def _take_up(self, one: R) -> None:
        """Let a replica that has come up take requests. Raises `PolicyError`."""
        name = one.replica.replicaset
        self._driver.call_off(one)
        movement = self._movements.get(name)
        if movement is not None:
            movement.step_ended(one, ())
            self.place_shared(name)

    def place_shared(self, name: str) -> None:
        """Bind the requests of the shared queue to replicas if a prompt is computed only after blocks were reserved on
        the replica that continues the request. Raises `PolicyError`.

        A replica that pulled a prompt would compute it without reserved blocks. Requests with and without reserved
        blocks could then wait for each other.
        """
        replicaset = self._driver.controller.replicasets[name]
        if replicaset.hand_off is not None and replicaset.hand_off.reserves_first and len(replicaset.shared):
            self._driver.announce_all(name, place_shared(replicaset, self._driver.now))

    def _drain(self, one: R) -> None:
        """Stop a replica from taking further requests; its requests that have not begun move to other replicas. Raises
        `PolicyError`.
        """
        name = one.replica.replicaset
        movement = self._movements.get(name)
        if movement is not None:
            movement.hand_offs.recall_from(one)
        self.draining.add(one.rank)  # first: if the scheduler fails below, the replica goes down all the same
        moved = self._driver.controller.change_replica(one.replica, ReplicaState.DRAINING, self._driver.now)
        self._driver.announce_all(name, moved)
        if movement is not None:
            scaling = self._driver.controller.replicasets[name].scaling
            by_migration = scaling is not None and scaling.drains_by_migration(one.replica.replica_id)
            movement.drain(one, by_migration=by_migration)
        self.goes_down(one)

    def goes_down(self, one: R) -> bool:
        """Take a draining replica down if it has no request left; return True if it went down."""
        if one.rank not in self.draining or not one.replica.is_empty:
            return False
        name = one.replica.replicaset
        if name in self._movements and self._movements[name].involves(one):
            return False
        self.draining.discard(one.rank)
        self._driver.controller.change_replica(one.replica, ReplicaState.DOWN, self._driver.now)
        self._driver.call_off(one, is_lost=True)
        self.ask_soon(name)
        return True

    def end_drains(self, name: str) -> None:
        """Take down the draining replicas of a replicaset that have no request left."""
        if self.draining:
            for one in self._driver.replicas_of(name):
                self.goes_down(one)
