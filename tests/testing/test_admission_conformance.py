"""The conformance suite finds what is wrong with an admission policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import (
    ACCEPT,
    Accept,
    AdmissionDecision,
    AdmissionSpec,
    Defer,
    PolicyConfig,
    Refuse,
    ReplicasetView,
    RequestView,
)
from vajra_py.testing import check_admission_policy


class NoConfig(PolicyConfig):
    """No parameters."""


class Base:
    """Accepts everything."""

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        return ACCEPT


class Nonsense(Base):
    """Answers with a truth value."""

    def admit(self, request: Any, replicasets: Any, now: float) -> Any:
        return request.index != 3


class Hoarder(Base):
    """Defers one request for ever."""

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        return Defer() if request.index == 2 else ACCEPT


class Past(Base):
    """Defers into the past."""

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        return Defer(now - 1.0)


class Dice(Base):
    """Draws from a generator of its own."""

    _stream = np.random.default_rng(1)

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        return Refuse("by lot") if self._stream.random() < 0.5 else ACCEPT


class Clock(Base):
    """Reads the machine's clock."""

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        return ACCEPT if time.monotonic() > 0 else Refuse("never")


class Writer(Base):
    """Writes into the request."""

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        request.max_tokens = 1
        return ACCEPT


class Insider(Base):
    """Reads what the contract does not offer."""

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        return Accept(max_tokens=2) if request.state.value == "waiting" else ACCEPT


class Keeper(Base):
    """Keeps every request that it has seen."""

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        self._seen.append(request)
        return ACCEPT


class Helper(Base):
    """Has a public method that nobody calls."""

    def helps(self) -> int:
        return 3


class Raising(Base):
    """Raises."""

    def admit(self, request: Any, replicasets: Any, now: float) -> AdmissionDecision:
        raise KeyError("tenant")


def spec(kind: type[Any]) -> AdmissionSpec:
    return AdmissionSpec("tried", NoConfig, lambda config, context: kind(), "Tried.")


def test_a_plain_policy_passes() -> None:
    check_admission_policy(spec(Base))


@pytest.mark.parametrize(
    ("kind", "check", "complaint"),
    [
        (Nonsense, "decides about everybody", "something else than Accept, Refuse or Defer"),
        (Hoarder, "decides about everybody", "defers one request although nothing else will happen"),
        (Past, "decides about everybody", "deferred a request into the past"),
        (Dice, "decides the same again", "differs when the run is repeated"),
        (Clock, "is pure", "calls time.monotonic"),
        (Writer, "reads what the contract offers", "writes request.max_tokens"),
        (Insider, "reads what the contract offers", "state"),
        (Keeper, "forgets requests that have ended", "after a run it still holds"),
        (Helper, "has no method that nobody calls", "helps"),
        (Raising, "decides about everybody", "KeyError: 'tenant'"),
        (int, "is built from its parameters", "int has no method 'admit'"),
    ],
)
def test_a_faulty_policy_is_found_out(kind: type[Any], check: str, complaint: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_admission_policy(spec(kind))
    found = [line for line in str(caught.value).splitlines() if line.startswith(f"  {check}: ")]
    assert found, str(caught.value)
    assert complaint in found[0]
