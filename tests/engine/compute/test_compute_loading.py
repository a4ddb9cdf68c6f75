"""What does a user read who gives a model that cannot be run, and what is left alone when one can?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vajra_py.engine.compute import Chunk, NewRow, RunnerOptions, SamplingParams, StepInput, TableUpdate, load_runner
from vajra_py.engine.compute.model.inspect import inspect_model, readable_bytes
from vajra_py.errors import ConfigError, ExecutorError
from vajra_py.runtime.kv import BlockCopy, CopyDirection

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def refusal(directory: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_runner(RunnerOptions(str(directory), **options))
    assert len(caught.value.problems) == 1
    return str(caught.value)


@pytest.fixture
def copied(tmp_path: Path, small_models: Callable[[str], str]) -> Path:
    """A good model that a test may damage."""
    return Path(shutil.copytree(small_models("llama"), tmp_path / "model"))


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_missing_directory(tmp_path: Path) -> None:
    assert f"model {tmp_path}/nowhere: there is no such directory." in refusal(tmp_path / "nowhere")


def test_file_in_place_of_a_directory(copied: Path) -> None:
    assert "this is a file" in refusal(copied / "config.json")


def test_missing_config(copied: Path) -> None:
    (copied / "config.json").unlink()
    assert "config.json is missing" in refusal(copied)


@pytest.mark.parametrize("content", ["{", "[]", '{"hidden_size": 3}', '{"model_type": 3}'])
def test_broken_config(copied: Path, content: str) -> None:
    (copied / "config.json").write_text(content)
    message = refusal(copied)
    assert "config.json: " in message
    assert "\n" not in message


def test_missing_weights_and_weights_in_another_format(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert "there are no weights" in refusal(copied)
    (copied / "pytorch_model.bin").write_bytes(b"x")
    assert "other formats (pytorch_model.bin)" in refusal(copied)


def test_truncated_weights(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refusal(copied)
    assert "model.safetensors: this weight file is corrupt" in message


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"{]"])
def test_corrupt_weights(copied: Path, content: bytes) -> None:
    (copied / "model.safetensors").write_bytes(content)
    assert "model.safetensors: this weight file is corrupt" in refusal(copied)


def test_index_that_lists_a_missing_file(copied: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "missing (model-2.safetensors)" in refusal(copied)


def test_weights_that_lack_tensors(copied: Path) -> None:
    edit_config(copied, num_hidden_layers=3)
    assert "lack 9 tensors" in refusal(copied)


def test_weights_of_another_shape(copied: Path) -> None:
    edit_config(copied, intermediate_size=72)
    message = refusal(copied)
    assert "transformers cannot load this model" in message
    assert "\n" not in message


def test_unknown_architecture(copied: Path) -> None:
    edit_config(copied, model_type="lama")
    message = refusal(copied)
    assert "'lama'" in message
    assert "Did you mean 'llama'?" in message


def test_own_code_is_never_run(copied: Path, tmp_path: Path) -> None:
    trace = tmp_path / "was_run"
    (copied / "modeling_own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    edit_config(copied, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert "a model's own code is never run" in refusal(copied)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "does not go through transformers' attention interface"),
        ("bloom", "does not go through transformers' attention interface"),
    ],
)
def test_architectures_outside_the_interface(compute_kit: Any, tmp_path: Path, family: str, reason: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, hidden_size=32, num_hidden_layers=2, vocab_size=64, n_head=2)
    config.save_pretrained(tmp_path)
    message = refusal(tmp_path, random_weights=True)
    assert f"({family})" in message
    assert reason in message


def test_model_that_breaks_the_interface_is_refused(
    compute_kit: Any, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check sees a model whose layers do something else than they tell: here, a scale of scores it does not pass on."""
    from transformers.models.qwen2 import modeling_qwen2

    original = modeling_qwen2.Qwen2Attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.scaling = 0.25 if self.config._attn_implementation == "eager" else 0.5
        return original(self, *args, **kwargs)

    monkeypatch.setattr(modeling_qwen2.Qwen2Attention, "forward", forward)
    message = refusal(small_models("qwen2"), fused=False)
    assert "its logits differ by" in message
    assert "standard deviations" in message


def test_fused_forward_that_differs_is_not_used(
    compute_kit: Any, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from vajra_py.engine.compute.model import fused_parts

    original = fused_parts.Norm.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, module: Any, is_fused: bool) -> Any:
        norm = original(cls, module, is_fused)
        return fused_parts.Norm(norm.weight * 1.01, norm.eps, norm.width)

    monkeypatch.setattr(fused_parts.Norm, "of", classmethod(of))
    runner = compute_kit.runner(small_models("llama"))
    assert runner.facts.forward == "transformers"
    assert "runs on transformers' modules, since over paged memory its logits differ" in caplog.text


def test_too_large_for_memory(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vajra_py.engine.compute.model import loading

    monkeypatch.setattr(loading, "free_host_bytes", lambda: 1000)
    assert "are larger than the free memory of cpu (1000 B)" in refusal(copied)


def test_random_weights_too_large_are_refused_before_they_are_made(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", hidden_size=1 << 16, intermediate_size=1 << 18, num_hidden_layers=200)
    config.save_pretrained(tmp_path)
    assert "are larger than the free memory" in refusal(tmp_path, random_weights=True)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:1", "cuda:63"])
def test_absent_device(copied: Path, device: str) -> None:
    message = refusal(copied, device=device)
    assert message.startswith("device: ")
    assert repr(device) in message


@pytest.mark.parametrize(("stored", "dtype"), [("float16", "float16"), ("bfloat16", "bfloat16"), (None, "float32")])
def test_on_a_host_a_divided_model_has_the_dtype_of_its_gpus(
    copied: Path, monkeypatch: pytest.MonkeyPatch, stored: str | None, dtype: str
) -> None:
    from vajra_py.engine.compute.model import loading, prepare
    from vajra_py.engine.compute.model.ranks import Ranks
    from vajra_py.engine.compute.model.shard import Shard

    edit_config(copied, dtype=stored)
    for module in (loading, prepare):
        monkeypatch.setattr(module, "find_device", torch.device)
    monkeypatch.setattr(prepare, "_prepared", lambda loaded, *rest: loaded)
    loaded: Any = prepare.prepare(RunnerOptions(str(copied), device="cuda", tensor_parallel_size=2), Ranks(Shard(0, 2)))
    assert (loaded.device.type, str(loaded.dtype)) == ("cpu", f"torch.{dtype}")
    assert {(one.device.type, one.dtype) for one in loaded.model.parameters()} == {("cpu", loaded.dtype)}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"device": "cuda:²"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"max_model_len": 129}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"max_requests": 0}, "max_requests"),
        ({"num_threads": 0}, "num_threads"),
        ({"tensor_parallel_size": 2, "rank": 2}, "rank"),
        ({"tensor_parallel_size": 2}, "rendezvous"),
    ],
)
def test_impossible_options(copied: Path, options: dict[str, Any], where: str) -> None:
    assert refusal(copied, **options).startswith(f"{where}: ")


def test_dynamic_rope_stops_where_it_would_stretch(compute_kit: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    directory = compute_kit.write_model(tmp_path, "llama", rope_parameters=rope)
    assert load_runner(RunnerOptions(directory)).facts.max_model_len in (64, 128)


def test_random_weights_depend_on_the_seed_alone(small_models: Callable[[str], str], compute_kit: Any) -> None:
    import torch

    outputs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed + len(outputs))
        runner = compute_kit.runner(small_models("llama"), random_weights=True, seed=seed)
        job = compute_kit.job([5, 9, 40], 10)
        compute_kit.driver(runner, 64, 0).run([job])
        outputs.append(job.outputs)
    assert outputs[0] == outputs[1] != outputs[2]


def test_inspection_loads_no_tensor_library(small_models: Callable[[str], str]) -> None:
    code = (
        "import sys; from vajra_py.engine.compute.model.inspect import inspect_model; "
        f"files = inspect_model({small_models('llama')!r}); "
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules); print(files.num_elements)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == inspect_model(small_models("llama")).num_elements > 10_000


def test_readable_bytes() -> None:
    assert [readable_bytes(n) for n in (0, 1000, 1536, 3 << 30)] == ["0 B", "1000 B", "1.5 KiB", "3.0 GiB"]


def test_profile_fills_the_share_of_memory_that_was_given(
    compute_kit: Any, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vajra_py.engine.compute.step import memory

    runner = load_runner(RunnerOptions(str(copied), max_requests=10_000, max_step_tokens=16))
    block_bytes = runner.facts.kv_bytes_per_token * runner.facts.block_size
    assert runner.facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    counts = []
    for free in (20 << 20, 40 << 20):
        monkeypatch.setattr(memory, "free_host_bytes", lambda free=free: free)
        counts.append(runner.profile_num_blocks(0.5))
        assert counts[-1] * block_bytes < free * 0.5
    assert (counts[1] - counts[0]) * block_bytes == pytest.approx(10 << 20, rel=0.01)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 100 << 10)
    with pytest.raises(ConfigError, match=r"one sequence of 128 tokens takes 8\. Use a shorter max_model_len"):
        runner.profile_num_blocks(0.9)
    with pytest.raises(ConfigError, match="memory fraction: out of range"):
        runner.profile_num_blocks(1.5)


NEW = NewRow(0, SamplingParams(temperature=0.0), 0)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (StepInput(), "there is nothing to compute"),
        (StepInput([Chunk(0, [3], 0, True), Chunk(0, [3], 1, True)]), "slots are not distinct"),
        (StepInput([Chunk(40, [3], 0, True)]), "slots are not distinct ones of 0 to 39"),
        (StepInput([Chunk(0, [], 0, True)]), "A chunk has 1 token or more"),
        (StepInput([Chunk(0, [3] * 5, 125, True)]), "within the 128 of the longest sequence"),
        (StepInput([Chunk(0, [3], 0, True)], tables=[TableUpdate(0, 0, [99])]), "there is no such block"),
        (StepInput([Chunk(0, [3], 0, True)], tables=[TableUpdate(0, 30, [1, 2, 3])]), "entries up to 33"),
        (StepInput([Chunk(0, [3], 0, True)], new=[NewRow(41, NEW.sampling, 0)]), "no such slot (41)"),
        (
            StepInput([Chunk(0, [3], 0, True)], copies=[BlockCopy(0, 9, CopyDirection.TO_HOST)]),
            "swap: there is no such block (copy 0 -> 9, device to host)",
        ),
    ],
)
def test_steps_that_contradict_what_went_before(
    compute_kit: Any, small_models: Callable[[str], str], step: StepInput, message: str
) -> None:
    runner = compute_kit.runner(small_models("llama"), self_check=False, num_blocks=64, num_host_blocks=2)
    with pytest.raises(ExecutorError) as caught:
        runner.run(step)
    assert message in str(caught.value)


def test_memory_is_allocated_once_and_first(small_models: Callable[[str], str]) -> None:
    runner = load_runner(RunnerOptions(small_models("llama"), self_check=False))
    with pytest.raises(ExecutorError, match="there is no KV memory yet"):
        runner.run(StepInput([Chunk(0, [3], 0, True)], new=[NEW]))
    with pytest.raises(ExecutorError, match="One device block or more"):
        runner.allocate(0)
    runner.allocate(2)
    with pytest.raises(ExecutorError, match="allocated already"):
        runner.allocate(2)
    runner.close()
    runner.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quantized (quantization_config: fp8)"),
        ({"bits": 4}, "quantized (quantization_config: of an unnamed method)"),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_name(
    small_models: Callable[[str], str], tmp_path: Path, name: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(small_models("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": name}))
    for random_weights in (False, True):
        with pytest.raises(ConfigError) as caught:
            load_runner(RunnerOptions(str(folder), random_weights=random_weights))
        assert said in str(caught.value)
        assert "Allowed: weights in float32, float16 or bfloat16" in str(caught.value)
