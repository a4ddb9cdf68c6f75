"""Pool of requests that decode together, with counters shared by all members.

A decode pool keeps the counters of every request that advances by one token a step. A step of the whole pool increments
two integers; only requests that need a block, end, join or leave cost more.

Invariants: between steps `num_committed == num_emitted`; a member has computed `num_committed + offset` tokens, with
an offset that is constant while it is a member; exactly one of its known tokens is not computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

from vajra_py.runtime.requests.request import Request

by_admission = attrgetter("admitted_index")
STEPS_PER_LOG = 1 << 16
"""Number of steps after which a new log of ticks is begun, so that old logs can be freed when no request refers to
them.
"""


class DecodePool:
    """The decodes of one replica that advance together."""

    __slots__ = (
        "_block_size",
        "_ends",
        "_growing",
        "_log",
        "_num_growing",
        "_offset_sum",
        "_ordered",
        "joined",
        "left",
        "members",
        "num_committed",
        "num_emitted",
        "num_public",
    )

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.members: dict[Request, None] = {}
        """Members in order of joining; not to be changed."""
        self._ordered: list[Request] | None = None
        self._growing: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._num_growing = array("q", [0] * block_size)
        """Number of members in each element of `_growing`."""
        self._ends: dict[int, list[Request]] = {}
        self._offset_sum = 0
        self.num_committed = 0
        """Number of pool steps that were put into a plan so far."""
        self.num_emitted = 0
        """Number of pool steps completed so far."""
        self.num_public = 0
        """Number of members whose generated blocks other requests may hit, so that these blocks are cached when they
        are full.
        """
        self.joined: dict[Request, None] | None = None
        """Members that joined since this was last emptied; None: not tracked."""
        self.left: list[Request] = []
        self._log = array("q")
        """Present log: ticks at which the tokens of pool steps were produced, since the log was started."""

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.members)

    def __contains__(self, request: object) -> bool:
        return request in self.members

    @property
    def context_tokens(self) -> int:
        """Number of tokens whose KV is in memory before the step being formed, over all members."""
        return self._offset_sum + self.num_committed * len(self.members)

    def in_admission_order(self) -> Sequence[Request]:
        """Return the members in order of admission."""
        if self._ordered is None:
            self._ordered = sorted(self.members, key=by_admission)
        return self._ordered

    def join(self, request: Request, num_steps_to_end: int) -> None:
        """Add a request whose prompt is done; it ends after `num_steps_to_end` (>= 1) more tokens."""
        offset = request.join_pool(self)
        self.num_public += _is_public(request)
        self.members[request] = None
        if self.joined is not None:
            self.joined[request] = None
        self._ordered = None
        self._offset_sum += offset
        place = -offset % self._block_size
        self._growing[place][request] = None
        self._num_growing[place] += 1
        request.end_epoch = end = self.num_emitted + num_steps_to_end
        request.token_log.append((self._log, len(self._log), -1))
        due = self._ends.get(end)
        if due is None:
            self._ends[end] = [request]
        else:
            due.append(request)

    def leave(self, request: Request) -> int:
        """Remove a member, give it its own counters again, and return the number of tokens until its end."""
        del self.members[request]
        if self.joined is not None:
            if request in self.joined:
                del self.joined[request]
            else:
                self.left.append(request)
        self.num_public -= _is_public(request)
        self._ordered = None
        self._close_log_of(request)
        offset = request.leave_pool()
        self._offset_sum -= offset
        place = -offset % self._block_size
        del self._growing[place][request]
        self._num_growing[place] -= 1
        num_steps_left = request.end_epoch - self.num_emitted
        if num_steps_left > 0:
            self._ends[request.end_epoch].remove(request)
        return num_steps_left

    def needing_blocks(self) -> Collection[Request]:
        """Return the members whose next token is the first of a block."""
        return self._growing[self.num_committed % self._block_size]

    def at_place(self, place: int) -> Collection[Request]:
        """Return the members whose next token has the position `place` in its block, from 0."""
        return self._growing[(self.num_committed - place) % self._block_size]

    def began_blocks(self) -> Collection[Request]:
        """Return the members whose token in the last planned step is the first of a block."""
        return self._growing[(self.num_committed - 1) % self._block_size]

    def filling_blocks(self) -> Collection[Request]:
        """Return the members whose next token is the last of a block."""
        return self._growing[(self.num_committed + 1) % self._block_size]

    def steps_to_next_end(self) -> int:
        """Return the number of steps, counted from the last completed one, until the next member ends."""
        return min(self._ends) - self.num_emitted

    def ending_in_flight(self) -> Sequence[Request]:
        """Return the members that end with the step in flight."""
        return self._ends.get(self.num_emitted + 1, ())

    def growth_cycle(self, num_steps: int) -> array[int]:
        """Return, for each of the next `num_steps` steps, the number of members that take a new block; at most
        `block_size` numbers, because they repeat after `block_size` steps.
        """
        counts, size = self._num_growing, self._block_size
        start = self.num_committed % size
        stop = start + min(num_steps, size)
        return counts[start:stop] if stop <= size else counts[start:] + counts[: stop - size]

    def growth_by_step(self, num_steps: int) -> list[int]:
        """Return, for each of the next `num_steps` steps, the number of members that take a new block."""
        cycle = self.growth_cycle(num_steps)
        return [cycle[step % self._block_size] for step in range(num_steps)]

    def growth(self, num_steps: int) -> int:
        """Return the number of blocks that all members take within the next `num_steps` steps."""
        rounds, rest = divmod(num_steps, self._block_size)
        return rounds * len(self.members) + sum(self.growth_cycle(rest))

    def advance(self, ended_at: array[int]) -> None:
        """Count several steps of the whole pool, which ended at these ticks, as planned and completed; no member may
        have ended in them.
        """
        self.num_emitted += len(ended_at)
        self.num_committed += len(ended_at)
        self._log.extend(ended_at)
        if len(self._log) >= STEPS_PER_LOG:
            self._start_log()

    def commit(self) -> None:
        """Count a planned step of the whole pool."""
        self.num_committed += 1

    def emit(self, now: int) -> list[Request]:
        """Count a step completed at tick `now`; return the members that end with it, which stay members until they
        leave.
        """
        self.num_emitted += 1
        self._log.append(now)
        if len(self._log) >= STEPS_PER_LOG:
            self._start_log()
        return self._ends.pop(self.num_emitted, [])

    def _start_log(self) -> None:
        for request in self.members:
            self._close_log_of(request)
        self._log = array("q")
        for request in self.members:
            request.token_log.append((self._log, 0, -1))

    def _close_log_of(self, request: Request) -> None:
        log, first, _ = request.token_log[-1]  # type: ignore[misc]
        if first == len(self._log):
            request.token_log.pop()
        else:
            request.token_log[-1] = (log, first, len(self._log))


def _is_public(request: Request) -> bool:
    return request.hashes is not None and not request.hashes.is_private_after_prompt
