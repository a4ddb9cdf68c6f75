"""Fingerprints of workloads, which show whether two draws have equal requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import structs

from vajra_py.workload.arrays import StringColumn
from vajra_py.workload.columns import Columns
from vajra_py.workload.content import ContentColumn

__all__ = ["fingerprint"]

_SIZE = 16


def fingerprint(columns: Columns) -> str:
    """Return a hexadecimal digest of all facts of these requests.

    Digests are comparable only for workloads that were drawn or read in the same way: equal prompts that are composed
    of different segments have different digests.
    """
    digest = hashlib.blake2b(digest_size=_SIZE)
    for name, value in _named(columns):
        for part in _parts(value):
            data = part if isinstance(part, bytes) else _bytes(part)
            digest.update(f"{name} {len(data)} ".encode())
            digest.update(data)
    return digest.hexdigest()


def _named(columns: Columns) -> Iterator[tuple[str, Any]]:
    for name, value in structs.asdict(columns).items():
        if name == "stated":
            yield from columns.stated.items()
        elif value is not None:
            yield name, value


def _parts(value: Any) -> list[Any]:
    if isinstance(value, StringColumn):
        numbers = [] if value.numbers is None else [value.numbers]
        return [repr(value.labels).encode(), value.codes, *numbers]
    if isinstance(value, ContentColumn):
        store = value.store
        return [repr(store.spaces).encode(), store.parent, store.space, store.number, store.tokens, value.nodes]
    return [value]


def _bytes(array: Any) -> bytes:
    """Return the bytes of an array; for an object array, those of the elements' `repr`."""
    if array.dtype != np.object_:
        return np.ascontiguousarray(array).tobytes()
    # Rows with equal values often share one object, so `repr` is called once for each object.
    known = {id(one): one for one in array}
    texts = {key: repr(one) for key, one in known.items()}
    return "\n".join(texts[id(one)] for one in array).encode()
