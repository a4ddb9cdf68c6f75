"""Result of a request's last prefix lookup, and the check that it is still valid."""

from __future__ import annotations

from vajra_py.runtime.kv.block_pool import BlockPool


class PrefixLookup:
    """Result of a request's last prefix lookup, with the state needed to check whether it is still valid."""

    __slots__ = (
        "blocks",
        "idle_version",
        "limit",
        "members",
        "num_cached",
        "num_idle",
        "num_removed",
        "removed_epoch",
    )

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.members: set[int] | None = None
        self.limit = -1
        self.num_cached = -1
        self.num_removed = 0
        self.removed_epoch = -1
        self.num_idle = 0
        self.idle_version = -1

    def survives(self, pool: BlockPool) -> bool:
        """Return True if it is certain that all found blocks can still be found. Apart from a set of the found blocks,
        which is built once, the cost grows only with the number of blocks removed since the lookup.
        """
        if self.removed_epoch != pool.removed_epoch:
            return False
        removed = pool.removed
        num_new = len(removed) - self.num_removed
        if num_new == 0 or not self.blocks:
            return True
        if num_new > len(self.blocks):
            return False
        if self.members is None:
            self.members = set(self.blocks)
        return self.members.isdisjoint(removed[self.num_removed :])
