"""Time that an engine's host adds to its GPU's time, per step and per request."""

from __future__ import annotations

from types import MappingProxyType

from msgspec import Struct, structs

from vajra_py.errors import ConfigError, Problem, did_you_mean

CAPTURE_LIMIT = 512
"""Largest batch for which vLLM captures a CUDA graph, in tokens."""


class HostOverhead(Struct, frozen=True):
    """Time that scheduling, input preparation, sampling and output processing add to steps and requests, in seconds.

    Without asynchronous scheduling the GPU waits for the host in every step. With asynchronous scheduling the host
    prepares the next step while the GPU computes, so nothing is added unless the host takes longer than the GPU, or a
    calibration found an `exposed_s`.
    """

    step_base_s: float = 0.0
    """Host time of every step."""
    step_per_request_s: float = 0.0
    """Host time per request in the step."""
    exposed_s: float = 0.0
    """GPU waiting time in every step despite asynchronous scheduling; operator profiles do not measure it, so the
    default is 0."""
    asynchronous: bool = False
    """True if the host prepares a step while the GPU computes the previous one."""
    arrival_s: float = 0.0
    """Time from a request's arrival until it is in the scheduler's queue."""
    first_token_s: float = 0.0
    """Time from the end of the step that computed a token until the client gets this token."""

    @property
    def request_s(self) -> float:
        """Part of every request's TTFT and E2E latency that is neither queueing nor steps, in seconds."""
        return self.arrival_s + self.first_token_s


HOST_OVERHEADS = MappingProxyType(
    {
        "none": HostOverhead(),
        "vllm-0.19-sync": HostOverhead(
            step_base_s=2.0e-3, step_per_request_s=12e-6, arrival_s=1.0e-3, first_token_s=0.5e-3
        ),
        "vllm-0.19-async": HostOverhead(
            step_base_s=2.0e-3,
            step_per_request_s=12e-6,
            asynchronous=True,
            arrival_s=1.0e-3,
            first_token_s=0.5e-3,
        ),
    }
)
"""Overheads by name; docs/reference/latency-models.md states the sources of the values."""


def host_overhead(name: str, **changes: float | bool | None) -> HostOverhead:
    """Return the overhead with this name. Each value of `changes` that is not None replaces the overhead's own value.

    Raises:
        ConfigError: there is no overhead of that name.
    """
    if name not in HOST_OVERHEADS:
        raise ConfigError(Problem("host", f"is not known ({name!r})", did_you_mean(name, HOST_OVERHEADS)))
    given = {key: value for key, value in changes.items() if value is not None}
    return structs.replace(HOST_OVERHEADS[name], **given)
