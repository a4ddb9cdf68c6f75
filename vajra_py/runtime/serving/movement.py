"""Movement of requests between replicas of one replicaset: hand-offs after a prompt, and moves by the replicaset
scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from vajra_py.contract.observer import EndReason
from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.drain import Drains
from vajra_py.runtime.serving.hand_off import HandOffs
from vajra_py.runtime.serving.migration import Migrations
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.serving.transfers import Transfers
from vajra_py.runtime.support.clock import to_seconds


class Movement(Generic[R]):
    """Requests that move between the replicas of one replicaset. Every method may raise `PolicyError`, because
    schedulers are called.
    """

    def __init__(
        self, replicaset: Replicaset, rules: HandOffRules, driver: DriverServices[R], *, is_timed: bool, asks: bool
    ) -> None:
        """See `Transfers`."""
        self._replicaset = replicaset
        self._driver = driver
        self._transfers = Transfers(replicaset, rules, driver, is_timed=is_timed, asks=asks)
        self.hand_offs = HandOffs(replicaset, rules, self._transfers, driver)
        self.attends_steps = self.hand_offs.follows_steps
        self.waiting = self._transfers.waiting
        """Actions that wait for the end of a step (`Transfers.waiting`). If there are none and `attends_steps` is
        False, `step_ended` needs to be called only if memory was freed, a request has left, or a replica drains.
        """
        self._migrations = Migrations(replicaset, rules.migration, self._transfers, self.hand_offs, driver)
        self._drains = Drains(replicaset, self._migrations, driver)
        self._migrations.on_slot_free = self._drains.room_changed

    # Events

    def transfers_due(self) -> None:
        """Handle the arrival of KV whose timed transfer has ended."""
        self._transfers.due()
        if self._drains.draining:
            self._drains.advance()

    def is_under_way(self, number: int) -> bool:
        """Return True if the untimed transfer with this number is under way."""
        return self._transfers.is_under_way(number)

    def transfer_ended(self, number: int) -> None:
        """Handle the arrival of KV whose untimed transfer has ended."""
        self._transfers.ended(number)
        self._drains.advance()

    @property
    def has_retry(self) -> bool:
        """True if it is time to check a full target again."""
        return self._transfers.has_retry

    def retry(self) -> None:
        """Check full targets again."""
        self._transfers.retry()

    def step_ended(self, one: R, ended: Sequence[tuple[Request, EndReason]], *, has_freed: bool = True) -> None:
        """Continue the moves from and to a replica that is between two steps. `has_freed`: some of its blocks may have
        become free.

        Blocks reserved for the requests in `ended` are freed first.
        """
        if ended:
            self.requests_ended(ended)
        if self.attends_steps or self.waiting:
            self.hand_offs.step_ended(one)
        replica = one.replica
        if replica.newly_held:
            for request in replica.take_newly_held():
                self._leave(request, one)
        if has_freed:
            self.hand_offs.freed(one, has_looked=True)
        if self._drains.draining:
            if has_freed:
                self._drains.room_changed()
            self._drains.advance(one)

    def leave(self, source: R) -> None:
        """Begin the hand-offs that a replica's scheduler has just requested."""
        for request in source.replica.builder.take_handed_off():
            self._leave(request, source)

    def _leave(self, request: Request, source: R) -> None:
        self._migrations.left(request)
        self.hand_offs.begin(request, source)

    def requests_ended(self, ended: Iterable[tuple[Request, EndReason]]) -> None:
        """Release the blocks reserved for requests that have ended."""
        for request, _ in ended:
            self._migrations.gone(request)
            self.hand_offs.gone(request)

    def end(self, request: Request, reason: EndReason, detail: str) -> bool:
        """End a request that is moving, or whose prompt waits for blocks of its target; return False for any other
        request.
        """
        return self.hand_offs.end_if_leaving(request, reason, detail)

    # The replicaset scheduler

    def make_moves(self) -> None:
        """Call the replicaset scheduler for moves, and execute them."""
        if not self._replicaset.out_of_service:
            for move in self._replicaset.asked_moves(to_seconds(self._driver.now)):
                self._migrations.move(move)

    def woken(self) -> None:
        """Find targets for requests without a target, and execute the scheduler's moves, because the scheduler was
        woken.
        """
        self.hand_offs.place_again()
        self.make_moves()

    # Removed and restored replicas

    def drain(self, one: R, *, by_migration: bool) -> None:
        """Find other targets for requests that are moving to a replica that now drains; with `by_migration`, its own
        running requests move away too.
        """
        self._migrations.drains(one)
        self.hand_offs.divert(one)
        if by_migration:
            self._drains.begin(one)

    def lose(self, one: R) -> None:
        """Cancel all movements from and to a lost replica; to be called before the replica's memory is cleared and
        before `after_loss`.
        """
        self._transfers.forget_waiting(one)
        self._migrations.lose(one)
        self.hand_offs.lose(one)

    def after_loss(self) -> None:
        """Continue requests that wait for blocks freed by a loss, and find targets for requests without a target."""
        self.hand_offs.after_loss()
        self._drains.advance()

    def involves(self, one: R) -> bool:
        """Return True if a replica takes part in a move, or will take part after its step."""
        return self._transfers.has_waiting(one) or self.hand_offs.involves(one)

    def clear(self) -> None:
        """Drop all movements; the caller clears the replicas' memories."""
        self._transfers.clear("the replicaset is out of service")
        self._migrations.clear()
        self._drains.clear()
        self.hand_offs.clear()
