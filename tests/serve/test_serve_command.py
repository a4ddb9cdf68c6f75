"""Does `vajra serve` say what is wrong before it loads anything, and what do its flags mean?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vajra_py.cli.main import main
from vajra_py.config import load_system
from vajra_py.plugins import load_registry
from vajra_py.serve.session.configure import ModelFlags, config_of_flags


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["serve", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port", "0"], "there is nothing to serve"),
        (["--model", "nowhere"], "nowhere"),
        (["--model", "x", "--preset", "vllm-v2"], "vllm-v2"),
        (["--model", "x", "--scheduling-policy", "lifo"], "--scheduling-policy: is unknown ('lifo')"),
        (["--model", "x", "--scheduling-policy", "fcfs", "--preset", "vajra"], "one of the two"),
        (["--model", "x", "--gpu-memory-utilization", "1.5"], "memory_fraction"),
        (["--model", "x", "--set", "replica.max_batch_sise=3"], "max_batch_size"),
        (["--model", "x", "--port", "99999"], "is not a port"),
        (["--model", "x", "--api-key", "with space"], "characters that a header cannot carry"),
        (["missing.yaml"], "missing.yaml"),
        (["missing.yaml", "--max-num-seqs", "4"], "--max-num-seqs"),
    ],
)
def test_wrong_input_is_said_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    error = said(capsys, *arguments)
    assert text in error
    assert "Traceback" not in error
    assert "with space" not in error


def test_spans_without_their_packages_name_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "vajra_py.serve.api.tracing", raising=False)
    error = said(capsys, "--model", "x", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces")
    assert 'pip install "vajra-py[otel]"' in error


def test_flags_mean_what_they_mean_to_vllm() -> None:
    flags = ModelFlags(
        model="m",
        scheduling_policy="priority",
        max_num_seqs=7,
        max_num_batched_tokens=512,
        max_model_len=1000,
        block_size=32,
        num_gpu_blocks_override=99,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        tensor_parallel_size=1,
        data_parallel_size=2,
        dtype="float32",
        load_format="dummy",
        seed=5,
        max_num_queued_reqs=11,
        max_num_queued_tokens=1234,
    )
    config = config_of_flags(flags, (), load_registry())
    replica, memory = config.replica, config.replica.memory
    engine: Any = config.backend.settings
    assert config.scheduling is not None
    assert config.scheduling.request_prioritizer.policy == "priority"
    assert config.scheduling.replica_scheduler.policy == "vllm_v1"
    assert (replica.max_batch_size, replica.max_batch_tokens, replica.max_model_len) == (7, 512, 1000)
    assert (memory.block_size, memory.num_blocks, memory.memory_fraction) == (32, 99, 0.5)
    assert not memory.prefix_cache.enabled
    assert (config.num_replicas, engine.workers, engine.random_weights) == (2, "process", True)
    assert (config.seed, config.admission.max_queued_requests, config.admission.max_queued_tokens) == (5, 11, 1234)


def test_a_file_needs_no_workload(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "version: 1\npreset: vajra\nbackend: {engine: {model: m, latency: {type: constant, step_time_s: 0.1}}}\n"
    )
    config = load_system(file, ["replica.max_batch_size=3"], load_registry())
    assert config.name == "mine"
    assert config.replica.max_batch_size == 3
