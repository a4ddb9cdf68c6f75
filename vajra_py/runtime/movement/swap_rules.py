"""Rules for copying swapped blocks while steps run."""

from __future__ import annotations

from msgspec import Struct

from vajra_py.runtime.movement.links import LinkOptions


class SwapRules(Struct, frozen=True):
    """Rules for the links between a replica's device and its host memory, one in each direction; see `SwapLinkConfig`."""

    links: LinkOptions
    bytes_per_block: int
    frees_at_once: bool = False
    """True if a preempted request's device blocks become free at once, before they have been copied."""
