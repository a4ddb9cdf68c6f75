"""Exact answers of queueing theory, and errors of means of dependent values."""

from __future__ import annotations

import math

import numpy as np

NUM_BATCHES = 20


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error by batch means: waits of neighbours are far from independent."""
    batches = values[len(values) // 20 :]
    batches = batches[: len(batches) // NUM_BATCHES * NUM_BATCHES].reshape(NUM_BATCHES, -1).mean(axis=1)
    return float(batches.mean()), float(batches.std(ddof=1) / math.sqrt(NUM_BATCHES))


def erlang_c(num_servers: int, load: float) -> float:
    """The part of arrivals that find every server busy in M/M/k (Erlang 1917)."""
    terms = [load**k / math.factorial(k) for k in range(num_servers)]
    last = load**num_servers / math.factorial(num_servers) * num_servers / (num_servers - load)
    return last / (sum(terms) + last)
