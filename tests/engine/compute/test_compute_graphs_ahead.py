"""Replayed graphs and look-ahead together: what one step has put out survives the replay of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vajra_py.engine.compute import (
    LookaheadDecodes,
    LookaheadStep,
    RunnerOptions,
    SamplingParams,
    StepInput,
    StepOutput,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vajra_kernels.cpu_plan import CpuPlans  # noqa: E402
from vajra_py.engine.compute.step.runner import TorchRunner  # noqa: E402

NUM_BLOCKS = 60
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.1, min_tokens=3),
)


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Stands in for CUDA's: does the same again on the same tensors. The CPU writes no padding, so there is none."""
    graph = run.__defaults__[0]  # type: ignore[attr-defined]
    graph.longs[1] = torch.arange(graph.longs.shape[1])  # any slots: nothing is in memory yet
    run()
    graph.longs[1] = -1

    def replay() -> None:
        graph.metadata.memo.cpu_plans, graph.metadata.memo.parts = (
            CpuPlans(),
            None,
        )  # a GPU reads lengths off the tensors
        run()

    return replay


def loaded(directory: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    options = RunnerOptions(directory, block_size=4, max_requests=40, max_graph_rows=8, self_check=False)
    runner = TorchRunner.load(options, capture)
    runner.allocate(NUM_BLOCKS)
    graphs: Any = runner._graphs
    assert graphs is not None
    takes = graphs.takes
    monkeypatch.setattr(graphs, "takes", lambda batch: takes(batch) and len(batch.slots) in graphs.sizes)
    return runner


class LookaheadLoop:
    """Begins the same decodes again after every step of decodes, while they have room."""

    def __init__(self, runner: Any) -> None:
        self.facts = runner.facts
        self._runner = runner
        self._started: LookaheadDecodes | None = None
        self._room: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self.num_begun = self.num_used = 0

    def run(self, step: StepInput) -> StepOutput:
        for table in step.tables:
            self._room[table.slot] = (table.start + len(table.block_ids)) * self.facts.block_size
        for slot in step.decodes:
            self._reached[slot] += 1
        for chunk in step.chunks:
            self._reached[chunk.slot] = chunk.num_computed + len(chunk.token_ids)
        begun = [] if self._started is None else [slot for slot in self._started.decodes if slot in step.decodes]
        self.num_used += bool(begun)
        rows = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        goes_on = bool(rows) and all(self._reached[slot] < self._room[slot] for slot in rows)
        self._started = LookaheadDecodes(rows) if goes_on else None
        self.num_begun += goes_on
        return self._runner.run_ahead(LookaheadStep(step, begun, self._started))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_of_a_step_outlive_the_replay_of_the_next(
    compute_kit: Any, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    plain = compute_kit.runner(small_models(family), NUM_BLOCKS)
    runner = loaded(small_models(family), monkeypatch)
    num_begun = num_used = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(3, 96, int(n)).tolist() for n in rng.integers(1, 10, 6)]
        ahead, found = LookaheadLoop(runner), []
        for one in (ahead, plain):
            jobs = [compute_kit.job(prompt, 10, KINDS[index % 3], seed=index) for index, prompt in enumerate(prompts)]
            compute_kit.driver(one, NUM_BLOCKS, seed, max_chunk=30).run(jobs, together=1 + seed % 5)
            found.append([job.outputs for job in jobs])
        assert found[0] == found[1], f"schedule {seed}"
        num_begun, num_used = num_begun + ahead.num_begun, num_used + ahead.num_used
    assert num_begun > 60
    assert num_used >= 10
    assert runner.num_replays > 60
