"""Time of one layer's experts on the fullest rank, interpolated from measured times by tokens and activated experts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.operators.attention_grid import filled


@dataclass(frozen=True, slots=True)
class Routing:
    """Distribution of tokens over experts, and of experts over ranks."""

    kind: Literal["uniform", "balanced"] = "uniform"
    """`uniform`: every token selects its experts at random; `balanced`: all experts get the same number of tokens."""
    ranks: int = 1
    """Number of ranks that hold equal shares of the experts (expert parallelism)."""
    imbalance: float = 1.0
    """Number of tokens of the fullest rank divided by the mean number per rank."""
    cut: int = 1
    """Number of GPUs over which every expert is divided, in addition to the division of the measured experts."""


class ExpertTimes:
    """Times of one layer's experts.

    `rows` are (tokens, activated experts, microseconds), measured on one rank with the model's number of experts per
    token.
    """

    def __init__(self, rows: npt.NDArray[np.float64], model: ModelSpec, routing: Routing) -> None:
        experts = model.experts
        if experts is None:
            raise ConfigError(Problem("model", f"has no experts ({model.name})"))
        if experts.num_experts % routing.ranks:
            message = f"does not divide the {experts.num_experts} experts of {model.name} ({routing.ranks})"
            raise ConfigError(Problem("expert_parallel", message))
        if experts.intermediate_size % routing.cut:
            message = (
                f"experts of {model.name} are {experts.intermediate_size} wide, which {routing.cut} does not divide"
            )
            raise ConfigError(Problem("tensor_parallel", message))
        self.num_layers = experts.num_layers
        self._routing = routing
        self._num_experts, self._per_token = experts.num_experts, experts.experts_per_token
        self._tokens, self._activated = np.unique(rows[:, 0]), np.unique(rows[:, 1])
        grid = np.full((len(self._tokens), len(self._activated)), np.nan)
        grid[np.searchsorted(self._tokens, rows[:, 0]), np.searchsorted(self._activated, rows[:, 1])] = rows[:, 2]
        self._grid = filled(grid, (self._tokens, self._activated))

    def activated(self, tokens: float) -> float:
        """Return the expected number of distinct experts that `tokens` tokens activate on one rank."""
        local = self._num_experts / self._routing.ranks
        if self._routing.kind == "balanced":
            return min(local, ceil(tokens * self._per_token / self._routing.ranks))
        missed = float((1.0 - self._per_token / self._num_experts) ** tokens)
        fewest = min(local, float(self._per_token)) if self._routing.ranks == 1 else 1.0
        return max(fewest, local * (1.0 - missed))

    def layer_us(self, tokens: float) -> float:
        """Return the microseconds of one layer's experts on the fullest rank; `tokens` counts all ranks.

        If every expert is divided over `cut` GPUs, the time is looked up for 1 / `cut` of the tokens and of the
        activated experts. That is the same work in whole experts: each expert has as many tokens, and as many weights
        are read and multiplied.
        """
        routing = self._routing
        share = tokens / routing.ranks * (routing.imbalance if routing.ranks > 1 else 1.0)
        return self._at(max(share / routing.cut, 1.0), self.activated(tokens) / routing.cut)

    def _at(self, tokens: float, activated: float) -> float:
        columns = [_line(self._tokens, self._grid[:, column], tokens) for column in range(len(self._activated))]
        fewest = float(self._activated[0])
        if activated < fewest and len(columns) > 1:
            # Measurements start at the number of experts that one token activates; one rank may activate fewer.
            slope = max(0.0, (columns[1] - columns[0]) / (float(self._activated[1]) - fewest))
            return max(columns[0] - slope * (fewest - activated), columns[0] * activated / fewest)
        return _line(self._activated, np.array(columns), activated)


def _line(knots: npt.NDArray[np.float64], values: npt.NDArray[np.float64], at: float) -> float:
    """Return the piecewise-linear value at `at`: extrapolated above the knots, constant below them."""
    if at <= knots[-1] or len(knots) == 1:
        return float(np.interp(at, knots, values))
    slope = max(0.0, float((values[-1] - values[-2]) / (knots[-1] - knots[-2])))
    return float(values[-1]) + slope * (at - float(knots[-1]))
