"""How the benchmark of measured points has each engine set up, and how several prompts stand for one chunk."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.config import config_from_mapping
from vajra_py.contract import BatchFeatures
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency.operators.profile_bundle import one_chunk

FILE = Path(__file__).parents[2] / "benchmarks" / "silicon.py"


@pytest.fixture(scope="module")
def silicon() -> ModuleType:
    spec = importlib.util.spec_from_file_location("silicon", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["silicon"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A file like `silicon_sample.csv` with one point of each kind, one of another model and one of separate pools."""
    common = {"system": "h100_sxm", "isl": 1024, "osl": 128, "batch_size": 16.0, "tp_size": 2.0, "mode": "agg"}
    common |= {
        "silicon_ttft_ms": 200.0,
        "silicon_tpot_ms": 20.0,
        "gemm_quant_mode": "fp8",
        "model_path": "Qwen/Qwen3-32B",
    }
    rows = [
        {"id": "vllm", "backend": "vllm", "backend_version": "0.12.0"},
        {"id": "newer vllm", "backend": "vllm", "backend_version": "0.14.0"},
        {"id": "trtllm", "backend": "trtllm", "backend_version": "1.0.0rc3", "gemm_quant_mode": None},
        {"id": "sglang", "backend": "sglang", "backend_version": "0.5.6.post2"},
        {"id": "older sglang", "backend": "sglang", "backend_version": "0.5.1.post1"},
        {"id": "inferencemax", "backend": "vllm", "backend_version": "0.11.0", "silicon_data_source": "x; wip=1"},
        {"id": "experts", "backend": "vllm", "backend_version": "0.12.0", "model_path": "Mixtral"},
        {"id": "pools", "backend": "vllm", "backend_version": "0.12.0", "mode": "disagg"},
    ]
    path = tmp_path / "silicon_sample.csv"
    pd.DataFrame([{"silicon_data_source": "source_file=a.csv", **common, **row} for row in rows]).to_csv(
        path, index=False
    )
    return path


def test_points_are_those_of_dense_models_on_one_server(silicon: ModuleType, sample: Path) -> None:
    points = list(silicon.points(sample))
    assert [point.name for point in points] == [
        "vllm",
        "newer vllm",
        "trtllm",
        "sglang",
        "older sglang",
        "inferencemax",
    ]
    assert [point.release for point in points][:4] == [(0, 12, 0), (0, 14, 0), (1, 0, 0), (0, 5, 6)]
    assert points[2].precision == "bfloat16"
    assert (points[0].users, points[0].tensor) == (16, 2)


def test_vllm_is_synchronous_until_its_default_changed(silicon: ModuleType, sample: Path) -> None:
    is_synchronous = {point.name: silicon.is_synchronous(point) for point in silicon.points(sample)}
    assert [name for name, is_so in is_synchronous.items() if is_so] == ["vllm"]


def test_a_step_takes_what_the_server_was_told(silicon: ModuleType, sample: Path) -> None:
    limits = {point.name: silicon.limits_of(point) for point in silicon.points(sample)}
    tokens = {name: found["replica"]["max_batch_tokens"] for name, found in limits.items()}
    rule = 1024 + 1500 + 16
    assert tokens == {
        "vllm": rule,
        "newer vllm": rule,
        "trtllm": rule,
        "sglang": rule,
        "older sglang": 8192,
        "inferencemax": 8192,
    }
    scheduling = {name: found.get("scheduling", {}).get("replica_scheduler") for name, found in limits.items()}
    assert scheduling["trtllm"]["params"] == {"chunked_prefill": False}
    assert scheduling["older sglang"]["policy"] == "nano_vllm"
    assert scheduling["vllm"] is scheduling["sglang"] is scheduling["inferencemax"] is None


def test_sglang_cuts_long_prompts_at_its_chunk(silicon: ModuleType, sample: Path) -> None:
    point = next(point for point in silicon.points(sample) if point.name == "sglang")
    assert silicon.limits_of(replace(point, prompt=8000))["replica"]["max_batch_tokens"] == 8192 + 16


@pytest.mark.parametrize("name", ["trtllm", "older sglang", "sglang", "vllm"])
def test_every_engine_serves_all_requests(silicon: ModuleType, sample: Path, tmp_path: Path, name: str) -> None:
    point = next(point for point in silicon.points(sample) if point.name == name)
    settings = silicon.limits_of(point)
    settings["replica"]["memory"] = {"num_blocks": 4096}
    config = {
        "version": 1,
        "name": "point",
        "preset": "vllm-v1",
        **settings,
        "workload": {
            "type": "synthetic",
            "num_requests": 2 * point.users,
            "arrivals": {"type": "closed_loop", "num_users": point.users},
            "prompt_tokens": {"type": "constant", "value": point.prompt},
            "output_tokens": {"type": "constant", "value": point.output},
            "max_tokens": point.output,
        },
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
    }
    run = run_experiment(config_from_mapping(config), folder=tmp_path / "run")
    steps = run.steps("num_prefills", "prefill_tokens").to_pandas()
    assert list(run.requests("num_output_tokens").to_pandas()["num_output_tokens"]) == [point.output] * 32
    assert steps["prefill_tokens"].max() <= settings["replica"]["max_batch_tokens"]
    if name == "trtllm":  # whole prompts only
        assert set(steps["prefill_tokens"] % point.prompt) == {0}


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 32768)), min_size=1, max_size=8))
def test_one_chunk_has_the_pairs_of_all(chunks: list[tuple[int, int]]) -> None:
    batch = BatchFeatures()
    for tokens, context in chunks:
        batch = batch.with_chunk(tokens, context)
    exact = sum(tokens * context + tokens * (tokens + 1) // 2 for tokens, context in chunks)
    assert batch.prefill_attention_pairs == exact
    chunk, behind = one_chunk(batch.prefill_tokens, batch.prefill_attention_pairs)
    assert chunk * behind + chunk * (chunk + 1) / 2 == pytest.approx(exact)
    assert chunk <= batch.prefill_tokens + 1e-6
    assert behind >= 0.0
