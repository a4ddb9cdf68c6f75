"""Kinds of rejection, and the prefixes of `Request.detail` that mark rejections not caused by the request itself."""

from __future__ import annotations

QUEUE_FULL = "the queue is full"
ALL_FAILED = "every replica has failed"
OUT_OF_SERVICE = "out of service"
"""Prefix of `detail` that marks a rejection by a replicaset that is out of service. A replicaset goes out of service
after one of its policies has broken the contract.
"""
SHED = "shed by the admission policy"

SHED_KIND, QUEUE_FULL_KIND, NO_REPLICA_KIND, OWN_KIND = "shed", "queue_full", "no_replica", "cannot_run"
REJECTION_KINDS = (SHED_KIND, QUEUE_FULL_KIND, NO_REPLICA_KIND, OWN_KIND)
"""Kinds of rejection: by the admission policy; by the bounds of the queues; because no replica is available; because
the request can never run, or a scheduler dropped it.
"""
TURNED_AWAY = (QUEUE_FULL, ALL_FAILED, SHED)
"""Prefixes of `detail` that mark a rejection as intended by the settings or caused by a failure. Any other rejection is
caused by the request, by wrong settings or by a policy.
"""


def rejection_kind(detail: str) -> str:
    """Return the kind of a rejection, one of `REJECTION_KINDS`, from the rejected request's `detail`."""
    if detail.startswith(SHED):
        return SHED_KIND
    if detail.startswith(QUEUE_FULL):
        return QUEUE_FULL_KIND
    if detail.startswith((ALL_FAILED, OUT_OF_SERVICE)):
        return NO_REPLICA_KIND
    return OWN_KIND
