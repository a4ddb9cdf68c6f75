"""Kinds of rejection, and how details begin that are not about the rejected request alone."""

from __future__ import annotations

QUEUE_FULL = "the queue is full"
ALL_FAILED = "every replica has failed"
OUT_OF_SERVICE = "out of service"
"""Beginning of the detail of requests whose policies broke the contract."""
SHED = "shed by the admission policy"

SHED_KIND, QUEUE_FULL_KIND, NO_REPLICA_KIND, OWN_KIND = "shed", "queue_full", "no_replica", "cannot_run"
REJECTION_KINDS = (SHED_KIND, QUEUE_FULL_KIND, NO_REPLICA_KIND, OWN_KIND)
"""Refused by the admission policy; by the bounds of the queues; for want of a replica; because it can never run as it is, or a scheduler
dropped it."""
TURNED_AWAY = (QUEUE_FULL, ALL_FAILED, SHED)
"""Rejections that are the purpose of a setting, or a failure's; others are the fault of the request, or of the settings."""


def rejection_kind(detail: str) -> str:
    """Return the kind of a rejected request by its detail, one of `REJECTION_KINDS`."""
    if detail.startswith(SHED):
        return SHED_KIND
    if detail.startswith(QUEUE_FULL):
        return QUEUE_FULL_KIND
    if detail.startswith((ALL_FAILED, OUT_OF_SERVICE)):
        return NO_REPLICA_KIND
    return OWN_KIND
