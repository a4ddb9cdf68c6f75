"""Every setting of an experiment with values that nobody meant: refused in one line, or run without losing a request."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from pydantic import BaseModel, ConfigDict

import vajra_py as vajra
from tests.experiment.small import SMALL, WORKLOAD
from vajra_py.config import config_from_mapping, dump_effective
from vajra_py.contract import BatchFeatures
from vajra_py.contract.hookspecs import LatencyModelSpec
from vajra_py.errors import ConfigError, ExecutorError, VajraError, WorkloadError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import PluginSource, load_registry

NUM_REQUESTS = WORKLOAD["num_requests"]
CLASSES = {
    "name": "a", "ttft_slo_s": 1.0, "tpot_slo_s": 0.1, "tbt_slo_s": 0.2, "deadline_s": 4.0, "expires_after_s": 5.0, "priority": 1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix cache": {"replica": {"max_model_len": 4096, "memory": {"num_blocks": 400, "prefix_cache": {"enabled": True}}}},
    "roofline": {
        "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3-8b", "device": "a100-80gb-sxm"}}}
    },
    "sessions": {
        "workload": {
            "type": "profile",
            "profile": "mooncake_conversation_sessions",
            "num_requests": NUM_REQUESTS,
            "rate": 2.0,
        }
    },
    "classes": {
        "workload": {
            **WORKLOAD,
            "slo_classes": [CLASSES],
            "tenants": {"count": 3, "zipf_exponent": 1.0},
            "priorities": [{"priority": 1, "share": 1.0}],
            "max_tokens": 10,
            "max_prompt_tokens": 4000,
            "time_scale": 1.0,
        }
    },
    "closed loop": {
        "workload": {
            **WORKLOAD,
            "arrivals": {"type": "closed_loop", "num_users": 3, "think_time_s": {"type": "constant", "value": 0.1}},
        }
    },
}  # fmt: skip
"""Experiments that between them have most of the settings."""

VALUES: list[Any] = [
    0, -1, 1, 1.5, 1e300, 1e-300, 2**31 - 1, 2**31, 2**63, 10**40, math.nan, math.inf, True, None, "x", "\0", "é", [], {},
]  # fmt: skip
LONGEST_S = 20
MOST_REQUESTS = 2000
MOST_REPLICAS = 1000


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, (*path, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _leaves(one, (*path, index))
    else:
        yield path


@cache
def effective(variant: str) -> dict[str, Any]:
    """A variant with every default written out."""
    from ruamel.yaml import YAML

    loaded: dict[str, Any] = YAML(typ="safe").load(dump_effective(config_from_mapping({**SMALL, **VARIANTS[variant]})))
    return loaded


@cache
def places() -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Every setting of every variant; where results go and the version of the format are tested elsewhere."""
    return tuple(
        (variant, path)
        for variant in VARIANTS
        for path in _leaves(effective(variant))
        if path[0] not in ("output", "version", "name")
    )


def changed(variant: str, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The variant with one setting replaced."""
    experiment = copy.deepcopy(effective(variant))
    place: Any = experiment
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return experiment


@contextmanager
def at_most(seconds: int, what: str) -> Iterator[None]:
    """Fail, rather than hang, when something never ends."""

    def stop(signum: int, frame: FrameType | None) -> None:
        pytest.fail(f"does not end: {what}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_or_refuse(experiment: dict[str, Any], folder: Path) -> str | None:
    """What is said when the experiment is refused; None when it ran, with every request in its table."""
    try:
        config = config_from_mapping(experiment)
        asked = getattr(config.workload, "num_requests", None) or 0
        if config.num_replicas > MOST_REPLICAS or asked > MOST_REQUESTS:
            return None  # only long
        run = vajra.run(config, folder=folder, overwrite=True)
    except VajraError as error:
        return str(error)
    ended = run.requests_frame("request_id", "reason")
    assert ended.request_id.is_unique
    assert len(ended) == run.manifest["num_submitted"]
    if run.config["backend"]["simulator"].get("horizon_s") is None:
        assert run.manifest["workload"]["num_requests"] == len(ended)
        assert run.manifest["num_unfinished"] == 0
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "run"


@settings(max_examples=250)
@given(data=st.data())
def test_any_value_anywhere_is_refused_or_run_whole(folder: Path, data: st.DataObject) -> None:
    variant, path = data.draw(st.sampled_from(places()))
    value = data.draw(st.sampled_from(VALUES))
    with at_most(LONGEST_S, f"{variant} {path} = {value!r}"):
        said = run_or_refuse(changed(variant, path, value), folder)
    if said is not None:
        assert len(said) < 1500
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("variant", "path", "value", "said"),
    [
        ("plain", "workload.num_requests", 10**27, "workload.num_requests: must be at most 1000000000"),
        ("plain", "num_replicas", 10**11, "num_replicas: must be at most 1000000"),
        ("plain", "replica.memory.num_blocks", 10**20, "replica.memory.num_blocks: must be at most 2147483647"),
        ("plain", "replica.memory.block_size", 2**31 - 1, "replica.memory.block_size: must be at most 65536"),
        ("plain", "replica.max_model_len", 10**26, "replica.max_model_len: must be at most 2147483647"),
        ("plain", "replica.pipeline_stages", 2**31 - 1, "replica.pipeline_stages: must be at most 1024"),
        ("plain", "backend.simulator.latency.num_stages", 10**40, "num_stages: must be at most 1024"),
        ("plain", "backend.simulator.horizon_s", 1e300, "horizon_s: must be at most 9000000"),
        ("plain", "backend.simulator.scheduling_overhead_s", 1e300, "overhead_s: must be at most 9000000"),
        ("plain", "workload.prompt_tokens.max", 1e20, "workload.prompt_tokens.max: must be at most 2147483647"),
        ("classes", "workload.priorities.0.priority", 2**63, "workload.priorities.0.priority: must be at most 2147483647"),
        ("classes", "workload.slo_classes.0.priority", -(2**63), "slo_classes.0.priority: must be at least -2147483648"),
        ("closed loop", "workload.arrivals.num_users", 2**31, "workload.arrivals.num_users: must be at most"),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_meant_is_refused_where_it_stands(
    variant: str, path: str, value: Any, said: str
) -> None:
    keys = tuple(int(key) if key.isdigit() else key for key in path.split("."))
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(changed(variant, keys, value))
    assert said in str(caught.value)


# Beyond the clock


@pytest.mark.parametrize("rate", [1e-8, 1e-300])
def test_requests_that_would_arrive_beyond_the_clock_are_refused(rate: float, tmp_path: Path) -> None:
    experiment = changed("plain", ("workload", "arrivals", "rate"), rate)
    with pytest.raises(
        WorkloadError, match=r"a request arrives .* s after the run's begin\. Allowed: at most 9,000,000 s"
    ):
        vajra.run(config_from_mapping(experiment), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variant", "since"), [("plain", "the run's begin"), ("closed loop", "(the run's begin|the one it follows)")]
)
@pytest.mark.parametrize("time_scale", [1e9, 1e308])
def test_times_scaled_beyond_the_clock_are_refused(variant: str, since: str, time_scale: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    engine = {"model": str(tmp_path), "random_weights": True, "time_scale": time_scale}
    experiment = {**effective(variant), "backend": {"engine": engine}}
    said = (
        rf"^backend\.engine\.time_scale: a request arrives .* s after {since}, times this factor\. Allowed: at most 9,0"
    )
    with pytest.raises(ConfigError, match=said):
        vajra.run(config_from_mapping(experiment), folder=tmp_path / "run")


def test_a_slow_arrival_within_the_clock_is_served(tmp_path: Path) -> None:
    experiment = changed("plain", ("workload", "arrivals", "rate"), 2e-5)
    run = vajra.run(config_from_mapping(experiment), folder=tmp_path / "run")
    frame = run.requests_frame("arrived_at", "e2e_s")
    assert frame.e2e_s.notna().all()
    assert frame.arrived_at.max() > 100_000


def test_steps_that_end_beyond_the_clock_end_the_run_with_what_was_reached(tmp_path: Path) -> None:
    experiment = changed("plain", ("backend", "simulator", "latency", "step_time_s"), 4e6)
    with pytest.raises(ExecutorError, match=r"the clock ends after 9,000,000 s, and requests are left"):
        vajra.run(config_from_mapping(experiment), folder=tmp_path / "run")
    (left,) = vajra.open_runs(tmp_path / "run")
    assert left.manifest["status"] == "failed"
    assert len(left.requests_frame("request_id")) == NUM_REQUESTS


# Latency models of plug-ins that answer nonsense


class NoSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Wrong:
    """A latency model whose steps last what it is told, from the second one on; the first takes a hundredth of a second."""

    num_stages = 1

    def __init__(self, answer: float, *, in_runs: bool) -> None:
        self._answer = answer
        self._num_asked = 0
        if in_runs:
            self.decode_run_times_s = self._run_times_s

    def stage_time_s(self, features: BatchFeatures) -> float:
        self._num_asked += 1
        return 0.01 if self._num_asked < 2 or hasattr(self, "decode_run_times_s") else self._answer

    def batch_time_s(self, features: BatchFeatures) -> float:
        return 0.01

    def _run_times_s(self, num_decodes: int, first_context_tokens: int, num_steps: int) -> Any:
        times = np.full(num_steps, 0.01)
        times[-1] = self._answer
        return times


@pytest.mark.parametrize("in_runs", [False, True], ids=["one by one", "as a run of decodes"])
@pytest.mark.parametrize("answer", [math.nan, math.inf, -math.inf, -1.0, 1e300, 1e7])
def test_a_step_time_that_cannot_be_ends_the_run_by_name(answer: float, in_runs: bool, tmp_path: Path) -> None:
    registry = load_registry()
    spec = LatencyModelSpec("wrong", NoSettings, lambda config: Wrong(answer, in_runs=in_runs), "Nonsense.")
    source = PluginSource("lab", "1", "lab")

    def lazy(hook: str) -> Any:
        return [*registry.lazy(hook), *([(source, spec)] if hook == "vajra_latency_models" else [])]

    own = structs.replace(registry, lazy=lazy)
    experiment = {**SMALL, "backend": {"simulator": {"latency": {"type": "wrong"}}}}
    config = config_from_mapping(experiment, registry=own)
    with pytest.raises(ExecutorError, match="latency model: a step cannot last"):
        run_experiment(config, folder=tmp_path / "run", registry=own)
    (left,) = vajra.open_runs(tmp_path / "run")
    assert left.manifest["status"] == "failed"
    assert len(left.requests_frame("request_id")) == left.manifest["num_submitted"] > 0
