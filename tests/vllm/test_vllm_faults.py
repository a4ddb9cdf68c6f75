"""A policy that misbehaves does not take vLLM down: its requests end with an error that says what it did."""

from __future__ import annotations

import pytest

from tests.vllm.test_vllm_interface import core_of, wish
from vajra_py.contract import LocalReplicaView


def test_requests_end_with_an_error_when_the_policy_raises(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(tiny_model)
    for index in range(3):
        core.add(wish(index), 4, True)
    core.step()
    core.step()
    said: list[str] = []
    take = core.scheduler._tell_failed

    def tell(failed: object, outputs: object) -> None:
        said.append(failed.why)  # type: ignore[attr-defined]
        take(failed, outputs)

    def broken(replica: LocalReplicaView, batch: object, now: float) -> None:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(core.scheduler, "_tell_failed", tell)
    monkeypatch.setattr(core.scheduler.mechanism.replica, "_schedule", broken)
    core.step()
    assert core.reasons == {"r-0": "error", "r-1": "error", "r-2": "error"}
    assert all("vllm_v1" in why and "a slip" in why for why in said)
    core.add(wish(3), 4, True)
    while core.scheduler.has_requests():
        core.step()
    assert core.reasons["r-3"] != "length"
