"""Traffic of a deployment since the last decision, used as the forecast (the predictor `constant` of Dynamo's planner)."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.scaling.planner_rules import Traffic
from vajra_py.contract import EndReason, RequestView


class ObservedTraffic:
    """Traffic since the last call of `close`. `prompt_tokens`: mean prompt length that is assumed until requests have
    arrived. `output_tokens`: mean output length that is assumed until requests have ended.
    """

    def __init__(self, prompt_tokens: float, output_tokens: float) -> None:
        self.since = 0.0
        self.num_requests = 0
        self.prompt_tokens = prompt_tokens
        """Mean prompt length in tokens, over the last interval in which requests arrived."""
        self.output_tokens = output_tokens
        self.hit_fraction = 0.0
        self._prompts = self._outputs = self._ended = self._admitted = self._cached = 0

    def arrive(self, requests: Sequence[RequestView]) -> None:
        """Count requests that have arrived."""
        self.num_requests += len(requests)
        self._prompts += sum(one.num_prompt_tokens for one in requests)

    def admit(self, request: RequestView) -> None:
        """Count a request's prompt and its cached tokens, unless it was admitted before and preempted."""
        if request.num_preemptions == 0:
            self._admitted += request.num_prompt_tokens
            self._cached += min(request.num_cached_tokens, request.num_prompt_tokens)

    def depart(self, requests: Sequence[RequestView]) -> None:
        """Count the outputs of completed requests."""
        for request in requests:
            if request.end_reason in (EndReason.STOP, EndReason.LENGTH):
                self._ended += 1
                self._outputs += request.num_output_tokens

    def close(self, now: float) -> Traffic | None:
        """Return the traffic since the last call as the forecast; None if no time has passed."""
        duration_s, count = now - self.since, self.num_requests
        if duration_s <= 0:
            return None
        if count:
            self.prompt_tokens = self._prompts / count
        if self._ended:
            self.output_tokens = max(1.0, self._outputs / self._ended)
        if self._admitted:
            self.hit_fraction = self._cached / self._admitted
        self.since, self.num_requests = now, 0
        self._prompts = self._outputs = self._ended = self._admitted = self._cached = 0
        return Traffic(count / duration_s, self.prompt_tokens, self.output_tokens, self.hit_fraction)
