"""A run in parts has the results of the undivided run, or says why it is not divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vajra_policies.round_robin import RoundRobin
from vajra_py.config import ExperimentConfig, config_from_mapping, manifest
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.divided import Part
from vajra_py.experiment.runs.folder import find_runs
from vajra_py.experiment.runs.parts import parts_of, run_in_parts
from vajra_py.experiment.runs.pool import InProcess, MakePool
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import load_registry
from vajra_py.runtime.records import decision_log, step_log

POLICIES = {
    "request_prioritizer": "fcfs",
    "replicaset_scheduler": "round_robin",
    "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 128}},
}
BASE: dict[str, Any] = {
    "version": 1,
    "name": "whole",
    "seed": 4,
    "num_replicas": 5,
    "scheduling": POLICIES,
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 60},
        "num_requests": 150,
        "prompt_tokens": {"type": "uniform", "min": 20, "max": 700},
        "output_tokens": {"type": "uniform", "min": 2, "max": 60},
    },
    "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3-8b", "device": "a100-80gb-sxm"}}},
    "replica": {"max_model_len": 700, "memory": {"num_blocks": 120}},
}
TWO_KINDS = {
    "short": {"select": {"max_prompt_tokens": 200}, "num_replicas": 3, "scheduling": POLICIES},
    "long": {"num_replicas": 2, "scheduling": POLICIES | {"replicaset_scheduler": "least_loaded"}},
}

SPLIT = {
    "short": {
        **{"select": {"max_prompt_tokens": 200}, "scheduling": POLICIES, "replica": {"memory": {"num_blocks": 120}}},
        **{"pools": {"prefill": {"num_replicas": 2}, "decode": {}}, "links": {"bandwidth_gb_s": 2.0}},
    },
    "long": {"num_replicas": 2, "scheduling": POLICIES},
}


def config_of(folder: Path, **changes: Any) -> ExperimentConfig:
    mapping = BASE | changes
    output = {"dir": str(folder)} | changes.get("output", {})
    return config_from_mapping(
        {name: value for name, value in mapping.items() if value is not None} | {"output": output}
    )


def in_process(number: list[int] | None = None) -> MakePool:
    return lambda progress: InProcess(load_registry(), progress)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "environment.json"
    }


def bytes_of_both(config: ExperimentConfig, count: int) -> tuple[dict[str, bytes], dict[str, bytes], list[Part]]:
    registry = load_registry()
    place = config.output_dir / config.name
    run_experiment(config)
    whole = files(place)
    for path in place.iterdir():
        path.unlink()
    parts = parts_of(config, registry, count)
    assert isinstance(parts, list), parts
    run = run_in_parts(config, registry, parts, in_process())
    assert not isinstance(run, str), run
    assert sorted(one.name for one in config.output_dir.iterdir()) == [config.name]
    return whole, files(place), parts


@pytest.mark.parametrize(
    ("changes", "num_parts"),
    [
        ({}, 3),
        ({"scheduling": POLICIES | {"replicaset_scheduler": "random", "request_prioritizer": "lrs"}}, 3),
        ({"num_replicas": 2}, 2),
        ({"scheduling": None, "replicasets": TWO_KINDS}, 3),
        ({"scheduling": None, "num_replicas": None, "replicasets": SPLIT}, 3),
        ({"replica": {"max_model_len": 400, "memory": {"num_blocks": 30, "host_blocks": 20}}}, 3),
        ({"output": {"steps": False}}, 3),
        ({"output": {"decision_log": False}}, 3),
    ],
    ids=[
        "round robin",
        "random, lrs",
        "fewer replicas than workers",
        "two replicasets",
        "requests that move",
        "rejected, preempted",
        "no steps",
        "no decision log",
    ],
)
def test_parts_give_the_bytes_of_the_whole(changes: dict[str, Any], num_parts: int, tmp_path: Path) -> None:
    whole, combined, parts = bytes_of_both(config_of(tmp_path, **changes), 3)
    assert len(parts) == num_parts
    assert combined == whole


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few records of the decision log are written, and few journaled, together, as with many times the requests."""
    monkeypatch.setattr(decision_log, "RECORDS_AT_ONCE", 37)
    monkeypatch.setattr(step_log, "RECORDS_PER_BATCH", 10)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    num_replicas=st.integers(2, 7),
    count=st.integers(2, 8),
    rate=st.sampled_from([5, 60, 1000]),
    prioritizer=st.sampled_from(["fcfs", "edf", "lrs", "priority"]),
    scheduler=st.sampled_from(["fixed_chunk", "dynamic_chunk"]),
    cached=st.booleans(),
)
def test_any_division_is_exact(
    seed: int,
    num_replicas: int,
    count: int,
    rate: int,
    prioritizer: str,
    scheduler: str,
    cached: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    scheduling = {
        "request_prioritizer": prioritizer,
        "replicaset_scheduler": "random",
        "replica_scheduler": scheduler,
    }
    workload = {**BASE["workload"], "num_requests": 60, "arrivals": {"type": "poisson", "rate": rate}}
    replica = {"max_model_len": 800, "memory": {"num_blocks": 80, "prefix_cache": {"enabled": cached}}}
    config = config_of(
        tmp_path_factory.mktemp("run"),
        seed=seed,
        num_replicas=num_replicas,
        scheduling=scheduling,
        workload=workload,
        replica=replica,
    )
    whole, combined, _ = bytes_of_both(config, count)
    assert combined == whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_replicas": 1}, "it has one replica"),
        ({"scheduling": POLICIES | {"replicaset_scheduler": "pull"}}, "default: pull leaves requests in a queue that"),
        (
            {"scheduling": POLICIES | {"replicaset_scheduler": "least_loaded"}},
            "default: least_loaded reads the replicas' loads",
        ),
        ({"admission": {"max_queued_requests": 9}}, "default: the bounds of `admission` count what waits at all"),
        (
            {"backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}, "drain": False}}},
            "it ends with its last arrival",
        ),
    ],
    ids=["one replica", "pull", "load", "admission", "drain"],
)
def test_why_a_run_stays_whole(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    said = parts_of(config_of(tmp_path, **changes), load_registry(), 4)
    assert isinstance(said, str)
    assert said.startswith(reason)


def test_sessions_stay_whole(tmp_path: Path) -> None:
    tokens = {"type": "uniform", "min": 5, "max": 20}
    workload = {"type": "sessions", "num_sessions": 5, "arrivals": {"type": "poisson", "rate": 2}}
    workload |= {
        "turns": {"type": "uniform", "min": 2, "max": 3},
        "think_time_s": {"type": "uniform", "min": 1, "max": 2},
    }
    workload |= dict.fromkeys(("first_turn_tokens", "turn_tokens", "output_tokens"), tokens)
    said = parts_of(config_of(tmp_path, workload=workload), load_registry(), 4)
    assert said == "its requests follow one another, wherever they were served"


def test_finished_parts_are_not_run_again(tmp_path: Path) -> None:
    config, registry = config_of(tmp_path), load_registry()
    parts = parts_of(config, registry, 3)
    assert isinstance(parts, list)
    executed: list[int] = []

    class Stops(InProcess):
        def submit(self, number: int, task: Any) -> None:
            executed.append(number)
            super().submit(number, task)

        def ends(self) -> Any:
            yield next(iter(super().ends()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parts(config, registry, parts, lambda progress: Stops(registry, progress))
    first = tmp_path / ".whole.parts/0-of-3/manifest.json"
    written = first.stat().st_mtime_ns
    assert find_runs(tmp_path) == [tmp_path]  # parts are no runs
    assert {one.name for one in first.parent.iterdir()}.isdisjoint(
        {"summary.json", "requests.parquet", "steps.parquet"}
    )
    stamps: list[int] = []

    class Looks(InProcess):
        def close(self) -> None:
            stamps.append(first.stat().st_mtime_ns)

    run = run_in_parts(config, registry, parts, lambda progress: Looks(registry, progress))
    assert not isinstance(run, str)
    assert stamps == [written]
    assert run.requests("request_id").num_rows == 150
    assert not (tmp_path / ".whole.parts").exists()


def test_parts_from_before_a_change_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, rows = tmp_path / "trace.csv", ["arrived_at,num_prompt_tokens,num_output_tokens\n", *["0.0,10,5\n"] * 20]
    trace.write_text("".join(rows))
    config, registry = config_of(tmp_path, workload={"type": "csv", "path": str(trace)}), load_registry()
    parts = parts_of(config, registry, 2)
    assert isinstance(parts, list)

    class Unfinished(InProcess):
        def ends(self) -> Any:
            yield from super().ends()
            raise KeyboardInterrupt

    def made_again(**options: Any) -> list[bool]:
        manifests = [tmp_path / f".whole.parts/{index}-of-2/manifest.json" for index in range(2)]
        before = [one.stat().st_mtime_ns if one.exists() else None for one in manifests]
        with pytest.raises(KeyboardInterrupt):
            run_in_parts(config, registry, parts, lambda progress: Unfinished(registry, progress), **options)
        return [one.stat().st_mtime_ns != then for one, then in zip(manifests, before, strict=True)]

    assert made_again() == [True, True]
    assert made_again() == [False, False]
    assert made_again(overwrite=True) == [True, True]
    trace.write_text("".join([*rows, "0.5,20,5\n"]))
    assert made_again() == [True, True]
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "__version__", "9.9.9")
        assert made_again() == [True, True]
    run = run_in_parts(config, registry, parts, in_process())
    assert not isinstance(run, str)
    assert run.requests("request_id").num_rows == 21


def test_a_part_that_cannot_be_run_is_told(tmp_path: Path) -> None:
    class Fails(InProcess):
        def ends(self) -> Any:
            for number, error in super().ends():
                yield number, "its worker was lost" if number == 1 else error

    config, registry = config_of(tmp_path), load_registry()
    parts = parts_of(config, registry, 3)
    assert isinstance(parts, list)
    said = run_in_parts(config, registry, parts, lambda progress: Fails(registry, progress))
    assert said == "its worker was lost"
    assert not list(tmp_path.iterdir())


def test_a_run_whose_parts_cannot_be_planned_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, registry = config_of(tmp_path), load_registry()
    parts = parts_of(config, registry, 3)
    assert isinstance(parts, list)
    monkeypatch.setattr(RoundRobin, "assign", lambda self, request, *_: None if request.num_prompt_tokens > 600 else 0)
    assert run_in_parts(config, registry, parts, in_process()) == "round_robin binds a request to no replica (None)"


def test_a_mistake_is_found_before_parts_are_made(tmp_path: Path) -> None:
    long = TWO_KINDS["long"] | {"select": {"min_prompt_tokens": 600}}
    config = config_of(tmp_path, scheduling=None, replicasets={"short": TWO_KINDS["short"], "long": long})
    with pytest.raises(ConfigError, match=r"^replicasets: no replicaset takes request "):
        parts_of(config, load_registry(), 2)
