"""Decodes that a runner begins before they are wanted, and drops when they are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vajra_py.engine.compute import (
    Chunk,
    LookaheadDecodes,
    LookaheadStep,
    NewRow,
    SamplingParams,
    StepInput,
    StepOutput,
    TableUpdate,
)
from vajra_py.errors import ExecutorError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=9, min_tokens=4),
)


SPARE_BLOCKS = 2


class Guessing:
    """Begins decodes of some rows that could go on, after every step; seldom are they just those that come."""

    def __init__(self, runner: Any, seed: int) -> None:
        self.facts = runner.facts
        self._runner = runner
        self._rng = np.random.default_rng(seed)
        self._started: LookaheadDecodes | None = None
        self._room: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self.counts: Counter[str] = Counter()

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
        started = () if self._started is None else self._started.decodes
        begun = [slot for slot in started if slot in step.decodes]
        self.counts["begun"] += len(begun)
        self.counts["dropped"] += len(started) - len(begun)
        self.counts["wasted"] += bool(started) and not begun
        self.counts["mixed"] += bool(begun) and (bool(step.chunks) or len(begun) < len(step.decodes))
        self.counts["grown"] += 0 if self._started is None else sum(slot in begun for slot in self._started.growing)
        sampled = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        rows = [slot for slot in sampled if self._rng.random() < 0.8]
        growing = [slot for slot in rows if self._reached[slot] >= self._room[slot]]
        self._started = LookaheadDecodes(rows, growing) if rows and len(growing) <= SPARE_BLOCKS else None
        output: StepOutput = self._runner.run_ahead(LookaheadStep(step, begun, self._started))
        if self._rng.random() < 0.5:  # else it is computed with the step that counts on it, if one does
            self._runner.begin_ahead()
        return output


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_wrong_guesses_leave_nothing_behind(compute_kit: Any, small_models: Callable[[str], str], family: str) -> None:
    runner = compute_kit.runner(
        small_models(family), num_blocks=40, num_host_blocks=20, spare_blocks=SPARE_BLOCKS, max_model_len=100
    )
    counts: Counter[str] = Counter()
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
        counts += guessing.counts
    assert counts["begun"] > 200
    assert counts["dropped"] > 200
    assert min(counts["wasted"], counts["mixed"], counts["grown"]) > 20, counts


def test_what_cannot_be_begun_ahead_is_refused(compute_kit: Any, small_models: Callable[[str], str]) -> None:
    runner = compute_kit.runner(small_models("llama"))
    step = StepInput([Chunk(0, [5, 6], 0, True)], new=[NewRow(0, KINDS[0], 0)], tables=[TableUpdate(0, 0, [1])])
    runner.run_ahead(LookaheadStep(step, (), LookaheadDecodes([0], [0])))
    with pytest.raises(ExecutorError, match="1 rows grow in advance, but there are only 0 spare blocks"):
        runner.begin_ahead()
    with pytest.raises(ExecutorError, match="the step it depends on was not submitted"):
        runner.run_ahead(LookaheadStep(StepInput(decodes=[0]), [0]))


def test_imported_kv_is_not_overwritten_by_decodes_begun_ahead(
    compute_kit: Any, small_models: Callable[[str], str]
) -> None:
    runner = compute_kit.runner(small_models("llama"))
    step = StepInput(
        [Chunk(0, [5, 6], 0, True), Chunk(1, [5, 6], 0, True)],
        new=[NewRow(0, KINDS[0], 0), NewRow(1, KINDS[0], 0)],
        tables=[TableUpdate(0, 0, [1]), TableUpdate(1, 0, [2])],
    )
    runner.run_ahead(LookaheadStep(step, (), LookaheadDecodes([0, 1], [])))
    given, kept = (np.zeros(runner.kv_block_bytes, np.uint8) for _ in range(2))
    runner.import_kv([1], given)  # the request of slot 0 has ended, and its block is used for another
    runner.run_ahead(LookaheadStep(StepInput(decodes=[1], freed=[0]), [1]))
    runner.export_kv([1], kept)
    assert np.array_equal(kept, given)


def test_a_row_that_grew_ahead_must_be_told_its_block(compute_kit: Any, small_models: Callable[[str], str]) -> None:
    runner = compute_kit.runner(small_models("llama"), spare_blocks=1)
    step = StepInput([Chunk(0, [5, 6, 7, 8], 0, True)], new=[NewRow(0, KINDS[0], 0)], tables=[TableUpdate(0, 0, [1])])
    runner.run_ahead(LookaheadStep(step, (), LookaheadDecodes([0], [0])))
    with pytest.raises(ExecutorError, match="has no block of its own"):
        runner.run_ahead(LookaheadStep(StepInput(decodes=[0]), [0]))
