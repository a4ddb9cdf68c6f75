"""Pipeline parallelism: each stage's layers, and the transfer of hidden states between stages.

Invariants:
    - All stages process steps in the same order, so sends and receives match.
    - Sending does not wait for the receiver while fewer steps than stages are in flight.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import distributed


class Stage:
    """Pipeline stage `index` of `count`."""

    __slots__ = ("_following", "_previous", "_sent", "_waited_s", "count", "index")

    def __init__(
        self, index: int = 0, count: int = 1, previous: int | None = None, following: int | None = None
    ) -> None:
        """Create the stage; hidden states are received from rank `previous` and sent to rank `following`."""
        self.index = index
        self.count = count
        self._previous = previous
        self._following = following
        self._sent: deque[tuple[distributed.Work | None, torch.Tensor]] = deque()
        self._waited_s = 0.0

    @property
    def is_first(self) -> bool:
        """True if this stage embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if this stage computes logits."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the indices of this stage's layers; a remainder of the division goes to the first stages."""
        each, more = divmod(num_layers, self.count)
        first = self.index * each + min(self.index, more)
        return range(first, first + each + (self.index < more))

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fill `hidden` [T, h] with the previous stage's hidden states, and return it."""
        started = time.perf_counter()
        distributed.recv(hidden, self._previous)
        self._waited_s += time.perf_counter() - started
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden states [T, h] to the next stage."""
        if len(self._sent) >= self.count:
            work, _ = self._sent.popleft()
            if work is not None:
                work.wait()
        self._sent.append((distributed.isend(hidden, self._following), hidden))

    def take_waited_s(self) -> float:
        """Return the seconds spent in `receive` since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s
