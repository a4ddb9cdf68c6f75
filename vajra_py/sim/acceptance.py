"""Models of the acceptance of drafts in a simulation.

Each output token of a request has a random number, which depends on the seed, or an acceptance read from a trace. Both
depend on the request and on the token's position in the output, but not on the steps that a policy forms. A token that
is hard to predict is therefore hard to predict under every policy (common random numbers). With rates by position, the
token's place among the drafts of its step matters too.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vajra_py.config.drafts import SimulatedDraftsConfig
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.records.draft_log import read_drafts
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.support.seeds import SeedTree

_DRAWN_AT_ONCE = 64


class AcceptanceModel(Protocol):
    """Model of the number of accepted drafts of a decode."""

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of drafts per step that the model supports; None: any number."""

    def num_accepted(self, request: Request, num_drafts: int) -> int:
        """Return the number of drafts that are accepted, out of `num_drafts` drafts for the request's next tokens."""

    def release(self, request: Request) -> None:
        """Drop all data about a request that has ended."""


class RatesByPosition:
    """Acceptance model with one probability for each position of a draft in its step: the probability that the draft is
    accepted if all earlier drafts of the step are accepted.

    Each output token of a request has one random number, drawn from the request's own stream.
    """

    def __init__(self, rates: Sequence[float], seeds: SeedTree, *, endless: bool = False) -> None:
        """Create the model. `endless`: the last rate applies to all further positions."""
        self._rates = rates
        self._seeds = seeds
        self._is_endless = endless
        self._numbers: dict[Request, tuple[np.random.Generator, npt.NDArray[np.float64]]] = {}

    @property
    def max_tokens(self) -> int | None:
        """See `AcceptanceModel`."""
        return None if self._is_endless else len(self._rates)

    def num_accepted(self, request: Request, num_drafts: int) -> int:
        """See `AcceptanceModel`."""
        place, last = request.num_output_tokens, len(self._rates) - 1
        numbers = self._drawn(request, place + num_drafts)
        for position in range(num_drafts):
            if numbers[place + position] >= self._rates[min(position, last)]:
                return position
        return num_drafts

    def release(self, request: Request) -> None:
        """See `AcceptanceModel`."""
        self._numbers.pop(request, None)

    def _drawn(self, request: Request, count: int) -> npt.NDArray[np.float64]:
        found = self._numbers.get(request)
        if found is None:
            found = self._seeds.stream(request.request_id), np.empty(0)
        stream, numbers = found
        if len(numbers) < count or request not in self._numbers:
            blocks = -(-max(count - len(numbers), 1) // _DRAWN_AT_ONCE)
            numbers = np.concatenate([numbers, stream.random(blocks * _DRAWN_AT_ONCE)])
            self._numbers[request] = stream, numbers
        return numbers


class AcceptedInTrace:
    """Acceptance model that repeats a recorded run: a draft of a request is accepted if a draft was accepted at the
    same position of the output in the record. Drafts after the end of the record are not accepted.
    """

    max_tokens: int | None = None

    def __init__(self, accepted: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Create the model.

        `accepted` maps each request id to a list with one entry per verification: (number of output tokens before it,
        number of accepted drafts).
        """
        self._guessed = {name: _guessed(verified) for name, verified in accepted.items()}

    def num_accepted(self, request: Request, num_drafts: int) -> int:
        """See `AcceptanceModel`; 0 for a request without drafts in the trace."""
        guessed = self._guessed.get(request.request_id, frozenset())
        place = request.num_output_tokens
        for position in range(num_drafts):
            if place + position not in guessed:
                return position
        return num_drafts

    def release(self, request: Request) -> None:
        """Do nothing: the trace is kept; see `AcceptanceModel`."""


def _guessed(verified: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Return the positions in the output at which a token was an accepted draft."""
    return frozenset(place for start, count in verified for place in range(start, start + count))


def acceptance_model(config: SimulatedDraftsConfig, seeds: SeedTree) -> AcceptanceModel:
    """Return the acceptance model of these settings. Raises `ConfigError` for a file that cannot be read."""
    if config.rate is not None:
        return RatesByPosition([config.rate], seeds, endless=True)
    if config.rates is not None:
        return RatesByPosition(config.rates, seeds)
    if config.table is not None:
        return RatesByPosition(read_acceptance(Path(config.table)), seeds)
    assert config.trace is not None  # validation requires one of these four settings
    try:
        if not Path(config.trace).exists():
            raise FileNotFoundError("there is no such file")
        rows = list(read_drafts(Path(config.trace)))
        accepted = {row["request_id"]: _verified(row) for row in rows}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        message = f"{config.trace} cannot be read ({error})"
        raise ConfigError(Problem("backend.simulator.drafts.trace", message, "`drafts.jsonl.gz` of a run")) from error
    return AcceptedInTrace(accepted)


def _verified(row: Mapping[str, Sequence[int]]) -> list[tuple[int, int]]:
    return list(zip(row["places"], row["accepted"], strict=True))


def read_acceptance(path: Path) -> list[float]:
    """Read a measured table and return, for each position, the probability that a draft is accepted if all earlier
    drafts of the step are accepted.

    Raises `ConfigError` with file, line and reason.
    """
    rates: list[float] = []
    before = 1.0
    try:
        with path.open(newline="") as file:
            for row in (reader := csv.DictReader(file)):
                where = f"{path}:{reader.line_num}"
                position, acceptance = int(row["position"]), float(row["acceptance"])
                if position != len(rates) + 1:
                    allowed = f"Allowed: {len(rates) + 1}"
                    raise ConfigError(Problem(where, f"position is not the next one (got {position})", allowed))
                if not 0.0 <= acceptance <= before:
                    message = f"acceptance is no part of that at the position before (got {acceptance})"
                    raise ConfigError(Problem(where, message, f"Allowed: 0 to {before}"))
                rates.append(acceptance / before if before else 0.0)
                before = acceptance
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read ({error.strerror})", "A CSV file")) from error
    except (KeyError, TypeError, ValueError) as error:
        message = f"is no table of acceptance by position ({error})"
        raise ConfigError(Problem(str(path), message, "Columns: position, acceptance")) from error
    if not rates:
        raise ConfigError(Problem(str(path), "has no rows", "A row for each position, from 1"))
    return rates
