"""Pins of one replica's prefix cache: each pin has a name and keeps content until a given time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple


class _Pin(NamedTuple):
    hashes: Sequence[Hashable]
    until: float
    """Time at which the pin ends, in seconds on the run's clock."""
    number: int


class Pins:
    """Pins in force, by name; of two pins with the same end, the one created later counts as ending last."""

    def __init__(self) -> None:
        self.next_end = inf
        """Lower bound of the time at which the next pin ends, in seconds on the run's clock; infinite without pins."""
        self._pins: dict[Hashable, _Pin] = {}
        self._ends: list[tuple[float, int, Hashable]] = []
        """Heap of (end, number in the order of creation, name); it may still have entries of removed pins."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._pins)

    def hashes_of(self, name: Hashable) -> Sequence[Hashable]:
        """Return the hashes of a pin's content; empty if there is no such pin."""
        pin = self._pins.get(name)
        return () if pin is None else pin.hashes

    def add(self, name: Hashable, hashes: Sequence[Hashable], until: float) -> None:
        """Add a pin, whose name must be new."""
        number = next(self._numbers)
        self._pins[name] = _Pin(hashes, until, number)
        heappush(self._ends, (until, number, name))
        self.next_end = self._ends[0][0]

    def remove(self, name: Hashable) -> Sequence[Hashable]:
        """Remove a pin and return the hashes of its content; empty if there is no such pin."""
        pin = self._pins.pop(name, None)
        if not self._pins:
            self._ends.clear()
            self.next_end = inf
        return () if pin is None else pin.hashes

    def due(self, now: float) -> list[Hashable]:
        """Return the names of the pins that end at `now` or earlier, in the order of their ends. They leave the heap of
        ends, but stay in force until `remove` is called.
        """
        names: list[Hashable] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, number, name = heappop(ends)
            pin = self._pins.get(name)
            if pin is not None and pin.number == number:
                names.append(name)
        self.next_end = ends[0][0] if ends else inf
        return names

    def last(self) -> Hashable:
        """Return the name of the pin that ends last; there must be a pin."""
        return max(self._pins, key=lambda name: (self._pins[name].until, self._pins[name].number))

    def check(self, num_pinned: int) -> None:
        """Raise AssertionError if `num_pinned`, the number of pinned contents, is larger than the number of contents
        that the pins name.
        """
        contents = {one for pin in self._pins.values() for one in pin.hashes}
        if num_pinned > len(contents):
            raise AssertionError(f"Pins: {num_pinned} contents are pinned, and pins name {len(contents)}")
