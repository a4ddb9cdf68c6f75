"""Blocks of swapped requests, which are copied between device and host memory while steps run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vajra_py.runtime.kv.interface import KvRequest


class SwapsUnderWay:
    """Blocks of one KV memory that are being read by the copies of requests being swapped.

    These are device blocks of requests being swapped out, unless they are freed immediately, and host blocks of
    requests being swapped in.
    """

    __slots__ = ("coming", "frees_at_once", "leaving", "on_clear", "on_forget")

    def __init__(
        self, frees_at_once: bool, on_forget: Callable[[KvRequest], None], on_clear: Callable[[], None]
    ) -> None:
        """Create an empty record. With `frees_at_once`, device blocks are freed when a swap out begins. `on_forget` is
        called with each request that is unregistered, `on_clear` when all memory is lost.
        """
        self.frees_at_once = frees_at_once
        self.on_forget = on_forget
        self.on_clear = on_clear
        self.leaving: dict[KvRequest, tuple[list[int], int]] = {}
        """Device blocks of each request being swapped out, and how many leading blocks of them are in the prefix cache.
        """
        self.coming: dict[KvRequest, list[int]] = {}
        """Host blocks of each request being swapped in."""

    def clear(self) -> None:
        """Drop all blocks, because the contents of device and host memory are lost."""
        self.on_clear()
        self.leaving.clear()
        self.coming.clear()

    @property
    def device_blocks(self) -> Sequence[int]:
        """Device blocks that are being copied to host memory."""
        return [block for blocks, _ in self.leaving.values() for block in blocks]
