"""Steps that a runner begins before they are wanted, and takes back when they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vajra_py.engine.compute import Chunk, Foreseen, NewRow, SamplingParams, StepInput, StepOutput, TableUpdate
from vajra_py.errors import ExecutorError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=9, min_tokens=4),
)


class Guessing:
    """Begins a step of whichever rows could go on, after every step; it is seldom the one that comes."""

    def __init__(self, runner: Any, seed: int) -> None:
        self.facts = runner.facts
        self._runner = runner
        self._rng = np.random.default_rng(seed)
        self._told: StepInput | None = None
        self._room: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self.num_used = self.num_wasted = 0

    def run(self, step: StepInput) -> StepOutput:
        size = self.facts.block_size
        for slot in step.freed:
            self._reached.pop(slot, None)
        for table in step.tables:
            self._room[table.slot] = (table.start + len(table.block_ids)) * size
        for slot in step.decodes:
            self._reached[slot] += 1
        for chunk in step.chunks:
            self._reached[chunk.slot] = chunk.num_computed + len(chunk.token_ids)
        is_under_way = step == self._told
        self.num_used += is_under_way
        self.num_wasted += self._told is not None and not is_under_way
        sampled = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        rows = [slot for slot in sampled if self._reached[slot] < self._room[slot]]
        self._told = StepInput([], rows, [], [], [], []) if rows and self._rng.random() < 0.8 else None
        return self._runner.run_ahead(Foreseen(None if is_under_way else step, self._told))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_wrong_guesses_leave_nothing_behind(compute_kit: Any, small_models: Callable[[str], str], family: str) -> None:
    runner = compute_kit.runner(small_models(family), num_blocks=40, num_host_blocks=20)
    num_wasted = num_used = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        beginning = rng.integers(3, 96, 9).tolist()
        prompts = [beginning[: seed % 9] + rng.integers(3, 96, int(n)).tolist() for n in rng.integers(1, 14, 6)]
        guessing = Guessing(runner, seed)
        found = []
        for one in (guessing, runner):
            jobs = [compute_kit.job(prompt, 9, KINDS[index % 3], seed=index) for index, prompt in enumerate(prompts)]
            compute_kit.driver(one, 14, seed, 20).run(jobs, together=1 + seed % 5)
            found.append([job.outputs for job in jobs])
        assert found[0] == found[1], f"schedule {seed}"
        num_wasted, num_used = num_wasted + guessing.num_wasted, num_used + guessing.num_used
    assert num_wasted > 100
    assert num_used > 10


def test_what_cannot_be_begun_ahead_is_refused(compute_kit: Any, small_models: Callable[[str], str]) -> None:
    runner = compute_kit.runner(small_models("llama"))
    step = StepInput([Chunk(0, [5, 6], 0, True)], new=[NewRow(0, KINDS[0], 0)], tables=[TableUpdate(0, 0, [1])])
    with pytest.raises(ExecutorError, match="more than decodes was submitted ahead"):
        runner.run_ahead(Foreseen(step, StepInput([Chunk(0, [7], 2, True)])))
    with pytest.raises(ExecutorError, match="none was submitted ahead"):
        runner.run_ahead(Foreseen(None, None))
