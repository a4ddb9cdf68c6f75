"""Are requests of LoRA adapters served by the engine as the mechanism says, with the tokens of merged models, and replayed equal?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.engine.adapter_folders import merged, write_adapter
from vajra_py.cli.main import _run
from vajra_py.engine.prompts import PromptMaker
from vajra_py.errors import ConfigError
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.input_log import AdapterEnd, Arrival, read_inputs
from vajra_py.runtime.records.json_lines import read_rows

NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vajra_py.engine.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from vajra_py.engine.compute.model.loading import quiet

    with quiet():
        return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def adapters(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, reference, seed, 2 + seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def answers(reference: Any, adapters: dict[str, Path]) -> Callable[[str, list[int], int], list[int]]:
    """Greedy tokens of the model with an adapter merged in."""
    models = {"": reference} | {name: merged(reference, folder) for name, folder in adapters.items()}

    def answer(name: str, prompt: list[int], num_tokens: int) -> list[int]:
        import torch

        known = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                known.append(int(models[name](input_ids=torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
        return known[len(prompt) :]

    return answer


def replica(folders: dict[str, Path], max_loras: int = 1, **changes: Any) -> dict[str, Any]:
    models = [{"name": name, "path": str(folder)} for name, folder in folders.items()]
    return {
        "max_batch_size": 4,
        "max_model_len": 160,
        "memory": {"block_size": 8, "num_blocks": 30, "prefix_cache": {"enabled": True}},
        "adapters": {"max_loras": max_loras, "models": models},
        **changes,
    }


def trace(folder: Path) -> Path:
    """Requests of all adapters, close together."""
    rows = [
        {
            "request_id": f"r{index}",
            "arrived_at": index * 0.004,
            "num_prompt_tokens": 6 + index % 9,
            "num_output_tokens": 3 + index % 5,
            "adapter": ("", *NAMES)[index % 4],
        }
        for index in range(14)
    ]
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("workers", ["in_process", pytest.param("process", marks=pytest.mark.long)])
def test_a_run_has_the_tokens_of_merged_models_and_is_replayed_equal(
    tiny_model: Path,
    adapters: dict[str, Path],
    answers: Callable[[str, list[int], int], list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    workers: str,
) -> None:
    """Three adapters on two replicas of a slot each: loads, skipped requests, and evictions of idle adapters."""
    experiment = {
        "version": 1,
        "seed": 0,
        "name": "adapted",
        "num_replicas": 2,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": {
                "policy": "endpoint_picker",
                "params": {"scorers": ["lora-affinity-scorer", "queue-scorer"]},
            },
            "replica_scheduler": "vllm_v1",
        },
        "replica": replica(adapters) | {"max_batch_tokens": 64},
        "workload": {"type": "jsonl", "path": str(trace(tmp_path))},
        "backend": {"engine": {"model": str(tiny_model), "num_threads": 1, "workers": workers}},
        "output": {"dir": str(tmp_path)},
    }
    file = tmp_path / "adapted.yaml"
    YAML(typ="safe").dump(experiment, file)
    assert _run(["run", str(file), "--quiet"]) == 0
    requests = RunData.load(tmp_path / "adapted").requests().to_pylist()
    assert {one["reason"] for one in requests} == {"stop"}
    outputs = {row["request_id"]: row["token_ids"] for row in read_rows(tmp_path / "adapted" / "outputs.jsonl.gz")}
    vocab_size = json.loads((tmp_path / "adapted" / "engine.json").read_text())["default"]["vocab_size"]
    maker = PromptMaker(0, vocab_size, outputs)
    inputs = read_inputs(tmp_path / "adapted" / "inputs.jsonl.gz")
    for one in inputs:
        if isinstance(one, Arrival):
            given = outputs[one.facts.request_id]
            assert given == answers(one.facts.adapter, list(maker.prompt(one.spec()).token_ids), len(given))
    assert len(outputs) == 14
    assert sum(isinstance(one, AdapterEnd) for one in inputs) >= 3
    capsys.readouterr()
    assert _run(["replay", str(tmp_path / "adapted")]) == 0
    assert capsys.readouterr().out.startswith("equal: ")


@pytest.mark.parametrize("look_ahead", [False, True])
def test_programs_state_the_adapter_of_each_prompt(
    tiny_model: Path, adapters: dict[str, Path], answers: Callable[[str, list[int], int], list[int]], look_ahead: bool
) -> None:
    from vajra_py import LLM, SamplingParams
    from vajra_py.contract.facts import StatedFacts

    config = {"replica": replica(adapters, 2), "backend": {"engine": {"num_threads": 1, "look_ahead": look_ahead}}}
    prompts = [[*range(9, 29), 7 + index // 4] for index in range(8)]  # they share blocks, if of one adapter
    names = ["", *NAMES] * 2
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    with LLM(tiny_model, config) as llm:
        given = llm.generate(prompts, params, facts=[StatedFacts(adapter=name) for name in names])
        assert [one.token_ids for one in given] == [
            answers(name, prompt, 9) for name, prompt in zip(names, prompts, strict=True)
        ]
        assert [one.finish_reason for one in given] == ["length"] * 8
        unknown = llm.generate(prompts[0], params, facts=StatedFacts(adapter="grey"))[0]
        assert (unknown.finish_reason, unknown.detail) == ("rejected", "no replica has its adapter ('grey')")
        with pytest.raises(ConfigError, match="facts: are not one for each prompt"):
            llm.generate(prompts, params, facts=[StatedFacts()])


def test_a_stream_states_its_adapter(
    tiny_model: Path, adapters: dict[str, Path], answers: Callable[[str, list[int], int], list[int]]
) -> None:
    from vajra_py import AsyncLLM, SamplingParams
    from vajra_py.contract.facts import StatedFacts

    async def ask() -> list[Any]:
        config = {"replica": replica(adapters), "backend": {"engine": {"num_threads": 1}}}
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        async with AsyncLLM(tiny_model, config) as llm:
            asked = [llm.generate([4, 8, 15], params, facts=StatedFacts(adapter=name)) for name in NAMES]
            return list(await asyncio.gather(*asked))

    given = asyncio.run(ask())
    assert [one.token_ids for one in given] == [answers(name, [4, 8, 15], 5) for name in NAMES]


@pytest.mark.parametrize(
    ("engine", "changes", "said"),
    [
        ({"tensor_parallel": 2}, {}, "replica.adapters: are computed by a single rank (got tensor_parallel 2)"),
        ({}, {"pipeline_stages": 2}, "are computed by a single rank (got replica.pipeline_stages 2)"),
        (
            {},
            {"kv_parallel": {"groups": 2, "group_tokens": 64}},
            "are computed by a single rank (got replica.kv_parallel.groups 2)",
        ),
        ({"device": "cuda"}, {}, "are computed on a CPU alone (got cuda)"),
        ({"fused": False}, {}, "need the fused forward pass (got fused false)"),
        ({}, {"adapters": {"models": [{"name": "a"}]}}, "replica.adapters.models.0.path: is not given"),
        ({}, {"adapters": {"models": [{"name": "a", "path": "/nowhere"}]}}, "/nowhere: there is no such folder"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused_before_anything_is_loaded(
    tiny_model: Path, adapters: dict[str, Path], engine: Any, changes: Any, said: str
) -> None:
    from vajra_py import LLM

    with pytest.raises(ConfigError) as refused:
        LLM(tiny_model, {"replica": replica(adapters, **changes), "backend": {"engine": engine}})
    assert said in str(refused.value)


def test_a_worker_that_takes_the_place_of_a_lost_one_is_given_the_adapters_again(
    tiny_model: Path, adapters: dict[str, Path], answers: Callable[[str, list[int], int], list[int]]
) -> None:
    from vajra_py import AsyncLLM, SamplingParams
    from vajra_py.contract.facts import StatedFacts
    from vajra_py.engine.compute import RunnerOptions, load_runner

    made: list[Any] = []

    def load(options: RunnerOptions) -> Any:
        runner: Any = load_runner(options)
        made.append(runner)
        if len(made) == 1:
            runner.num_left = 4
            run = runner.run

            def breaks(step: Any) -> Any:
                runner.num_left -= 1
                if not runner.num_left:
                    raise RuntimeError("the device is gone")
                return run(step)

            runner.run = breaks
        return runner

    async def ask() -> Any:
        engine = {"num_threads": 1, "recovery": {"backoff_s": 0.0}}
        config = {"replica": replica(adapters), "backend": {"engine": engine}}
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        async with AsyncLLM(tiny_model, config, load=load) as llm:
            return await llm.generate([4, 8, 15], params, facts=StatedFacts(adapter="green"))

    given = asyncio.run(ask())
    assert len(made) == 2
    assert given.token_ids == answers("green", [4, 8, 15], 8)


def test_requests_move_between_pools_with_their_adapters(
    tiny_model: Path, adapters: dict[str, Path], answers: Callable[[str, list[int], int], list[int]]
) -> None:
    """Each pool loads for itself."""
    from vajra_py import LLM, SamplingParams
    from vajra_py.contract.facts import StatedFacts

    one = {"num_replicas": 1, "replica": replica(adapters)}
    pools = {role: {"role": role, **one} for role in ("prefill", "decode")}
    config = {"preset": "vllm-v1", "pools": pools, "backend": {"engine": {"num_threads": 1}}}
    names = ["", *NAMES]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(tiny_model, config) as llm:
        given = llm.generate([[9, 4, 30]] * 4, params, facts=[StatedFacts(adapter=name) for name in names])
    assert [one.token_ids for one in given] == [answers(name, [9, 4, 30], 6) for name in names]
