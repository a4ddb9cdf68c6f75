"""Load a model once for many profiles and runs of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from vajra_py.config import SystemConfig
from vajra_py.engine.ahead import spare_blocks
from vajra_py.engine.compute import (
    LookaheadRunner,
    LookaheadStep,
    ModelFacts,
    ModelRunner,
    PendingStep,
    RunnerOptions,
    StepInput,
    StepOutput,
)
from vajra_py.experiment.profiling.bench import Reference

HOST_BLOCKS = 64
"""Host blocks for the swaps that a profile measures."""


class LoadedOnce:
    """A `ModelRunner` for many profiles and runs, which load and close it one after another.

    It has KV memory for so many tokens, and room for a `Reference` and for steps that begin ahead besides; what it loads is what
    the first one asks for.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._runner: ModelRunner | None = None
        self._slots: set[int] = set()
        self._left: list[int] = []
        """Slots that the last run left behind."""

    def loader(self, config: SystemConfig) -> Callable[[RunnerOptions], ModelRunner]:
        """Return the loader for a profile or a run of this system."""

        def load(options: RunnerOptions) -> ModelRunner:
            if self._runner is None:
                settings = config.backend.settings
                made = replace(Reference.room(options), spare_blocks=spare_blocks(options.max_requests))
                self._runner = settings.load(made)
                num_blocks = self._kv_tokens // options.block_size + Reference.num_blocks(options)
                self._runner.allocate(num_blocks, HOST_BLOCKS if settings.can_swap else 0)
            return self

        return load

    @property
    def facts(self) -> ModelFacts:
        """See `ModelRunner`."""
        assert self._runner is not None
        return self._runner.facts

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """See `ModelRunner`."""
        return self._kv_tokens // self.facts.block_size

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Do nothing, since memory is allocated already."""

    def submit(self, step: StepInput) -> PendingStep:
        """See `ModelRunner`."""
        assert self._runner is not None
        return self._runner.submit(self._noted(step))

    def run(self, step: StepInput) -> StepOutput:
        """See `ModelRunner`."""
        assert self._runner is not None
        return self._runner.run(self._noted(step))

    def run_ahead(self, work: LookaheadStep) -> StepOutput:
        """See `LookaheadRunner`."""
        return cast(LookaheadRunner, self._runner).run_ahead(replace(work, step=self._noted(work.step)))

    def begin_ahead(self) -> None:
        """See `LookaheadRunner`."""
        cast(LookaheadRunner, self._runner).begin_ahead()

    def _noted(self, step: StepInput) -> StepInput:
        """The step with the slots freed that the last run left behind."""
        if self._left:
            step, self._left = replace(step, freed=[*self._left, *step.freed]), []
        self._slots = (self._slots - set(step.freed)) | {row.slot for row in step.new}
        return step

    def close(self) -> None:
        """Keep the model; slots in use are freed in the next step."""
        self._left += self._slots
        self._slots.clear()
