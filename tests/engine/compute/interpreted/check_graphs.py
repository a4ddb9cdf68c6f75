"""Replayed batches of decodes, with the Triton kernels in the interpreter and a stand-in for CUDA's graphs.

The stand-in runs the captured function again and checks a graph's properties: the same launches, with the same grids,
constants, numbers and persistent tensors for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vajra_kernels.launch import Launch
from vajra_py.engine.compute import Chunk, NewRow, RunnerOptions, SamplingParams, StepInput, TableUpdate
from vajra_py.engine.compute.step.runner import TorchRunner

NUM_BLOCKS = 30
LARGEST = 4  # sizes 1, 2 and 4: three rows are padded, five run without a graph
LASTING = ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "table_ptr", "kv_lens_ptr", "slot_mapping_ptr")
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, top_k=7, logprobs=2),
    SamplingParams(temperature=0.0, logprobs=0),
)


class Recorded:
    """Captures by storing the function and its launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Any] = []
        self.num_replays = 0
        plain = Launch.run

        def run(launch: Launch) -> None:
            numbers = {name: one for name, one in launch.arguments.items() if not isinstance(one, torch.Tensor)}
            lasting = {name: launch.arguments[name].data_ptr() for name in LASTING if name in launch.arguments}
            facts = (launch.kernel.__name__, launch.grid, launch.constants, launch.tile, numbers, lasting)
            self.launches.append(facts)
            plain(launch)

        monkeypatch.setattr(Launch, "run", run)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.launches.clear()
        run()
        captured = list(self.launches)
        assert captured

        def replay() -> None:
            self.launches.clear()
            run()
            assert self.launches == captured
            self.num_replays += 1

        return replay


def outputs(kit: Any, runner: TorchRunner, params: Sequence[SamplingParams], seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 96, int(length)).tolist() for length in [11, *rng.integers(1, 4, len(params) - 1)]]
    jobs = [
        kit.job(prompt, int(rng.integers(4, 8)), one, seed=index)
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    # Few blocks and many at once: preemptions, and batches of decodes of every size up to beyond the largest graph.
    driver = kit.driver(runner, 9, seed)
    driver.run(jobs, together=5)
    return [job.outputs for job in jobs], [[one.logprob for one in job.logprobs] for job in jobs]


def loaded(directory: str, capture: Any) -> TorchRunner:
    options = RunnerOptions(directory, block_size=4, max_requests=40, max_graph_rows=LARGEST, self_check=False)
    runner = TorchRunner.load(options, capture)
    runner.allocate(NUM_BLOCKS)
    return runner


@pytest.mark.parametrize(("family", "params"), [("llama", [*PARAMS, PARAMS[0]]), ("gemma2", [PARAMS[0]] * 4)])
def test_replayed_decodes_give_the_tokens_of_eager_ones(
    compute_kit: Any,
    small_models: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    params: list[SamplingParams],
) -> None:
    capture = Recorded(monkeypatch)
    graphs, eager = loaded(small_models(family), capture), loaded(small_models(family), None)
    tokens, logprobs = outputs(compute_kit, graphs, params, 1)
    assert capture.num_replays > 2
    expected, expected_logprobs = outputs(compute_kit, eager, params, 1)
    assert tokens == expected
    for one, other in zip(logprobs, expected_logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_padding_leaves_other_requests_memory_alone(
    small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four requests go on, padded to four rows; then the one that sat out, whose KV begins at slot 0."""
    found = []
    for capture in (Recorded(monkeypatch), None):
        runner = loaded(small_models("llama"), capture)
        params = SamplingParams(temperature=0.0, logprobs=0)
        first = StepInput(
            [Chunk(slot, [7 + slot, 9, 30 + slot], 0, True) for slot in range(4)],
            new=[NewRow(slot, params, slot) for slot in range(4)],
            tables=[TableUpdate(slot, 0, [2 * slot, 2 * slot + 1]) for slot in range(4)],
        )
        steps = [first, StepInput(decodes=[1, 2, 3]), StepInput(decodes=[2, 3, 1]), StepInput(decodes=[0])]
        outputs = [runner.run(step) for step in steps]
        assert runner.num_replays == (3 if capture else 0)
        found.append([(list(one.token_ids), [one.logprobs[slot].logprob for slot in one.slots]) for one in outputs])
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(*found, strict=True):
        assert tokens == other_tokens
        assert logprobs == pytest.approx(other_logprobs, abs=1e-5)
