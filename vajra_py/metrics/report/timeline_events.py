"""Events of the trace-event format; times are nanoseconds, which become microseconds."""

from __future__ import annotations

from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
ReplicaKey: TypeAlias = tuple[str, int]
"""Replicaset and replica id."""


def nanoseconds(seconds: float) -> int:
    """Return a time in nanoseconds."""
    return round(seconds * 1e9)


def span(name: str, track: tuple[int, int], start: int, end: int, arguments: Event) -> Event:
    """Return a complete event on the track of a process and thread."""
    pid, tid = track
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": max(end - start, 0) / 1000,
        "args": arguments,
    }


def meta(kind: str, pid: int, tid: int, arguments: Event) -> Event:
    """Return an event that names a process or thread, or gives its position."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def free_lane(ends: list[int], start: int) -> int:
    """Return the first lane that is free at a time; a new one if all are occupied."""
    return next((lane for lane, end in enumerate(ends) if end <= start), len(ends))
