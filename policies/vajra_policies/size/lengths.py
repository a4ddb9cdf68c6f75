"""Expected output lengths, for policies that order by size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from vajra_py.contract import PolicyConfig, RequestView
from vajra_py.contract.latency import OutputLengthPredictor


class LengthConfig(PolicyConfig):
    """Parameters of expected output lengths. The predictor is the backend's `output_length`."""

    estimate: Literal["mean", "p50", "p90"] = Field("mean", description="Statistic of a predicted length that is used.")
    default_output_tokens: float = Field(
        256.0, gt=0, description="Output length where none is predicted, tokens.", json_schema_extra={"unit": "tokens"}
    )


class SizeConfig(LengthConfig):
    """Parameters of request sizes: expected output length plus weighted prompt length."""

    prompt_weight: float = Field(
        0.01,
        ge=0,
        le=1e9,
        description="Number of output tokens that a prompt token counts for, by its share of a decode's time.",
    )


class Lengths:
    """Expected output lengths of requests, in tokens, from the run's predictor."""

    def __init__(self, config: LengthConfig, predictor: OutputLengthPredictor) -> None:
        self._figure = f"{config.estimate}_tokens"
        self._default = config.default_output_tokens
        self._predictor = predictor

    def total(self, request: RequestView) -> float:
        """Return the total number of tokens that the request is now expected to generate."""
        estimate = self._predictor.predict(request)
        expected: float = self._default if estimate is None else getattr(estimate, self._figure)
        return expected

    def remaining(self, request: RequestView) -> float:
        """Return the number of tokens that the request is still expected to generate; at least 1."""
        return max(self.total(request) - request.num_output_tokens, 1.0)


class FirstLengths:
    """Expected output lengths of requests; each is fixed when it is first read, at the request's arrival."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._first: dict[RequestView, float] = {}

    def total(self, request: RequestView) -> float:
        """Return the request's total number of output tokens, as expected at its arrival."""
        first = self._first.get(request)
        if first is None:
            first = self._first[request] = self._lengths.total(request)
        return first

    def forget(self, requests: Iterable[RequestView]) -> None:
        """Forget requests that have left."""
        for request in requests:
            self._first.pop(request, None)
