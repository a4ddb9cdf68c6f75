"""A search for stop strings that compares everything with everything: slow, and plainly right."""

from __future__ import annotations

from collections.abc import Sequence


class NaiveSearch:
    """Reference search that compares every suffix of the withheld text with every stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.held = ""

    def push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        self.held += text
        if may_stop:
            found = [(place, stop) for stop in self._stops if (place := self.held.find(stop)) >= 0]
            if found:
                place, stop = min(found)
                shown, self.held = self.held[:place], ""
                return shown, stop
        lengths = [
            length
            for stop in self._stops
            for length in range(1, min(len(stop) - 1, len(self.held)) + 1)
            if self.held.endswith(stop[:length])
        ]
        keep = max(lengths, default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown, None
