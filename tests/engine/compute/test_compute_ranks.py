"""Do two ranks that share every layer compute what one does?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vajra_py.engine.compute import RunnerOptions, SamplingParams, load_runner
from vajra_py.errors import ConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FAMILIES = ("llama", "qwen2", "gemma2", "phi3", "qwen3_moe")
PROMPTS = ([5, 9, 33, 21, 60, 7, 7, 12, 80], [4], [17, 40, 41])

RANK = """
import json, sys
from vajra_py.engine.compute import Chunk, NewRow, RunnerOptions, SamplingParams, StepInput, TableUpdate, load_runner

rank, folder, directories, prompts = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
found = {}
for number, directory in enumerate(directories):
    runner = load_runner(RunnerOptions(
        directory, block_size=4, max_requests=4, num_threads=1, tensor_parallel_size=2, rank=rank,
        rendezvous=f"file://{folder}/meet{number}",
    ))
    runner.allocate(32)
    params = [SamplingParams(temperature=0.0, logprobs=0), SamplingParams(logprobs=0), SamplingParams(top_p=0.9, logprobs=0)]
    step = StepInput(
        [Chunk(slot, prompt, 0, True) for slot, prompt in enumerate(prompts)],
        new=[NewRow(slot, one, slot) for slot, one in enumerate(params)],
        tables=[TableUpdate(slot, 0, list(range(slot * 8, slot * 8 + 8))) for slot in range(3)],
    )
    outputs = []
    for _ in range(6):
        output = runner.run(step)
        outputs.append([list(output.token_ids), [output.logprobs[slot].logprob for slot in output.slots]])
        step = StepInput(decodes=[0, 1, 2])
    found[directory] = [outputs, runner.facts.num_kv_heads, runner.facts.forward, runner.facts.kv_bytes_per_token]
    runner.close()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_ranks_equal_one(compute_kit: Any, small_models: Callable[[str], str], tmp_path: Path) -> None:
    directories = [small_models(family) for family in FAMILIES]
    command = [sys.executable, "-c", RANK]
    arguments = [str(tmp_path), json.dumps(directories), json.dumps(PROMPTS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = []
    for rank in ranks:
        out, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors
        results.append(json.loads(out.splitlines()[-1]))
    assert results[0] == results[1]
    for directory in directories:
        outputs, num_kv_heads, forward, kv_bytes = results[0][directory]
        whole = compute_kit.runner(directory)
        assert (num_kv_heads, forward) == (whole.facts.num_kv_heads // 2, "fused")
        assert kv_bytes == whole.facts.kv_bytes_per_token // 2
        params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)]
        for slot, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
            tokens = [step[0][slot] for step in outputs]
            job = compute_kit.job(list(prompt), 6, one, seed=slot)
            compute_kit.driver(whole, 64, slot).run([job])
            assert tokens == job.outputs
            logits = compute_kit.expected_logits(directory, [*prompt, *tokens])[len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            actual = torch.tensor([step[1][slot] for step in outputs])
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"num_key_value_heads": 1}, "KV heads (1) cannot be divided among 2 ranks"),
        ("llama", {"intermediate_size": 63}, "inner width (63) cannot be divided among 2 ranks"),
        ("olmo2", {}, "tensor parallelism and pipeline stages divide these types alone"),
    ],
)
def test_models_that_cannot_be_divided(
    compute_kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, int], reason: str
) -> None:
    from vajra_py.engine.compute.model.ranks import Ranks
    from vajra_py.engine.compute.model.shard import Shard
    from vajra_py.engine.compute.step import runner

    directory = compute_kit.write_model(tmp_path, family, **changes)
    monkeypatch.setattr(runner, "join_ranks", lambda options: Ranks(Shard(0, 2)))
    with pytest.raises(ConfigError) as caught:
        load_runner(RunnerOptions(directory, tensor_parallel_size=2, rendezvous="tcp://localhost:1"))
    assert reason in str(caught.value)
