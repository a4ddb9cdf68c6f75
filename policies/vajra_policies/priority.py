"""The user's own priority: a request sent with a lower number is more urgent."""

from __future__ import annotations

from vajra_py.contract import Key, KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, RequestView


class PriorityConfig(PolicyConfig):
    """`priority` has no parameters."""


class Priority:
    """Key = the priority that came with the request; lower is more urgent, equals go by arrival.

    Nothing ages: a class of requests waits as long as there are more urgent ones.

    Source: the `priority` policy of vLLM's scheduler, whose numbers mean the same.
    """

    @property
    def key_motion(self) -> KeyMotion:
        """A priority is fixed when the request is sent."""
        return KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> Key:
        """The request's priority."""
        return float(request.priority)


def _build(config: PriorityConfig, context: PolicyContext) -> Priority:
    return Priority()


SPEC = PolicySpec(
    name="priority",
    layer=Layer.REQUEST_PRIORITIZER,
    config=PriorityConfig,
    build=_build,
    summary="The user's own priority, lower first; equals by arrival.",
    source="vLLM's priority scheduling",
)
