"""Status of a run, as it is reported while runs go."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.config.sweeps import values_of_label


@dataclass(frozen=True, slots=True)
class PointStatus:
    """Status of one point of a sweep."""

    label: str
    num_done: int = 0
    num_total: int = 0
    now_s: float = 0.0
    is_finished: bool = False
    was_there: bool = False
    """Finished in an earlier sweep; not run again."""
    error: str | None = None
    is_copy: bool = False
    """True if it was not run because it would repeat the run of another seed."""

    @property
    def values_label(self) -> str:
        """The point by its values alone: every point sets the same paths."""
        return values_of_label(self.label)
