"""TRAIL: shortest remaining output first; requests with little output left are not preempted."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.size.lengths import FirstLengths, LengthConfig, Lengths
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, RequestView


class TrailConfig(LengthConfig):
    """Parameters of `trail`."""

    preemptible_fraction: float = Field(
        0.8,
        ge=0,
        description="Fraction of the output expected at arrival (C) after which a request is not preempted; 0: never preempted, from 1: SRPT.",
    )


class Trail:
    """Key = (0, r) if a >= C * r0, else (1, r).

    a is the number of tokens that the request has generated, r the number of tokens that it is still expected to
    generate, and r0 the number of output tokens expected at its arrival.

    C = 0 is shortest job first without preemption, C = 1 allows preemption until the end. Preempting a request near its
    end wastes the most memory and saves the least time. Needs a replica scheduler that preempts, such as `preemptive`.

    Left out: the predictor itself, a probe on the embeddings of the model's middle layers, smoothed over tokens; the
    backend's `output_length` takes its place.

    Source: Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs", ICLR'25 (arXiv:2410.01035).
    """

    key_motion = KeyMotion.PROGRESS

    def __init__(self, config: TrailConfig, context: PolicyContext) -> None:
        self._fraction = config.preemptible_fraction
        self._lengths = Lengths(config, context.output_lengths)
        self._first = FirstLengths(self._lengths)

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return (0 once the generated tokens reach the fraction C of the output expected at arrival, else 1; expected
        remaining output tokens).
        """
        age = request.num_output_tokens
        stays = age > 0 and age >= self._fraction * self._first.total(request)
        return (0.0 if stays else 1.0, self._lengths.remaining(request))

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget the expected lengths of these requests."""
        self._first.forget(requests)


SPEC = PolicySpec(
    name="trail",
    layer=Layer.REQUEST_PRIORITIZER,
    config=TrailConfig,
    build=Trail,
    summary="Shortest remaining output first; requests near their end are not preempted.",
    source="TRAIL (Shahout et al., ICLR'25, arXiv:2410.01035)",
    advice=(
        "Use it with `preemptive` where KV memory is short and preempted requests are recomputed. Not where memory is "
        "ample: preemption costs nothing there, and C = 1 is best."
    ),
)
