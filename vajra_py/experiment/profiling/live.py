"""Measure the step times of a running engine, and the part of them that is not computation."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.config import SystemConfig
from vajra_py.contract import BatchFeatures
from vajra_py.contract.observer import Observer, StepEnd
from vajra_py.engine.build import Engine
from vajra_py.engine.compute import ModelFacts, ModelRunner
from vajra_py.engine.outputs import OutputBuffer, Submission
from vajra_py.engine.prompts import request_seed
from vajra_py.engine.services import engine_services
from vajra_py.experiment.profiling.bench import GREEDY
from vajra_py.plugins import load_registry
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.runtime.support.seeds import SeedTree

_LIVE_WAVES = (1, 1, 2, 4, 8, 16, 32)
_MAX_LIVE_STEPS = 600


@dataclass(frozen=True, slots=True)
class LiveStep:
    """Step of the running engine: the time from forming it to processing its tokens, and the part of this time that was
    not computation, in seconds.
    """

    features: BatchFeatures
    time_s: float
    overhead_s: float


class _Watch(Observer):
    """Observer that records every step with its overhead."""

    def __init__(self, engine: Engine) -> None:
        self._replicas = list(engine.replicas.values())
        self._compute_s = 0.0
        self.steps: list[LiveStep] = []

    def on_step_end(self, step: StepEnd) -> None:
        """See `Observer`."""
        compute_s = sum(one.compute_s for one in self._replicas)
        time_s = step.ended_at - step.formed_at
        self.steps.append(LiveStep(step.features, time_s, max(1e-9, time_s - (compute_s - self._compute_s))))
        self._compute_s = compute_s


class _Allocated:
    """Wrapper of a `ModelRunner` that has its KV memory already; `close` leaves the runner open."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.submit, self.run = runner.submit, runner.run
        self.profile_num_blocks = runner.profile_num_blocks

    @property
    def facts(self) -> ModelFacts:
        """See `ModelRunner`."""
        return self._runner.facts

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Do nothing, as the memory is allocated already. See `ModelRunner`."""

    def close(self) -> None:
        """Do nothing: `profile_model` closes the wrapped runner."""


def serve_a_while(config: SystemConfig, num_blocks: int, runner: ModelRunner) -> list[LiveStep]:
    """Serve requests in waves of growing size, so that steps have few or many requests, and return the steps, or a
    random sample if there are too many. Times are wall-clock seconds.
    """
    memory = config.replica.memory.model_copy(update={"num_blocks": num_blocks})
    replica = config.replica.model_copy(update={"memory": memory})
    settings = config.backend.settings.model_copy(update={"workers": "in_process", "look_ahead": False})
    config = config.model_copy(
        update={
            "replica": replica,
            "backend": config.backend.model_copy(update={settings.kind: settings}),
        }
    )
    services = engine_services(config, load_registry(), {}, load=lambda options: _Allocated(runner))
    engine = Engine.load(config, services)
    watch = _Watch(engine)
    engine.controller.watch((watch,))
    loop = engine.start()
    stream = SeedTree(config.seed).stream("live")
    longest = engine.prompt_limits().max_request_tokens
    number = 0
    for wave in _LIVE_WAVES:
        for _ in range(wave):
            num_tokens = int(stream.integers(1, max(2, min(256, longest // 2))))
            num_outputs = int(stream.integers(1, max(2, min(48, longest // 4))))
            prompt = stream.integers(0, engine.facts.vocab_size, num_tokens).tolist()
            name = f"live-{number}"
            number += 1
            facts = RequestFacts(name, num_tokens, num_outputs)
            loop.submit(Submission(facts, prompt, request_seed(0, name), OutputBuffer(GREEDY, ()), shares=False))
        loop.run()
    steps = watch.steps
    if len(steps) > _MAX_LIVE_STEPS:
        steps = [steps[index] for index in sorted(stream.permutation(len(steps))[:_MAX_LIVE_STEPS].tolist())]
    return steps
