"""A policy that misbehaves does not take vLLM down: its requests end with an error, or go on under the fallback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.core import Core, make_scheduler, vllm_config
from tests.vllm.plugins import install_broken
from tests.vllm.test_vllm_interface import script
from vajra_py.errors import ConfigError
from vajra_py.plugins import Registry, build_registry
from vajra_py.vllm import Scheduler

POLICY_EXCEPTIONS = {
    "raises": ("replica_scheduler: {policy: breaks, params: {how: raises}}", "a slip"),
    "too many tokens": ("replica_scheduler: {policy: breaks, params: {how: too_many}}", "policy breaks"),
    "not finite": ("request_prioritizer: {policy: no_number}", "policy no_number"),
    "never returns": ("replica_scheduler: {policy: breaks, params: {how: never_returns}}", "did not return"),
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    install_broken(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = build_registry(metadata.entry_points(group="vajra"))
    monkeypatch.setattr("vajra_py.vllm.scheduler.load_registry", lambda: found)
    yield found
    sys.modules.pop("broken_policies", None)


def core_of(
    model: str, file: Path, scheduling: str, *, fallback: str | None = None, is_async: bool = False, blocks: int = 61
) -> Core:
    lines = ["version: 1", "preset: sarathi", "policy_timeout_s: 0.5", "scheduling:", f"  {scheduling}"]
    if fallback is not None:
        lines += [f"backend: {{vllm: {{fallback: {fallback}}}}}"]
    file.write_text("\n".join(lines) + "\n")
    config = vllm_config(
        model,
        is_async=is_async,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        additional_config={"vajra": {"experiment": str(file)}},
    )
    return Core(make_scheduler(Scheduler, config, blocks, 4), is_async)


def run(core: Core, *, num_requests: int = 6) -> None:
    core.run([script(index, arrives=index) for index in range(num_requests)], 4, True, max_steps=500)
    core.scheduler.schedule()


def is_clean(core: Core) -> bool:
    memory = core.scheduler.mechanism.replica.memory
    memory.check()
    core.scheduler.mechanism.controller.check_conservation()
    return not core.scheduler.requests and memory.free_blocks == memory.num_blocks


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", POLICY_EXCEPTIONS)
def test_requests_end_with_an_error_that_names_the_policy(
    tiny_model: str, tmp_path: Path, registry: Registry, caplog: pytest.LogCaptureFixture, how: str, is_async: bool
) -> None:
    scheduling, word = POLICY_EXCEPTIONS[how]
    core = core_of(tiny_model, tmp_path / "experiment.yaml", scheduling, is_async=is_async)
    with caplog.at_level(logging.WARNING):
        run(core)
    core.scheduler.shutdown()
    assert core.reasons.keys() == {f"r-{index}" for index in range(6)}
    assert set(core.reasons.values()) <= {"error", "length"}
    assert "error" in core.reasons.values()
    logged = [record.getMessage() for record in caplog.records]
    assert any(word in line and "step" in line for line in logged), logged
    assert sum("ends:" in line for line in logged) == list(core.reasons.values()).count("error")
    assert is_clean(core)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", POLICY_EXCEPTIONS)
@pytest.mark.parametrize("blocks", [26, 201])
def test_requests_finish_under_the_fallback_with_the_tokens_that_they_would_have_had(
    tiny_model: str,
    tmp_path: Path,
    registry: Registry,
    caplog: pytest.LogCaptureFixture,
    how: str,
    is_async: bool,
    blocks: int,
) -> None:
    scheduling, word = POLICY_EXCEPTIONS[how]
    file = tmp_path / "experiment.yaml"
    core = core_of(tiny_model, file, scheduling, fallback="vllm-v1", is_async=is_async, blocks=blocks)
    with caplog.at_level(logging.WARNING):
        run(core)
    core.scheduler.shutdown()
    calm = core_of(tiny_model, file, "request_prioritizer: fcfs", is_async=is_async, blocks=blocks)
    run(calm)
    assert core.tokens == calm.tokens
    assert core.reasons == calm.reasons == {f"r-{index}": "length" for index in range(6)}
    logged = [record.getMessage() for record in caplog.records]
    assert sum(word in line for line in logged) == 1
    assert any("vllm_v1" in line and "go on" in line for line in logged)
    assert is_clean(core)


def test_a_second_breach_ends_the_requests(
    tiny_model: str, tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(tiny_model, tmp_path / "e.yaml", POLICY_EXCEPTIONS["raises"][0], fallback="vllm-v1")
    schedule = core.scheduler.mechanism.change_policies

    def change(choices: Any) -> None:
        schedule(choices)

        def broken(*_: Any) -> None:
            raise ZeroDivisionError("again")

        monkeypatch.setattr(core.scheduler.mechanism.replica, "_schedule", broken)

    monkeypatch.setattr(core.scheduler.mechanism, "change_policies", change)
    run(core)
    assert "error" in core.reasons.values()
    assert is_clean(core)


def test_an_abort_while_the_fallback_takes_over_is_kept(tiny_model: str, tmp_path: Path, registry: Registry) -> None:
    core = core_of(tiny_model, tmp_path / "e.yaml", POLICY_EXCEPTIONS["raises"][0], fallback="vllm-v1", is_async=True)
    for index in range(3):
        core.add(script(index), 4, True)
    while core.scheduler.mechanism.fault is None and core.scheduler._fallback is not None:
        core.step()
    core.abort("r-1")
    while core.scheduler.has_requests() or core.queue:
        core.step()
    assert core.reasons == {"r-0": "length", "r-1": "abort", "r-2": "length"}
    assert is_clean(core)


def test_an_unknown_fallback_is_refused_with_the_names(tiny_model: str, tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match="vllm-v1"):
        core_of(tiny_model, tmp_path / "e.yaml", "request_prioritizer: fcfs", fallback="vllm-v2")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("replica: {memory: {host_blocks: 8}}", "host_blocks"),
        ("replica: {pipeline_stages: 2}", "pipeline_stages"),
        ("replica: {kv_parallel: {groups: 2, group_tokens: 64}}", "kv_parallel"),
        ("replica: {memory: {prefix_cache: {unscheduled: keep}}}", "unscheduled"),
        ("replicasets: {a: {}}", "replicasets"),
        ("num_replicas: 2", "num_replicas"),
    ],
)
def test_settings_that_a_vllm_does_not_carry_out_are_refused(
    tiny_model: str, tmp_path: Path, line: str, word: str
) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(f"version: 1\npreset: sarathi\n{line}\n")
    config = vllm_config(tiny_model, max_model_len=256, additional_config={"vajra": {"experiment": str(file)}})
    with pytest.raises(ConfigError, match=word) as caught:
        make_scheduler(Scheduler, config, 40, 4)
    assert str(caught.value).count("\n") == 0
