"""Construction of events in the trace-event format; times are nanoseconds in arguments and microseconds in events."""

from __future__ import annotations

from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
ReplicaKey: TypeAlias = tuple[str, int]
"""Replicaset and replica id."""


def nanoseconds(seconds: float) -> int:
    """Convert seconds to integer nanoseconds."""
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
    """Return a metadata event that sets the name or position of a process or thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def free_lane(ends: list[int], start: int) -> int:
    """Return the index of the first lane that is free at `start`, or of a new lane if all are occupied."""
    return next((lane for lane, end in enumerate(ends) if end <= start), len(ends))
