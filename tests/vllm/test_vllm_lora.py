"""LoRA adapters under `--enable-lora`: who waits for one, what is shared, recorded and published, beside vLLM's own scheduler."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from tests.vllm.core import Core, RequestScript, make_scheduler, request_of, vllm_config
from tests.vllm.fuzz import compare
from tests.vllm.test_vllm_recording import POLICIES, fuzzed
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.vllm import Scheduler
from vajra_py.vllm.lora import AdapterNames


def core_of(
    cls: type[Any], model: str, max_loras: int = 1, *, is_async: bool = False, blocks: int = 101, **options: Any
) -> Core:
    config = vllm_config(
        model, is_async=is_async, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=16, **options
    )
    config.lora_config = LoRAConfig(max_loras=max_loras)
    return Core(make_scheduler(cls, config, blocks, 4), is_async)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("first", [3_000_000, 3_000_006])
def test_a_session_with_adapters_is_vllms(tiny_model: str, first: int, is_async: bool) -> None:
    num_requests = 0
    for seed in range(first, first + 6):
        found, counts = compare(tiny_model, seed, is_async=is_async, kind="adapters")
        assert found is None, f"{seed}: {found}"
        num_requests += counts["with_adapters"]
    assert num_requests > 20


def test_who_waits_for_an_adapter_does_not_stop_those_behind(tiny_model: str) -> None:
    prompts = [tuple(range(10 * index, 10 * index + 9)) for index in range(4)]
    scripts = [
        RequestScript("has-0", prompts[0], 12, 0, adapter="lora-1"),
        RequestScript("waits-1", prompts[1], 4, 1, adapter="lora-2"),
        RequestScript("base-2", prompts[2], 4, 1),
        RequestScript("same-3", prompts[3], 4, 1, adapter="lora-1"),
    ]
    cores = [core_of(cls, tiny_model) for cls in (VllmScheduler, Scheduler)]
    for core in cores:
        core.run(scripts, 4, True)
    own, ours = ([one.scheduled for one in core.steps if one.scheduled] for core in cores)
    assert ours == own
    first = {name: min(index for index, step in enumerate(ours) if name in step) for name in cores[1].scripts}
    assert first["base-2"] == first["same-3"] == 1
    assert first["waits-1"] == 12  # when the other adapter's last request has ended


def test_an_adapters_name_given_again_is_another_adapter(tiny_model: str) -> None:
    """As when a server's adapter is unloaded, and another one loaded under its name, which shares no KV."""
    names = AdapterNames()
    first, second = LoRARequest("french", 1, "/a"), LoRARequest("french", 2, "/b")
    assert [names.name(one) for one in (first, second, first, None)] == ["french", "french#2", "french", ""]
    core = core_of(Scheduler, tiny_model)
    scripts = [RequestScript(f"r-{index}", tuple(range(20)), 3, 0) for index in range(2)]
    for script, lora in zip(scripts, (first, second), strict=True):
        request = request_of(script, 4, True)
        request.lora_request = lora
        core.take_in(replace(script, salt=lora.path), request)
    core.run([], 4, True)
    assert not any(len(one.scheduled) > 1 for one in core.steps)
    assert all(one.computed.get("r-1", 0) in (0, 20, 21) for one in core.steps)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policies", ["vllm-v1", "lrs"])
def test_a_session_with_adapters_is_replayed(tiny_model: str, tmp_path: Path, policies: str, is_async: bool) -> None:
    (tmp_path / "experiment.yaml").write_text(f"version: 1\n{POLICIES[policies]}\n")
    wanted = {"experiment": str(tmp_path / "experiment.yaml"), "save_run": str(tmp_path / "run")}
    core = core_of(Scheduler, tiny_model, 2, is_async=is_async, blocks=51, additional_config={"vajra": wanted})
    rng = random.Random(7)
    scripts = [replace(one, adapter=rng.choice((None, "lora-1", "lora-2", "lora-3"))) for one in fuzzed(rng, 24)]
    core.run(scripts, 4, True)
    core.scheduler.schedule()
    core.scheduler.shutdown()
    for step in core.steps:
        adapters = {core.scripts[name].adapter for name in step.scheduled} - {None}
        assert len(adapters) <= 2
    assert replay(tmp_path / "run").difference is None
    rows = RunData.load(tmp_path / "run").requests().to_pylist()
    assert {row["request_id"]: row["adapter"] or None for row in rows} == {one.name: one.adapter for one in scripts}
    told = {row["request_id"]: row["token_ids"] for row in read_rows(tmp_path / "run" / "outputs.jsonl.gz")}
    assert all(told[name][: len(tokens)] == tokens for name, tokens in core.tokens.items())


def test_without_the_option_a_request_with_an_adapter_ends_with_an_error(tiny_model: str) -> None:
    core = Core(make_scheduler(Scheduler, vllm_config(tiny_model, max_model_len=256), 41, 4))
    core.add(RequestScript("r-0", (1, 2, 3), 4, 0, adapter="lora-1"), 4, True)
    core.run([], 4, True)
    assert core.reasons == {"r-0": "error"}


def write_adapter(folder: Path, seed: int) -> str:
    """Write a random adapter for a tiny Llama, as PEFT does."""
    import json

    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random_numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 128, generator=random_numbers)
            weights[f"{at}.lora_B.weight"] = torch.randn(size, 8, generator=random_numbers)
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.mark.long
def test_random_adapters_give_vllms_tokens(tiny_model: str, tmp_path: Path) -> None:
    """Without requests of the base model: on a CPU, vLLM computes them with an adapter where a step has one."""
    from vllm import LLM, SamplingParams

    from tests.vllm.test_vllm_real import OPTIONS, prompts, scheduler_of

    paths = [write_adapter(tmp_path / f"adapter{seed}", seed) for seed in range(3)]
    loras = [LoRARequest(f"lora-{number}", number, path) for number, path in enumerate(paths, 1)]
    wanted = [one for one in prompts(8) for _ in loras]
    given = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True) for _ in wanted]
    found = []
    for cls in (Scheduler, VllmScheduler):
        options = OPTIONS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        llm = LLM(tiny_model, scheduler_cls=cls, async_scheduling=False, **options)
        assert isinstance(scheduler_of(llm), cls)
        outputs = llm.generate(wanted, given, lora_request=loras * 8, use_tqdm=False)
        found.append([tuple(one.outputs[0].token_ids) for one in outputs])
        del llm
    assert found[0] == found[1]
    assert all(len(set(found[0][at : at + 3])) == 3 for at in range(0, 24, 3))
