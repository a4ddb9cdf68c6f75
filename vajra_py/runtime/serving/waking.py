"""Wake policies at the times that they set, or at the recorded times in a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic

from vajra_py.contract import Layer
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError
from vajra_py.plugins import ADMISSION, SCALER
from vajra_py.runtime.records.input_log import WakeUp
from vajra_py.runtime.serving.alarms import Alarm, Sleeper, wake_tick
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.elastic import Elasticity
from vajra_py.runtime.serving.movement import Movement
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.support.clock import to_seconds

MAX_FRUITLESS_WAKES = 100_000
"""Maximum number of consecutive wake-ups while nothing else can happen; after that, the policy counts as stuck."""


class PolicyWaker(Generic[R]):
    """Wake-ups of the policies of a run."""

    def __init__(
        self,
        movements: Mapping[str, Movement[R]],
        elasticity: Elasticity[R],
        driver: DriverServices[R],
        is_all_that_is_left: Callable[[], bool] | None,
    ) -> None:
        """Create the wake-ups. `is_all_that_is_left`: function that returns True if the remaining events advance
        requests only if a policy acts; None if requests may arrive at any time.
        """
        self._movements = movements
        self._elasticity = elasticity
        self._driver = driver
        self._is_all_that_is_left = is_all_that_is_left
        self._idlers: dict[int, Sleeper] = {}
        """`Sleeper` of each replica that its scheduler has left idle on purpose, by rank."""
        self._num_fruitless = 0

    def leave_idle(self, one: R, time_s: float) -> None:
        """Call the scheduler of an idle replica again at a time (`BatchBuilder.idle_until`)."""
        sleeper, alarms = self._idlers.get(one.rank), self._driver.controller.alarms
        parts = one.replica.parts
        if sleeper is None or sleeper.policy is not parts.policy:
            if sleeper is not None:  # the policy was replaced
                alarms.cancel(sleeper, None)
            where = one.replica.replicaset, Layer.REPLICA_SCHEDULER.value, parts.policy_name
            sleeper = self._idlers[one.rank] = Sleeper(*where, one.replica.replica_id, parts.policy)
        alarms.set(sleeper, None, wake_tick(time_s))

    def wake(self, what: Alarm | WakeUp) -> None:
        """Handle an event of `Phase.WAKE`."""
        if isinstance(what, WakeUp):
            self._wake(what, self._policy_at(what))
            return
        sleeper, driver = what.sleeper, self._driver
        driver.controller.alarms.rang(what)
        entry = WakeUp(driver.now, sleeper.replicaset, sleeper.slot, sleeper.index, what.key)
        if not self._is_in_force(sleeper, entry):
            return
        try:
            sleeper.count(driver.now)
            self._check_fruitless(sleeper)
            # A scaler's wake-up is not logged: a replay applies the logged changes of replicas' states instead.
            if sleeper.slot == SCALER.key:
                self._elasticity.wake(sleeper.replicaset, what.key or "")
                return
        except PolicyError as error:
            if sleeper.slot == ADMISSION.key and driver.controller.gate is not None:
                driver.controller.gate.error = error
            driver.isolate(sleeper.replicaset, error)
            return
        self._wake(entry, sleeper.policy)

    def _is_in_force(self, sleeper: Sleeper, entry: WakeUp) -> bool:
        """Return False if the policy that set the wake-up was replaced by another one."""
        if entry.key is None or entry.slot == SCALER.key:
            return True
        is_fixed = (
            entry.slot != ADMISSION.key and self._driver.controller.replicasets[entry.replicaset].policies is None
        )
        return is_fixed or sleeper.policy is self._policy_at(entry)

    def _policy_at(self, entry: WakeUp) -> object:
        controller = self._driver.controller
        if entry.slot == ADMISSION.key:
            return None if controller.gate is None else controller.gate.policy
        policies = controller.replicasets[entry.replicaset].policies
        assert policies is not None
        return policies.layer(Layer(entry.slot)).made[entry.index]

    def _check_fruitless(self, sleeper: Sleeper) -> None:
        """Raise `PolicyError` if too many wake-ups in a row had no effect while nothing else could happen."""
        if self._is_all_that_is_left is None:
            return
        controller = self._driver.controller
        is_all = self._is_all_that_is_left() and not any(one.num_in_flight for one in controller.replicas())
        self._num_fruitless = self._num_fruitless + 1 if is_all else 0
        if self._num_fruitless > MAX_FRUITLESS_WAKES:
            stall = controller.stall(self._driver.now)
            message = f"was woken {MAX_FRUITLESS_WAKES:,} times in a row without any effect"
            raise PolicyError(sleeper.policy_name, f"{message}. {stall}" if stall is not None else message)

    def _wake(self, entry: WakeUp, policy: object) -> None:
        if entry.slot == ADMISSION.key:
            self._wake_admission(entry)
            return
        driver, name, layer = self._driver, entry.replicaset, Layer(entry.slot)
        replicaset = driver.controller.replicasets[name]
        if replicaset.out_of_service:
            return
        driver.record(entry)
        driver.interrupt(name)
        try:
            if entry.key is not None:
                _call_on_wake(policy, replicaset, entry)
            if layer is Layer.REPLICASET_SCHEDULER and name in self._movements:
                self._movements[name].woken()
        except PolicyError as error:
            driver.isolate(name, error)
            return
        if layer is Layer.REPLICA_SCHEDULER:
            driver.wake(driver.replica(name, entry.index))
            return
        if layer is Layer.REQUEST_PRIORITIZER:
            for replica in replicaset.replicas:
                replica.running_set.read_keys_again()
        driver.wake_idle(name)

    def _wake_admission(self, entry: WakeUp) -> None:
        """Wake the admission policy, and call it again for the requests that it has deferred without a time."""
        driver, gate = self._driver, self._driver.controller.gate
        if gate is None or gate.error is not None:
            return
        driver.record(entry)
        for replicaset in driver.controller.replicasets.values():
            replicaset.sync()
        try:
            gate.wake(entry.key or "", to_seconds(driver.now))
        except PolicyError as error:
            driver.isolate("", error)
            return
        if gate.waits_for_change and gate.on_room is not None:
            gate.on_room()


def _call_on_wake(policy: object, replicaset: Replicaset, entry: WakeUp) -> None:
    """Call a policy's `on_wake`, if it has one. Raises `PolicyError`."""
    on_wake = getattr(policy, "on_wake", None)
    if on_wake is None:
        return
    try:
        on_wake(entry.key, to_seconds(entry.tick))
    except VajraError:
        raise
    except POLICY_EXCEPTIONS as error:
        policies = replicaset.policies
        name = type(policy).__name__ if policies is None else policies.name(Layer(entry.slot))
        raise PolicyError.caused_by(name, error) from error
