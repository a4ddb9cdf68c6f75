"""Inputs of a run from a KV connector: its answers, and reports of its workers. Requests are identified by index."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class KvAnswer(Struct, frozen=True):
    """An answer of the connector about a waiting request.

    Attributes:
        num_tokens: number of tokens that the connector can load after the prefix hit; None: unknown yet.
        is_async: True if the tokens are loaded while steps run.
    """

    tick: int
    replicaset: str
    replica_id: int
    index: int
    num_tokens: int | None
    is_async: bool = False


class KvEnd(Struct, frozen=True):
    """Answer of the connector about a request that ended.

    Attributes:
        keeps: True if the request keeps its blocks until the connector has sent them.
    """

    tick: int
    replicaset: str
    replica_id: int
    index: int
    keeps: bool


class KvLook(Struct, frozen=True):
    """An attempt to form a step on an idle replica, because the connector's answers may have changed."""

    tick: int
    replicaset: str
    replica_id: int


class KvNews(Struct, frozen=True):
    """Report of the connector's workers; see `KvReport`.

    Attributes:
        step: index of the step with which the report came; None: it came without a step, or with an earlier step than
            the one in flight.
    """

    tick: int
    replicaset: str
    replica_id: int
    step: int | None
    received: Sequence[int]
    sent: Sequence[int]
    failed: Sequence[int]
    bad_blocks: Sequence[int]
    num_returned: int
