"""Wrappers that compare the keys of a prioritizer and of its groups with its declarations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vajra_py.contract import FallenGroups, FallenRequests, Key, KeyMotion, RequestView
from vajra_py.testing.checking import require
from vajra_py.testing.strict import interpose


@dataclass(eq=False)
class GroupWatch:
    """Wrapper that compares the groups of requests and the groups' keys with the rules of `GroupsRequests`.

    Each time one group's key is read, the keys of all groups with waiting requests are read.
    """

    policy: Any
    names: dict[RequestView, str] = field(default_factory=dict)
    keys: dict[str, tuple[int, Key]] = field(default_factory=dict)
    """For each group: number of falls declared when its key was last read, and that key."""

    def group(self, request: RequestView) -> str:
        """Return the request's group, and check that it is the same as before."""
        name: str = self.policy.group(request)
        before = self.names.setdefault(request, name)
        text = f"group({request.request_id}) was {before!r} and is {name!r}; a request stays in its group"
        require(before == name, text)
        return name

    def group_key(self, group: str) -> Key:
        """Return the group's key, and check that no group's key has fallen unless the policy has declared the fall."""
        for request in [one for one in self.names if one.end_reason is not None]:
            del self.names[request]
        waiting = {name for request, name in self.names.items() if not request.is_resident}
        for name in [one for one in self.keys if one not in waiting]:
            del self.keys[name]
        for name in waiting:
            self._read(name)
        return self._read(group)

    def _read(self, group: str) -> Key:
        key: Key = self.policy.group_key(group)
        again = self.policy.group_key(group)
        require(key == again, f"group_key({group!r}) is {key!r}, and asked again {again!r}")
        fallen: FallenGroups | None = getattr(self.policy, "fallen_groups", None)
        num_named, before = self.keys.get(group, (0, key))
        if key < before:  # type: ignore[operator]  # all of one shape, which the queue requires
            named = () if fallen is None else fallen.since(num_named)
            text = f"group_key({group!r}) fell from {before!r} to {key!r}, and its fall was not named in fallen_groups"
            require(named is None or group in named, text)
        self.keys[group] = (0 if fallen is None else fallen.num_named, key)
        return key


@dataclass(eq=False)
class KeyWatch:
    """Wrapper that reads a prioritizer's keys often, and compares them with its declarations."""

    policy: Any
    stream: np.random.Generator
    seen: dict[RequestView, tuple[object, Key]] = field(default_factory=dict)
    shapes: set[int] = field(default_factory=set)
    named: dict[RequestView, tuple[object, Key, int, float | None]] = field(default_factory=dict)
    """For each request with `KeyMotion.NAMED_FALLS`: progress, key, number of declared falls, and time from which the
    key may fall."""
    by_hits: dict[RequestView, tuple[object, Key, float | None]] = field(default_factory=dict)
    """For each request with `KeyMotion.PREFIX_HITS`: facts on which the key may depend, key, and time from which the
    key may move."""
    groups: GroupWatch = field(init=False)

    def __post_init__(self) -> None:
        self.groups = GroupWatch(self.policy)

    def interposed(self) -> Any:
        """Return the policy with its keys watched."""
        groups = self.groups
        replaced: dict[str, Callable[..., Any]] = {"key": self.key, "line": self.line}
        replaced |= {"group": groups.group, "group_key": groups.group_key}
        return interpose(self.policy, replaced)

    def line(self, request: RequestView) -> tuple[float, float]:
        """Return (intercept, slope) of the request's key, and check the key at time 0 and at a random later time."""
        self.look(request, 0.0)
        line: tuple[float, float] = self.policy.line(request)
        return line

    def key(self, request: RequestView, now: float) -> Key:
        """Return the request's key, and check it at `now` and at a random later time."""
        self.look(request, now)
        key: Key = self.policy.key(request, now)
        return key

    def look(self, request: RequestView, now: float) -> None:
        """Read the key at `now` and later, and compare it with the declared motion and with earlier keys."""
        later = now + float(self.stream.exponential(2.0))
        name = request.request_id
        for at in (now, later):
            key = self.policy.key(request, at)
            again = self.policy.key(request, at)
            require(key == again, f"key({name}, {at!r}) is {key!r}, and asked again {again!r}")
            parts = key if isinstance(key, tuple) else (key,)
            numbers = all(isinstance(part, int | float | np.number) and math.isfinite(part) for part in parts)
            require(bool(parts) and numbers, f"key({name}, {at!r}) is not finite numbers: {key!r}")
            self.shapes.add(len(parts) if isinstance(key, tuple) else 0)
            require(len(self.shapes) == 1, f"keys have several shapes, the latest is key({name}, {at!r}) = {key!r}")
            self._compare(request, at, key)
            if at == now and self.policy.key_motion is KeyMotion.PREFIX_HITS:
                self._note_hits(request, now, key)
        if self.policy.key_motion is KeyMotion.NAMED_FALLS:
            self._note(request, now)

    def _compare_epoch(self, request: RequestView, at: float, key: Key) -> None:
        """Check that the key of a waiting request has not moved without progress or a new `key_epoch()`."""
        if request.is_resident:
            return
        state = (self.policy.key_epoch(), _progress_of(request))
        before = self.seen.get(request)
        if before is not None and before[0] == state:
            text = f"key({request.request_id}, {at!r}) moved from {before[1]!r} to {key!r}, and key_epoch() did not ({state[0]})"
            require(before[1] == key, text)
        self.seen[request] = (state, key)

    def _compare(self, request: RequestView, at: float, key: Key) -> None:
        motion = self.policy.key_motion
        if motion is KeyMotion.TIME_LINEAR:
            intercept, slope = self.policy.line(request)
            require(isinstance(key, float | int), f"a TIME_LINEAR key is a number, not {key!r}")
            scale = max(1.0, abs(intercept), abs(slope * at))
            on_line = isinstance(key, float | int) and abs(intercept + slope * at - key) <= 1e-9 * scale
            text = f"key({request.request_id}, {at!r}) is {key!r}, and its line says {intercept + slope * at!r}"
            require(on_line, text)
        elif motion is KeyMotion.PREFIX_HITS:
            self._compare_hits(request, at, key)
        elif hasattr(self.policy, "key_epoch"):
            self._compare_epoch(request, at, key)
        elif motion is KeyMotion.NAMED_FALLS:
            self._compare_fall(request, at, key)
        elif motion in (KeyMotion.STATIC, KeyMotion.PROGRESS):
            state = None if motion is KeyMotion.STATIC else _progress_of(request)
            before = self.seen.get(request)
            if before is not None and before[0] == state:
                since = "since arrival" if state is None else f"without progress (computed, output, preempted: {state})"
                text = f"key of {request.request_id} is {motion.name} and moved {since}: {before[1]!r}, now {key!r}"
                require(before[1] == key, text)
            self.seen[request] = (state, key)

    def _hit_state(self, request: RequestView) -> tuple[object, ...]:
        epoch = self.policy.key_epoch() if hasattr(self.policy, "key_epoch") else 0
        return (epoch, request.prefix_hit_tokens(), request.is_resident, *_progress_of(request))

    def _compare_hits(self, request: RequestView, at: float, key: Key) -> None:
        """Check that, without new hits or progress, a waiting request's key has not moved before the declared time."""
        state, before, moves_at = self.by_hits.get(request, (None, key, None))
        if request.is_resident or state != self._hit_state(request) or (moves_at is not None and moves_at <= at):
            return
        text = f"key of {request.request_id} is PREFIX_HITS and moved with the same hits and progress"
        require(before == key, f"{text}, although falls_at gave no earlier time: {before!r}, at {at!r} s {key!r}")

    def _note_hits(self, request: RequestView, now: float, key: Key) -> None:
        for one in [one for one in self.by_hits if one.end_reason is not None]:
            del self.by_hits[one]
        falls_at = self.policy.falls_at(request, now) if hasattr(self.policy, "falls_at") else None
        self.by_hits[request] = (self._hit_state(request), key, falls_at)

    def _compare_fall(self, request: RequestView, at: float, key: Key) -> None:
        """Check that a key which fell without progress had been declared to fall."""
        state, before, num_named, falls_at = self.named.get(request, (None, key, 0, None))
        if request.is_resident or state != _progress_of(request) or key >= before:  # type: ignore[operator]  # of one shape
            return
        fallen: FallenRequests = self.policy.fallen_requests
        names = fallen.since(num_named)
        was_named = names is None or request.request_id in names
        text = f"key({request.request_id}, {at!r}) fell from {before!r} to {key!r}, which was neither named nor given by falls_at"
        require(was_named or (falls_at is not None and falls_at <= at), text)

    def _note(self, request: RequestView, now: float) -> None:
        for one in [one for one in self.named if one.end_reason is not None]:
            del self.named[one]
        falls_at = self.policy.falls_at(request, now) if hasattr(self.policy, "falls_at") else None
        key = self.policy.key(request, now)
        self.named[request] = (_progress_of(request), key, self.policy.fallen_requests.num_named, falls_at)


def _progress_of(request: RequestView) -> tuple[int, int, int]:
    return (request.num_computed_tokens, request.num_output_tokens, request.num_preemptions)
