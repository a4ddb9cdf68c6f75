"""Rules for copying swapped blocks while steps run."""

from __future__ import annotations

from msgspec import Struct

from vajra_py.runtime.movement.links import LinkOptions


class SwapRules(Struct, frozen=True):
    """Link between a replica's device and its host memory, one way out and one way in; see `SwapLinkConfig`."""

    links: LinkOptions
    bytes_per_block: int
    frees_at_once: bool = False
    """True if a preempted request's device blocks are free before they are copied."""
