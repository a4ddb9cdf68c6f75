"""Waiting time of requests in a queue, from output lengths and throughput of requests that have ended."""

from __future__ import annotations

from collections import deque


class WaitingTimeEstimator:
    """Estimates waiting time = requests ahead * mean output / throughput in output tokens per second.

    Mean output and throughput are those of the last `window` requests that ended. Until two requests have ended at
    different times, the given `output_tokens` and `throughput` are used.

    Source: QLM (arXiv:2407.00047), request waiting time (RWT) estimator.
    """

    def __init__(self, window: int, output_tokens: float, throughput: float) -> None:
        self._output_tokens = output_tokens
        self._throughput = throughput
        self._ended: deque[tuple[float, int]] = deque(maxlen=window)

    def learn(self, num_output_tokens: int, now: float) -> None:
        """Record an ended request with its number of output tokens."""
        if num_output_tokens:
            self._ended.append((now, num_output_tokens))

    def wait_s(self, num_ahead: int) -> float:
        """Return the predicted wait in seconds of a request with `num_ahead` requests ahead of it."""
        ended = self._ended
        if len(ended) < 2 or ended[-1][0] <= ended[0][0]:
            return num_ahead * self._output_tokens / self._throughput
        tokens = sum(num for _, num in ended)
        throughput = (tokens - ended[0][1]) / (ended[-1][0] - ended[0][0])
        return num_ahead * tokens / len(ended) / throughput if throughput > 0 else 0.0
