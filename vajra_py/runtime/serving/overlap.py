"""Transfers of a prompt's KV while the prompt is being computed, layer by layer or chunk by chunk. The target's blocks
are reserved in advance.

The KV that a step computes for a prompt becomes available in equal parts during the step, one for each layer, or all at
once when the step ends. Available KV is sent over the links. KV that the source need not compute (from its prefix cache
or from the host) is available when the prompt begins. At the end of the prompt, only KV that the links could not carry
yet is left to send, which is at least the last part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic

from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.transfers import PREEMPTED, Transfers
from vajra_py.runtime.step.plan import StepPlan

if TYPE_CHECKING:
    from vajra_py.runtime.serving.hand_off import HandOff


class Overlap(Generic[R]):
    """Transfers of one replicaset that begin before the prompt is computed."""

    def __init__(
        self,
        rules: HandOffRules,
        transfers: Transfers[R],
        hand_offs: Mapping[Request, HandOff[R]],
        moved: Callable[[HandOff[R]], None],
    ) -> None:
        """`hand_offs` holds all hand-offs under way; `moved` is called with a hand-off when its KV is at the target."""
        self._transfers = transfers
        self._hand_offs = hand_offs
        self._moved = moved
        self._num_parts = rules.num_parts
        self._min_tokens = rules.settings.overlap_min_tokens
        self._moves_missing = rules.settings.moves == "missing"

    def step_formed(self, plan: StepPlan, ticks: int) -> None:
        """Send the KV that a step computes for prompts to be handed off; the step begins now and lasts `ticks`."""
        for request, num_tokens, num_before, _ in plan.chunks:
            one = self._hand_offs.get(request)
            if one is None or not (one.is_early and one.has_reserved):
                continue
            if one.num_sent is None and not self._open(one):
                continue
            assert one.num_sent is not None
            if num_before > one.num_sent:
                self._transfers.release(one, num_before - one.num_sent)
                one.num_sent = num_before
            end = num_before + num_tokens
            if end > one.num_sent:
                self._transfers.release(one, end - one.num_sent, ticks, self._num_parts)
                one.num_sent = end

    def _open(self, one: HandOff[R]) -> bool:
        """Begin to send the KV of a prompt; return False if it is to be sent only after the prompt is computed."""
        target = one.target
        first = one.hit if self._moves_missing else 0
        if target is None or one.num_tokens < self._min_tokens or one.num_tokens <= first:
            return False
        one.num_sent, one.num_announced = first, one.num_tokens
        ends, lacking = (one.source, target), (one.hit, one.num_tokens)
        num_moved = one.num_tokens - first
        self._transfers.start(one, ends, lacking, num_moved, self._moved, is_computed=False)
        return True

    def prompt_done(self, one: HandOff[R]) -> None:
        """Close a transfer: it ends once all computed KV has arrived, even if this is less KV than was announced."""
        first = one.hit if self._moves_missing else 0
        is_whole = one.num_tokens == one.num_announced
        self._transfers.close(one, None if is_whole else max(0, one.num_tokens - first))

    def preempted(self, request: Request) -> None:
        """Cancel the transfer of a preempted prompt; the KV is sent when the prompt is recomputed."""
        one = self._hand_offs.get(request)
        if one is not None and one.num_sent is not None:
            one.num_sent = None
            self._transfers.cancel(one, PREEMPTED)
