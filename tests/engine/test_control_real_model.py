"""Does a real model behind the command line give what it should: tables, text, the same tokens alone and in company, a replay?"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from vajra_py.cli.main import _run
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.json_lines import read_rows

EXPERIMENT = """
version: 1
seed: 5
name: real
num_replicas: 2
scheduling:
  request_prioritizer: edf
  replicaset_scheduler: least_loaded
  replica_scheduler: {{policy: fixed_chunk, params: {{chunk_size: 24, preemption: swap}}}}
replica:
  max_batch_size: 6
  max_model_len: 160
  memory: {{block_size: 8, num_blocks: 26, host_blocks: 16, reservation: incremental, watermark_fraction: 0.0}}
workload:
  type: sessions
  arrivals: {{type: poisson, rate: 60}}
  num_sessions: 6
  turns: {{type: uniform, min: 1, max: 3}}
  first_turn_tokens: {{type: uniform, min: 1, max: 40}}
  turn_tokens: {{type: uniform, min: 1, max: 12}}
  output_tokens: {{type: uniform, min: 2, max: 14}}
  system_prompts: {{count: 1, tokens: {{type: constant, value: 20}}}}
backend:
  engine:
    model: {model}
    num_threads: 1
    latency: {{type: affine, base_s: 0.01, per_token_s: 1.0e-4}}
output: {{dir: {folder}}}
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vajra_py.engine.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def real_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "real.yaml"
    file.write_text(EXPERIMENT.format(model=tiny_model, folder=folder))
    assert _run(["run", str(file), "--quiet"]) == 0
    return folder / "real"


def test_a_run_leaves_what_every_run_leaves(real_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunData.load(real_run)
    requests = run.requests().to_pylist()
    assert {request["reason"] for request in requests} == {"stop"}
    assert all(0 <= one["arrived_at"] <= one["first_token_at"] <= one["ended_at"] for one in requests)
    assert sum(request["num_cached_tokens"] for request in requests) > 0
    assert run.steps().num_rows == run.manifest["num_steps"] > 10
    assert run.summary is not None
    engine = run.manifest["engine"]
    assert 0 < engine["compute_s"] < engine["busy_s"]
    assert _run(["compare", str(real_run)]) == 0
    assert "real" in capsys.readouterr().out


def test_it_is_replayed(real_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["replay", str(real_run)]) == 0
    assert capsys.readouterr().out.startswith("equal: ")


def test_a_replay_that_differs_says_where(real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(real_run, copy)
    settings = (copy / "config.yaml").read_text()
    assert "chunk_size: 24" in settings
    (copy / "config.yaml").write_text(settings.replace("chunk_size: 24", "chunk_size: 23"))
    assert _run(["replay", str(copy)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("different: ")
    assert "in the run" in out


def test_tokens_do_not_depend_on_company(real_run: Path, tiny_model: Path) -> None:
    from vajra_py import LLM, SamplingParams
    from vajra_py.engine.prompts import PromptMaker
    from vajra_py.runtime.records.input_log import Arrival, read_inputs

    outputs = {row["request_id"]: row["token_ids"] for row in read_rows(real_run / "outputs.jsonl.gz")}
    vocab_size = json.loads((real_run / "engine.json").read_text())["default"]["vocab_size"]
    maker = PromptMaker(5, vocab_size, outputs)
    arrivals = [one for one in read_inputs(real_run / "inputs.jsonl.gz") if isinstance(one, Arrival)][:6]
    sizes = {"replica": {"max_batch_size": 1, "max_model_len": 160, "memory": {"num_blocks": 30}}}
    with LLM(tiny_model, sizes) as llm:
        for arrival in arrivals:
            expected = outputs[arrival.facts.request_id]
            prompt = maker.prompt(arrival.spec()).token_ids
            params = SamplingParams(max_tokens=len(expected), temperature=0.0, ignore_eos=True)
            assert llm.generate([prompt], params)[0].token_ids == expected


def test_a_sweep_on_the_engine_runs_one_point_after_another(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vajra_py.experiment.runs.sweep as module
    from vajra_py.config import config_from_mapping

    def refuse(*_: object) -> Any:
        raise AssertionError("points measured each other")

    monkeypatch.setattr("vajra_py.experiment.runs.pool.Processes", refuse)
    mapping = YAML(typ="safe").load(EXPERIMENT.format(model=tiny_model, folder=tmp_path))
    mapping["workload"]["num_sessions"] = 2
    mapping["sweep"] = {"scheduling.replicaset_scheduler": ["least_loaded", "pull"]}
    result = module.sweep(config_from_mapping(mapping))
    assert not result.failures
    assert len(result.runs) == 2


def test_text_in_text_out(tiny_model: Path) -> None:
    from vajra_py import LLM, AsyncLLM, SamplingParams

    sizes = {"replica": {"max_model_len": 160, "memory": {"num_blocks": 30}}}
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(tiny_model, sizes) as llm:
        (output,) = llm.generate("Once upon a time", params)
        assert output.text == llm.tokenizer.decode(output.token_ids)  # type: ignore[union-attr]
        middle = output.text[5:8]
        (stopped,) = llm.generate("Once upon a time", SamplingParams(20, 0.0, stop=(middle,), ignore_eos=True))
        assert stopped.text == output.text[: output.text.index(middle)]
        assert (stopped.finish_reason, stopped.stopped_by) == ("stop", middle)
        first, second = llm.generate("Once", SamplingParams(max_tokens=8, seed=3), n=2)
        assert first.token_ids != second.token_ids
        (again,) = llm.generate("Once", SamplingParams(max_tokens=8, seed=3))
        assert again.token_ids == first.token_ids
        (answer,) = llm.chat([{"role": "user", "content": "Hello"}], params)
        assert len(answer.token_ids) == 20

    async def read() -> None:
        async with AsyncLLM(tiny_model, sizes) as streaming:
            parts: list[Any] = [part async for part in streaming.stream("Once upon a time", params)]
        assert "".join(part.text for part in parts) == output.text

    asyncio.run(read())


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"workers": "process"}, {"tensor_parallel": 2}], ids=["process", "two ranks"])
def test_processes_and_ranks_give_the_same_tokens(engine: dict[str, Any], tiny_model: Path) -> None:
    from vajra_py import LLM, SamplingParams

    prompts = [[1, 2, 3], [7] * 40, list(range(90))]
    sizes = {"replica": {"max_batch_size": 4, "max_model_len": 160, "memory": {"num_blocks": 40}}}
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    seeded = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    found = []
    for settings in ({}, engine):
        with LLM(tiny_model, {**sizes, "backend": {"engine": {"num_threads": 1, **settings}}}) as llm:
            outputs = [*llm.generate(prompts, greedy), *llm.generate(prompts, seeded)]
            found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
