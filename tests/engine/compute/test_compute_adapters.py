"""Do the requests of several LoRA adapters in one batch get the logits of models with the adapters merged in?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.adapter_folders import ATTENTION, EVERYWHERE, merged, write_adapter
from vajra_py.engine.compute import (
    AdapterSource,
    Chunk,
    LookaheadDecodes,
    LookaheadStep,
    NewRow,
    RunnerOptions,
    SamplingParams,
    StepInput,
    TableUpdate,
    load_runner,
)
from vajra_py.errors import ConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"]


@pytest.fixture
def folders(compute_kit: Any, small_models: Callable[[str], str], tmp_path: Path) -> Callable[[str], dict[str, Path]]:
    """Three adapters of a family: of every module, of some with another rank and scale, and of one layer's MLP."""

    def write(family: str) -> dict[str, Path]:
        model = compute_kit.reference(small_models(family))
        one_layer = {f"base_model.model.model.layers.1.mlp.down_proj.lora_{letter}.weight": None for letter in "AB"}
        return {
            "wide": write_adapter(tmp_path / "wide", model, 1),
            "some": write_adapter(tmp_path / "some", model, 2, 5, ["q_proj", "v_proj"], 4.0, use_rslora=True),
            "mlp": write_adapter(tmp_path / "mlp", model, 3, 1, ["down_proj"], tensors=one_layer),
        }

    return write


def sources(folders: dict[str, Path]) -> tuple[AdapterSource, ...]:
    return tuple(AdapterSource(name, str(folder)) for name, folder in folders.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_merged_models(
    compute_kit: Any, small_models: Callable[[str], str], folders: Callable[[str], dict[str, Path]], family: str
) -> None:
    """Through chunks, decodes, preemptions and shared prefixes, beside requests of the base model."""
    directory, written = small_models(family), folders(family)
    runner = compute_kit.runner(directory, num_blocks=15, num_host_blocks=16, adapters=sources(written), max_loras=3)
    for slot, name in enumerate(["mlp", "wide", "some"]):
        runner.load_adapter(name, slot)
    base = compute_kit.reference(directory)
    models = {"": base} | {name: merged(base, folder) for name, folder in written.items()}
    vocab_size = runner.facts.vocab_size
    sampling = SamplingParams(temperature=0.0, logprobs=vocab_size)
    rng = np.random.default_rng(5)
    beginning = rng.integers(3, vocab_size, 18).tolist()
    jobs = []
    for index in range(8):
        own = rng.integers(3, vocab_size, int(rng.integers(1, 16))).tolist()
        jobs.append(compute_kit.job(beginning + own if index % 2 else own, int(rng.integers(2, 7)), sampling))
        jobs[-1].adapter = list(models)[index // 2]
    compute_kit.driver(runner, 15, 4, 16).run(jobs, together=6)
    differing = set()
    for job in jobs:
        with torch.inference_mode():
            logits = models[job.adapter](input_ids=torch.tensor([job.known]), use_cache=False).logits[0]
        expected = torch.log_softmax(logits[len(job.prompt) - 1 : -1], -1)
        actual = torch.empty_like(expected)
        for place, one in enumerate(job.logprobs):
            ids, values = zip(*one.top, strict=True)
            actual[place, list(ids)] = torch.tensor(values)
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0.0)
        assert job.outputs == logits[len(job.prompt) - 1 : -1].argmax(-1).tolist()
        plain = compute_kit.expected_logits(directory, job.known)[len(job.prompt) - 1 : -1]
        if (plain - logits[len(job.prompt) - 1 : -1]).abs().max() > 0.05:
            differing.add(job.adapter)
    assert differing == set(written), "adapters too weak to show anything"


def test_a_slot_holds_what_was_loaded_last(
    compute_kit: Any, small_models: Callable[[str], str], folders: Callable[[str], dict[str, Path]]
) -> None:
    """Nothing of a larger adapter is left in a slot that a smaller one takes."""
    directory, written = small_models("llama"), folders("llama")
    runner = compute_kit.runner(directory, adapters=sources(written), max_loras=1)
    base = compute_kit.reference(directory)
    for name in ["wide", "mlp", "some", "wide"]:
        runner.load_adapter(name, 0)
        job = compute_kit.job([5, 9, 30, 4], 5)
        job.adapter = name
        compute_kit.driver(runner, 64, 0).run([job])
        logits = merged(base, written[name])(input_ids=torch.tensor([job.known]), use_cache=False).logits[0]
        assert job.outputs == logits[3:-1].argmax(-1).tolist()


def test_a_slot_is_loaded_anew_before_decodes_of_its_last_request_have_begun_ahead(
    compute_kit: Any, small_models: Callable[[str], str], folders: Callable[[str], dict[str, Path]]
) -> None:
    directory, written, greedy = small_models("llama"), folders("llama"), SamplingParams(temperature=0.0)
    runner = compute_kit.runner(directory, adapters=sources(written), max_loras=1)
    prompt = [5, 9, 30]
    runner.load_adapter("wide", 0)
    first = StepInput(
        [Chunk(0, prompt, 0, True), Chunk(1, prompt, 0, True)],
        new=[NewRow(0, greedy, 0, adapter="wide"), NewRow(1, greedy, 0)],
        tables=[TableUpdate(0, 0, [1]), TableUpdate(1, 0, [2])],
    )
    begun = runner.run_ahead(LookaheadStep(first, (), LookaheadDecodes([0, 1], [])))
    known = [*prompt, dict(zip(begun.slots, begun.token_ids, strict=True))[1]]
    runner.load_adapter("some", 0)  # the request of slot 0 has ended
    second = StepInput(
        [Chunk(2, prompt, 0, True)],
        [1],
        freed=[0],
        new=[NewRow(2, greedy, 0, adapter="some")],
        tables=[TableUpdate(2, 0, [3])],
    )
    found = runner.run_ahead(LookaheadStep(second, [1]))
    base = compute_kit.reference(directory)
    expected = {
        1: int(base(input_ids=torch.tensor([known]), use_cache=False).logits[0, -1].argmax()),
        2: int(merged(base, written["some"])(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax()),
    }
    assert dict(zip(found.slots, found.token_ids, strict=True)) == expected


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora: is not supported (got True)"),
        ({"bias": "lora_only"}, "bias: biases are those of the base model (got 'lora_only')"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: is not supported (got ['lm_head'])"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: this module is not adapted ('lm_head')"),
        ({"target_modules": [*ATTENTION, "up_proj"]}, "lacks 2 modules of target_modules (up_proj of layer 0)"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern: is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: is not supported"),
        ({"a_new_kind": 1}, "a_new_kind: is not supported (got 1)"),
        ({"peft_type": "IA3"}, "peft_type: not LoRA ('IA3')"),
        ({"r": 4}, "has not the rank of adapter_config.json ((3, 48), and r is 4)"),
        ({"r": 10**400}, "r: not a rank (1000"),
        ({"lora_alpha": None}, "lora_alpha: not an allowed number (None)"),
        ({"lora_alpha": 10**400}, "lora_alpha: not an allowed number (1000"),
        ({"tensors": {f"{LAYER}.lora_A.weight": None}}, f"lacks a tensor ({LAYER}.lora_A.weight)"),
        ({"tensors": {"base_model.model.lm_head.lora_A.weight": 2}}, "tensor of a module that is not adapted"),
        ({"tensors": {f"{LAYER}.lora_magnitude_vector": 2}}, "tensor of a module that is not adapted"),
        ({"tensors": {f"{LAYER}.lora_A.weight": (3, 40)}}, "q_proj of layer 0 is not of the model's shape (64 x 40)"),
        ({"targets": EVERYWHERE, "layer": 7}, "changes a module that this model does not have (q_proj of layer 7)"),
    ],
)
def test_adapters_that_are_not_supported_are_refused_by_name(
    compute_kit: Any, small_models: Callable[[str], str], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    directory = small_models("llama")
    tensors = {name: None if shape is None else torch.ones(shape) for name, shape in changes.pop("tensors", {}).items()}
    if "layer" in changes:
        layer = changes.pop("layer")
        tensors |= {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{letter}.weight": torch.ones(shape)
            for letter, shape in {"A": (3, 48), "B": (64, 3)}.items()
        }
        changes["target_modules"] = "all-linear"
    targets = changes.pop("targets", ATTENTION)
    model = compute_kit.reference(directory)
    folder = (
        write_adapter(tmp_path / "adapter", model, 1, targets=targets, tensors=tensors, **changes)
        if changes.get("r") is None
        else write_with_rank(tmp_path / "adapter", model, changes["r"])
    )
    with pytest.raises(ConfigError) as refused:
        load_runner(RunnerOptions(directory, adapters=(AdapterSource("one", str(folder)),), max_loras=1))
    assert said in str(refused.value)


def write_with_rank(folder: Path, model: Any, rank: int) -> Path:
    """Write an adapter whose configuration states a rank that its tensors do not have."""
    write_adapter(folder, model, 1)
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace('"r": 3', f'"r": {rank}'))
    return folder


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("llama", {"fused": False}, "adapters need the fused forward pass of one of these types"),
        ("phi3", {}, "adapters need the fused forward pass of one of these types"),
        ("mixtral", {}, "changes a module that this model does not have (q_proj of layer 7)"),
    ],
)
def test_models_whose_adapters_cannot_be_computed_are_refused(
    compute_kit: Any, small_models: Callable[[str], str], tmp_path: Path, family: str, options: Any, said: str
) -> None:
    shapes = {"A": (3, 48), "B": (64, 3)}
    tensors = {
        f"base_model.model.model.layers.7.self_attn.q_proj.lora_{letter}.weight": torch.ones(shape)
        for letter, shape in shapes.items()
    }
    model = compute_kit.reference(small_models(family))
    folder = write_adapter(tmp_path / "adapter", model, 1, targets=["q_proj"], tensors=tensors)
    source = AdapterSource("one", str(folder))
    with pytest.raises(ConfigError) as refused:
        load_runner(RunnerOptions(small_models(family), adapters=(source,), max_loras=1, **options))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("device", "said"), [("cuda", "are computed on a CPU alone (got cuda)"), ("cpu", "are computed by a single rank")]
)
def test_adapters_of_several_ranks_and_of_a_gpu_are_refused(
    small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, device: str, said: str
) -> None:
    from vajra_py.engine.compute.model import loading, prepare
    from vajra_py.engine.compute.model.ranks import Ranks
    from vajra_py.engine.compute.model.shard import Shard

    for module in (loading, prepare):
        monkeypatch.setattr(module, "find_device", torch.device)
    source = AdapterSource("one", "nowhere")
    options = RunnerOptions(small_models("llama"), device=device, adapters=(source,), max_loras=1)
    with pytest.raises(ConfigError) as refused:
        prepare.prepare(options, Ranks(Shard(0, 2)))
    assert said in str(refused.value)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tokens_are_those_of_peft(compute_kit: Any, small_models: Callable[[str], str], tmp_path: Path) -> None:
    """Greedy tokens of adapters that `peft` made and wrote itself."""
    peft = pytest.importorskip("peft")
    directory = small_models("llama")
    written = {}
    for seed, (name, targets, scaled) in enumerate(
        [("all", "all-linear", False), ("attention", list(ATTENTION), True), ("mlp", r".*\.(up|down)_proj", False)]
    ):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(directory)
        config = peft.LoraConfig(
            r=4,
            lora_alpha=10,
            target_modules=targets,
            use_rslora=scaled,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        written[name] = tmp_path / name
        peft.get_peft_model(model, config).save_pretrained(written[name])
    runner = compute_kit.runner(directory, adapters=sources(written), max_loras=3)
    for slot, name in enumerate(written):
        runner.load_adapter(name, slot)
    rng = np.random.default_rng(1)
    jobs = []
    for index in range(9):
        jobs.append(compute_kit.job(rng.integers(3, 90, int(rng.integers(2, 30))).tolist(), 12))
        jobs[-1].adapter = list(written)[index % 3]
    compute_kit.driver(runner, 64, 2).run(jobs, together=6)
    for name, folder in written.items():
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), folder).eval()
        for job in (one for one in jobs if one.adapter == name):
            prompt = torch.tensor([job.prompt])
            given = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
            )
            assert job.outputs == given[0, len(job.prompt) :].tolist()
