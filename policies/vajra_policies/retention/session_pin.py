"""Retention with pins for sessions: the content of a conversation stays for a while after each of its requests."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.retention.recency import LeastRecentlyUsed
from vajra_py.contract import PolicyConfig, PolicyContext, RequestView, RetentionSpec


class SessionPinConfig(PolicyConfig):
    """Parameters of `session_pin`."""

    pin_s: float = Field(
        2.0, ge=0, description="Time that a session's content stays after each of its requests, seconds."
    )


class SessionPin(LeastRecentlyUsed):
    """Evicts the least recently used content first, and pins content of sessions: a session that pauses while a tool
    runs finds its content again.

    Source: Continuum (arXiv 2511.02230), with one time for all tools.
    """

    def __init__(self, config: SessionPinConfig) -> None:
        self._pin_s = config.pin_s

    def pin_s(self, request: RequestView, now: float) -> float:
        """Return the configured `pin_s` for requests of a session, else 0."""
        return self._pin_s if request.session_id else 0.0


def _build(config: SessionPinConfig, context: PolicyContext) -> SessionPin:
    return SessionPin(config)


SPEC = RetentionSpec(
    name="session_pin",
    config=SessionPinConfig,
    build=_build,
    summary="Least recently used first; the content of a session is pinned for a time after each of its requests.",
    source="Continuum (arXiv 2511.02230)",
    follows_release=True,
    advice=(
        "Use it for agents that continue within seconds, after a tool. Not for people, who take longer to read and "
        "type: pins then hold memory in vain."
    ),
)
