"""Measured runs of engines that were set up in other ways: small memories, data-parallel ranks, and everything that `meta.json` may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.latency.measured import ENGINE, MIXTURE, as_measured, as_mixture, as_shared_prompt, write_run
from vajra_py.cli.validate import validate
from vajra_py.errors import ConfigError
from vajra_py.experiment.measured.accuracy import compare_with_measured
from vajra_py.experiment.measured.files import read_measured
from vajra_py.experiment.measured.run import EngineSettings, read_measured_run
from vajra_py.experiment.measured.simulation import bundle_latency, ranked, simulate_measured, simulation_of


def settings_with(folder: Path, **arguments: Any) -> EngineSettings:
    return read_measured_run(write_run(folder, engine_kwargs={**ENGINE, **arguments})).settings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"enable_prefix_caching": None}, {"prefix_caching": True}),
        ({"enable_prefix_caching": False}, {"prefix_caching": False}),
        ({"async_scheduling": None}, {"asynchronous": True}),
        ({"async_scheduling": False}, {"asynchronous": False}),
        ({"enforce_eager": True}, {"capture_limit": 0}),
        ({"max_cudagraph_capture_size": 64}, {"capture_limit": 64}),
        ({"max_model_len": None, "max_num_seqs": None}, {"max_model_len": None, "max_num_seqs": 256}),
        ({"num_gpu_blocks_override": 77}, {"num_blocks": 77}),
        ({"gpu_memory_utilization": 0.5}, {"memory_fraction": 0.5}),
        ({"kv_cache_dtype": "auto", "dtype": "bfloat16", "seed": 42}, {"kv_dtype": None}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8"}),
        ({"data_parallel_size": 4, "enable_expert_parallel": True}, {"data_parallel": 4, "expert_parallel": True}),
    ],
)
def test_what_an_engine_was_started_with_is_taken(
    tmp_path: Path, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = settings_with(tmp_path / "run", **arguments)
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enable_prefix_caching": "yes"}, r"meta.json enable_prefix_caching: is not a switch \('yes'\). Allowed: true, false"),
        ({"enforce_eager": 1}, r"enforce_eager: is not a switch \(1\)"),
        ({"gpu_memory_utilization": 90}, r"gpu_memory_utilization: is not a part of the memory \(90\). Allowed: above 0"),
        ({"kv_cache_dtype": "int4"}, r"kv_cache_dtype: is not known \('int4'\). Allowed: auto, bfloat16"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size: is not simulated \(2\). Allowed: 1"),
        ({"max_num_seqs": 0}, r"max_num_seqs: is not a count \(0\)"),
        ({"max_cudagraph_capture_size": "all"}, r"max_cudagraph_capture_size: is not a count \('all'\)"),
        ({"data_parallel_size": 1.5}, r"data_parallel_size: is not a count \(1.5\)"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused_by_name(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_with(tmp_path / "run", **arguments)


def test_a_cache_of_other_numbers_than_the_bundle_s_is_refused(bundle: Path, tmp_path: Path) -> None:
    run = read_measured_run(write_run(tmp_path / "run", engine_kwargs={**ENGINE, "kv_cache_dtype": "fp8"}))
    with pytest.raises(ConfigError, match=r"is bf16, and the run's KV cache is fp8. Allowed: a bundle measured with"):
        bundle_latency(run, bundle)
    changed = read_measured(tmp_path / "run", {"kv_cache_dtype": "auto", "gpu_memory_utilization": 0.8})
    latency = bundle_latency(changed, bundle)
    assert simulation_of(changed, latency, tmp_path / "w").replica.memory.memory_fraction == 0.8


def test_a_run_whose_memory_is_full_is_validated_block_by_block(bundle: Path, tmp_path: Path) -> None:
    """Requests are preempted, and one block fewer is another run: the command finds its own truth without an error."""
    folder = write_run(tmp_path / "full", count=40, kv_cache={"num_gpu_blocks": 61, "block_size": 16})
    run = read_measured_run(folder)
    latency = bundle_latency(run, bundle, context_variation=0.0)
    simulated = simulate_measured(run, latency, tmp_path / "truth")
    preempted = simulated.requests("num_preemptions").column(0).to_numpy()
    assert preempted.sum() > 0
    as_measured(folder, simulated)
    accuracy = compare_with_measured(read_measured_run(folder), simulated)
    assert max(abs(one.relative) for one in accuracy.errors) < 1e-6
    (folder / "meta.json").write_text(
        json.dumps({**json.loads((folder / "meta.json").read_text()), "kv_cache": {"num_gpu_blocks": 55}})
    )
    fewer = read_measured_run(folder)
    other = compare_with_measured(fewer, simulate_measured(fewer, latency, tmp_path / "fewer"))
    assert max(abs(one.relative) for one in other.errors) > 0.01


def mixture_run(folder: Path, ranks: int) -> Path:
    arguments = {**ENGINE, "model": MIXTURE, "data_parallel_size": ranks, "enable_expert_parallel": True}
    return write_run(folder, model=MIXTURE, engine_kwargs=arguments, kv_cache={"num_gpu_blocks": 400})


def test_data_parallel_ranks_have_prefix_caches_of_their_own(bundle: Path, tmp_path: Path) -> None:
    """Of requests with one prompt, the first on each rank computes it; a shared cache would compute it once."""
    as_mixture(bundle)
    missed = {}
    for ranks in (1, 2, 4):
        folder = mixture_run(tmp_path / f"ranks-{ranks}", ranks)
        as_shared_prompt(folder)
        run = read_measured_run(folder)
        latency = bundle_latency(run, bundle, context_variation=0.0)
        simulated = simulate_measured(run, latency, tmp_path / f"simulated-{ranks}")
        cached = simulated.requests("num_cached_tokens").column(0).to_numpy()
        missed[ranks] = int((cached == 0).sum())
    assert missed == {1: 1, 2: 2, 4: 4}


def test_ranks_take_requests_in_turn_by_arrival(tmp_path: Path) -> None:
    workload = read_measured_run(write_run(tmp_path / "run")).workload
    assert ranked(workload, 1) is workload
    backwards = tuple(reversed(workload))
    by_id = {spec.request_id: spec.tenant for spec in ranked(backwards, 3)}
    assert [by_id[spec.request_id] for spec in workload[:4]] == ["rank-0", "rank-1", "rank-2", "rank-0"]


def test_the_command_validates_a_mixture_on_data_parallel_ranks(bundle: Path, tmp_path: Path) -> None:
    as_mixture(bundle)
    folder = mixture_run(tmp_path / "mixture", 2)
    run = read_measured_run(folder)
    as_measured(folder, simulate_measured(run, bundle_latency(run, bundle), tmp_path / "truth"))
    given = [str(folder), "--profile", str(bundle), "-o", str(tmp_path / "again")]
    result = CliRunner().invoke(validate, given, standalone_mode=False)
    assert (result.return_value, result.exception) == (0, None)
    assert "ttft_mean_ms" in result.output
