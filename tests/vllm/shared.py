"""One vLLM for many runs: its workers are started once, and every step is checked on the way to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.engine.compute import RunnerOptions
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry
from vajra_py.vllm.loading import VllmWorkers, load_vllm
from vajra_py.vllm.options import VllmOptions
from vajra_py.vllm.runner import VllmRunner

BLOCK_SIZE = 32
NUM_BLOCKS = 16
MAX_LEN = 256
MAX_STEP_TOKENS = 256
ARGUMENTS = {"enforce_eager": True}


class SharedWorkers:
    """`VllmWorkers` that outlive their runner.

    Attributes:
        engine: its KV memory is compared with the state of vLLM's workers at every step; None: no comparison.
        num_steps: steps executed, in all.
    """

    def __init__(self, model: str, num_blocks: int = NUM_BLOCKS, **options: Any) -> None:
        given = VllmOptions(
            model=model,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN,
            max_step_tokens=MAX_STEP_TOKENS,
            max_batch_size=8,
            engine_args=ARGUMENTS,
            **options,
        )
        loaded = load_vllm(given)
        workers = loaded._workers
        assert isinstance(workers, VllmWorkers)
        self._workers = workers
        self.facts, self.is_cpu = workers.facts, workers.is_cpu
        self.num_blocks = num_blocks
        self._workers.allocate(num_blocks)
        self._num_runs = 0
        self.num_steps = 0
        self.engine: Any = None
        self.runner: Any = None

    @property
    def model_runner(self) -> Any:
        """vLLM's own model runner."""
        return self._workers._executor.driver_worker.worker.model_runner

    def load(self, options: RunnerOptions) -> VllmRunner:
        """See `LoadRunner`."""
        assert isinstance(options, VllmOptions)
        assert options.max_batch_size <= 8
        self.runner = VllmRunner(self, replace(options, max_step_tokens=MAX_STEP_TOKENS))
        self._num_runs += 1
        self.runner._num_named = self._num_runs * 1_000_000
        return self.runner

    def num_blocks_in(self, memory_fraction: float) -> int:
        return self.num_blocks

    def allocate(self, num_blocks: int) -> None:
        assert num_blocks <= self.num_blocks

    def execute(self, message: Any) -> Any:
        output = self._workers.execute(message)
        self.num_steps += 1
        if self.engine is not None:
            self._compare(message)
        return output

    def _compare(self, message: Any) -> None:
        """Check that vLLM's block tables equal ours and contain exactly the blocks that are not free."""
        (unit,) = self.engine.replicas.values()
        memory = unit.replica.memory
        held: set[int] = set()
        for request in (one for one in self.engine.controller.alive() if one.is_resident):
            table = memory.block_table(request)
            held.update(table)
            row = unit.executor._rows.get(request)
            known = None if row is None else self.runner._rows[row.slot]
            if known is not None and known.name in message.num_scheduled_tokens:
                told = self.model_runner.requests[known.name].block_ids[0]
                assert told == [block + 1 for block in table], request.request_id
        assert len(held) == memory.num_blocks - memory.free_blocks

    def close(self) -> None:
        """Remove the runner's requests from the workers, which stay alive."""
        from vllm.v1.core.sched.output import SchedulerOutput

        message = SchedulerOutput.make_empty()
        message.finished_req_ids = set(self.model_runner.requests)
        self._workers.execute(message)
        assert not self.model_runner.requests

    def shut_down(self) -> None:
        self._workers.close()

    def backend(self, on_made: Callable[[EngineRun], None] | None = None) -> Callable[[Run], Backend]:
        """Return a factory of backends on these workers."""

        def make(run: Run) -> Backend:
            made = EngineRun(run, load=self.load)
            self.engine = made._engine
            if on_made is not None:
                on_made(made)
            return made

        return make


def settings(model: str | Path, scheduling: Any, workload: Any, **sections: Any) -> dict[str, Any]:
    """An experiment on a vLLM with few KV blocks."""
    memory = {
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "reservation": "incremental",
        "watermark_fraction": 0.0,
        **sections.pop("memory", {}),
    }
    replica = {"max_batch_size": 6, "max_model_len": MAX_LEN, "memory": memory, **sections.pop("replica", {})}
    vllm = {"model": str(model), "engine_args": ARGUMENTS, **sections.pop("vllm", {})}
    return {
        "version": 1,
        "seed": 11,
        "scheduling": scheduling,
        "replica": replica,
        "workload": workload,
        "backend": {"vllm": vllm},
        **sections,
    }


def run_on(workers: SharedWorkers, mapping: dict[str, Any], folder: Path, registry: Registry | None = None) -> RunData:
    """Execute a run, and check that every KV block is free at its end."""
    config = config_from_mapping(mapping, registry=registry)
    run = run_experiment(config, folder=folder, registry=registry, backend=workers.backend())
    (unit,) = workers.engine.replicas.values()
    memory = unit.replica.memory
    assert memory.free_blocks == memory.num_blocks
    workers.engine.controller.check_conservation()
    assert workers.engine.controller.num_alive == 0
    workers.engine = None
    return run
