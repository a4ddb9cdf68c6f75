"""Parrot's order: calls deeper in their application's graph first, so that applications end one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ProgramView,
    RequestId,
    RequestView,
)


class ParrotConfig(PolicyConfig):
    """Parameters of `parrot`, which has none."""


class Parrot:
    """Key = minus the depth of the call, which is 1 + the largest depth of the calls whose results it uses.

    If a call states no `parent_calls`, its depth is the number of calls of its program that had ended when it arrived.
    In a program that is a chain of calls, this is the call's position. A request without a program has depth 0.

    With N chains of two calls on one server, all arriving at once, and one unit of time per call, the mean completion
    time is N + 1; in order of arrival it is (3 N + 1) / 2.

    Left out: Parrot's placement, which places calls with a common successor as one unit, and calls with a common prompt
    together; and Parrot's service, which derives the graph of calls from variables in prompts.

    Source: Lin et al., "Parrot: Efficient Serving of LLM-based Applications with Semantic Variable", OSDI'24 (arXiv:2405.19888);
    the order of the task queue in its code.
    """

    key_motion = KeyMotion.STATIC

    def __init__(self) -> None:
        self._depths: dict[ProgramView, dict[RequestId, int]] = {}

    def key(self, request: RequestView, now: float) -> float:
        """Return minus the call's depth; 0 for a request without a program."""
        program = request.program
        if program is None:
            return 0.0
        depths = self._depths.setdefault(program, {})
        depth = depths.get(request.request_id)
        if depth is None:
            parents = request.parent_calls
            depth = 1 + max(depths.get(one, 0) for one in parents) if parents else program.num_ended
            depths[request.request_id] = depth
        return -float(depth)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Determine the depths of these calls."""
        for request in requests:
            self.key(request, now)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget the program."""
        self._depths.pop(program, None)


def _build(config: ParrotConfig, context: PolicyContext) -> Parrot:
    return Parrot()


SPEC = PolicySpec(
    name="parrot",
    layer=Layer.REQUEST_PRIORITIZER,
    config=ParrotConfig,
    build=_build,
    summary="Calls that are deeper in their program's graph first.",
    source="Parrot (OSDI'24, arXiv:2405.19888)",
    advice=(
        "Use it for chains and graphs of calls of about equal length: applications end one after the other. Not where "
        "programs differ much in their remaining work (`justitia`, `atlas`)."
    ),
)
