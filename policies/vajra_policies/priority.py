"""The user's own priority: a request sent with a lower number is more urgent."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vajra_py.contract import Key, KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, RequestView

_ID_BYTES = 128


class PriorityConfig(PolicyConfig):
    """Parameters of `priority`."""

    ties: Literal["submission", "request_id"] = Field(
        "submission",
        description="Order of requests of one priority that arrived at one time: as submitted, or by the text of their ids (vLLM).",
    )


class Priority:
    """Key = the priority stated by the client; lower is more urgent, ties go by arrival.

    There is no ageing: a request waits as long as more urgent ones do.

    Source: the `priority` policy of vLLM's scheduler, whose numbers mean the same.
    """

    def __init__(self, config: PriorityConfig) -> None:
        self._by_id = config.ties == "request_id"

    @property
    def key_motion(self) -> KeyMotion:
        """`STATIC`, since a priority is fixed when the request is sent."""
        return KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> Key:
        """Return the request's priority; with `ties: request_id`, followed by its arrival and the first 128 bytes of
        its id as a number.
        """
        if not self._by_id:
            return float(request.priority)
        name = request.request_id.encode()[:_ID_BYTES].ljust(_ID_BYTES, b"\0")
        return (float(request.priority), request.arrived_at, int.from_bytes(name, "big"))


def _build(config: PriorityConfig, context: PolicyContext) -> Priority:
    return Priority(config)


SPEC = PolicySpec(
    name="priority",
    layer=Layer.REQUEST_PRIORITIZER,
    config=PriorityConfig,
    build=_build,
    summary="The priority stated by the client, the lowest number first; ties by arrival.",
    source="vLLM's priority scheduling",
    advice=(
        "Use it where users or tenants state how urgent a request is. Not where less urgent requests must not starve: "
        "there is no ageing."
    ),
)
