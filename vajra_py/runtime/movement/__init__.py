"""Movement of KV between replicas: transfers over links."""

from __future__ import annotations

from vajra_py.runtime.movement.links import LinkOptions, Network

__all__ = ["LinkOptions", "Network"]
