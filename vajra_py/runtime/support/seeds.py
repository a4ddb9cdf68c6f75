"""Named random streams derived from one seed."""

from __future__ import annotations

import hashlib

import numpy as np

STEP_TIMES = "step times"
"""Name of the streams for step durations in `NotedSeeds.draws`."""


class SeedTree:
    """A seed and the streams derived from it by name.

    The stream of a name depends only on the seed and the path, not on which streams were requested before.
    """

    def __init__(self, seed: int, path: tuple[str, ...] = ()) -> None:
        self._seed = seed
        self._path = path

    def child(self, *names: str) -> SeedTree:
        """Return the subtree under `names`."""
        return SeedTree(self._seed, (*self._path, *names))

    def stream(self, name: str) -> np.random.Generator:
        """Return a fresh generator for `name`, at its beginning."""
        text = "/".join((*self._path, name))
        digest = hashlib.blake2b(text.encode(), digest_size=16, key=str(self._seed).encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


class NotedSeeds(SeedTree):
    """`SeedTree` that records which streams were requested."""

    def __init__(self, seeds: SeedTree, path: tuple[str, ...] = (), asked: list[str] | None = None) -> None:
        self._seeds = seeds
        self._names = path
        self.asked: list[str] = [] if asked is None else asked

    def child(self, *names: str) -> SeedTree:
        """See `SeedTree`."""
        return NotedSeeds(self._seeds.child(*names), (*self._names, *names), self.asked)

    def stream(self, name: str) -> np.random.Generator:
        """See `SeedTree`."""
        self.asked.append("/".join((*self._names, name)))
        return self._seeds.stream(name)

    def draws(self) -> list[str]:
        """Return the sorted names of the streams requested so far, without their paths; streams of step durations count
        as `STEP_TIMES`.
        """
        return sorted({STEP_TIMES if one.startswith("steps/") else one.rpartition("/")[2] for one in self.asked})
