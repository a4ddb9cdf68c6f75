"""Named random streams derived from one seed."""

from __future__ import annotations

import hashlib

import numpy as np


class SeedTree:
    """A seed and the streams that hang on it by name.

    The stream of a name depends on the seed and the path alone, not on which other streams were asked for before.
    """

    def __init__(self, seed: int, path: tuple[str, ...] = ()) -> None:
        self._seed = seed
        self._path = path

    def child(self, *names: str) -> SeedTree:
        """The subtree under `names`."""
        return SeedTree(self._seed, (*self._path, *names))

    def stream(self, name: str) -> np.random.Generator:
        """A fresh generator for `name`, at its beginning."""
        text = "/".join((*self._path, name))
        digest = hashlib.blake2b(text.encode(), digest_size=16, key=str(self._seed).encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
