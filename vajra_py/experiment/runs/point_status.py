"""Status of a sweep's point, reported while the sweep runs."""

from __future__ import annotations

from msgspec import Struct

from vajra_py.config.sweeps import values_of_label


class PointStatus(Struct, frozen=True):
    """Status of one point of a sweep."""

    label: str
    num_done: int = 0
    num_total: int = 0
    now_s: float = 0.0
    is_finished: bool = False
    was_there: bool = False
    """True if the point was finished in an earlier sweep and is not repeated."""
    error: str | None = None
    is_copy: bool = False
    """True if the point is not run because it would repeat the run of another seed."""

    @property
    def values_label(self) -> str:
        """Label of the point by its values only, since all points set the same paths."""
        return values_of_label(self.label)
