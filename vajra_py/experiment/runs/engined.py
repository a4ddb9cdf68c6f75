"""Run an experiment on a real model with the same settings, policies and requests as in a simulation.

In addition to the files of every run, the folder has `inputs.jsonl.gz` (the controller's inputs with their times),
`outputs.jsonl.gz` (tokens) and `engine.json` (sizes). Together with the decision log, they suffice for a replay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vajra_py.contract.latency import LAST_S, LatencyModel
from vajra_py.contract.observer import EndReason
from vajra_py.engine.build import Engine
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.engine.loop import EngineLoop
from vajra_py.engine.outputs import Submission
from vajra_py.engine.prompts import PromptMaker, request_seed
from vajra_py.engine.services import engine_services, length_predictor, predictions
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.experiment.runs.backend import Outcome, Run, WriteTables
from vajra_py.experiment.runs.results import write_results
from vajra_py.latency import REAL, StepTimes
from vajra_py.latency.services.output_length import ORACLES
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.records.input_log import INPUTS_FILE, InputLog
from vajra_py.runtime.records.output_log import OUTPUTS_FILE, OutputLog
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.workload_adapter import facts_of
from vajra_py.runtime.support.clock import to_seconds, to_ticks
from vajra_py.workload import RequestSpec, Workload
from vajra_py.workload.followers import Followers

ENGINE_FILE = "engine.json"

__all__ = ["ENGINE_FILE", "EngineRun", "length_predictor", "predictions"]


class EngineRun:
    """Run of an experiment on the engine. Keyword arguments are passed to `engine_services`, so that tests and tools
    can replace parts of the engine.
    """

    decision_log: type[DecisionLog] = DecisionLog
    write: WriteTables = staticmethod(write_results)

    def __init__(self, run: Run, **replaced: Any) -> None:
        settings: ModelBackendConfig = run.config.backend.settings
        _check_workload(run.workload, settings)
        self._run = run
        self._settings = settings
        lengths = run.workload.true_lengths()
        self._engine = Engine.load(run.config, engine_services(run.config, run.registry, lengths, **replaced))
        try:
            _check_vocabulary(run.workload, self._engine.vocab_size)
        except ConfigError:
            self._engine.close()
            raise
        self.controller = self._engine.controller
        self._outputs: dict[str, list[int]] = {}
        self._prompts = PromptMaker(run.config.seed, self._engine.vocab_size, self._outputs)
        self._followers = Followers()
        self._num_ended = 0
        self.loop: EngineLoop | None = None
        self._log: InputLog | None = None
        self._output_log: OutputLog | None = None

    @property
    def latency_models(self) -> dict[str, LatencyModel]:
        """See `Backend`: empty, as steps are executed."""
        return {}

    @property
    def step_times(self) -> StepTimes:
        """See `Backend`."""
        return REAL

    def prepare(self, folder: Path) -> None:
        """See `Backend`."""
        description = json.dumps(self._engine.description(), indent=1, sort_keys=True)
        (folder / ENGINE_FILE).write_text(description + "\n")
        self._log = InputLog(folder / INPUTS_FILE)
        self._output_log = OutputLog(folder / OUTPUTS_FILE)

    def start(self) -> Outcome:
        """Serve the whole workload. Raises `ExecutorError` if all replicas are lost."""
        self.loop = loop = self._engine.start(note=None if self._log is None else self._log.note)
        loop.on_ended = self._ended
        for spec in self._run.workload:
            if not self._followers.add(spec):
                self._schedule(spec, to_ticks(spec.arrived_at * self._settings.time_scale))
        loop.run()
        if loop.num_lost == len(self._engine.replicas):
            raise ExecutorError(f"every replica failed; the last: {loop.last_loss}")
        return Outcome(to_seconds(loop.now), loop.num_steps, {"engine": self._facts(loop)})

    def position(self) -> tuple[float, int]:
        """See `Backend`."""
        return (0.0, 0) if self.loop is None else (to_seconds(self.loop.now), self.loop.num_steps)

    def close(self) -> None:
        """See `Backend`."""
        self._engine.close()
        if self._log is not None:
            self._log.close()
        if self._output_log is not None:
            if self.loop is not None:
                for request, submission in self.loop.alive():
                    self._write_output(request, submission, "")
            self._output_log.close()
        self._log = self._output_log = None

    def _schedule(self, spec: RequestSpec, tick: int) -> None:
        assert self.loop is not None
        self.loop.submit_at(tick, lambda: self._submission(spec))

    def _submission(self, spec: RequestSpec) -> Submission:
        sampling = self._settings.sampling.params(spec.num_output_tokens)
        facts = facts_of(spec)
        prompt = self._prompts.prompt(spec)
        seed = request_seed(self._run.config.seed, spec.request_id)
        eos = self._engine.model_of(facts).eos_token_ids
        submission = Submission.of(facts, prompt.token_ids, sampling, eos, seed)
        submission.content, submission.shares = prompt.content, prompt.shares
        submission.num_output_tokens = spec.num_output_tokens
        return submission

    def _ended(self, submission: Submission, request: Request, reason: EndReason) -> None:
        assert self.loop is not None
        self._outputs[request.request_id] = submission.output.token_ids
        self._write_output(request, submission, reason.value)
        self._num_ended += 1
        if self._run.progress is not None:
            self._run.progress(self._num_ended, len(self._run.workload), to_seconds(self.loop.now))
        for spec in self._followers.released_by(request.request_id):
            self._schedule(spec, self.loop.now + to_ticks(spec.think_time_s * self._settings.time_scale))

    def _write_output(self, request: Request, submission: Submission, reason: str) -> None:
        if self._output_log is not None:
            output = submission.output
            self._output_log.note(request, reason, output.token_ids, is_faulty=output.is_faulty)

    def _facts(self, loop: EngineLoop) -> dict[str, object]:
        """Return facts for the manifest, such as the fraction of the steps' time not spent computing on the device."""
        replicas = self._engine.replicas.values()
        busy_s = to_seconds(sum(one.busy_ticks for one in replicas))
        compute_s = sum(one.compute_s for one in replicas)
        return {
            "replicas_lost": loop.num_lost,
            "steps_begun_ahead": sum(one.ahead.num_used for one in replicas if one.ahead),
            "steps_wasted": sum(one.ahead.num_wasted for one in replicas if one.ahead),
            "rows_dropped_ahead": sum(one.ahead.num_dropped_rows for one in replicas if one.ahead),
            "busy_s": busy_s,
            "compute_s": compute_s,
            # A step that begins ahead is computed in part before it is formed. That part is no busy time, so computation
            # may exceed the busy time.
            "overhead_fraction": max(0.0, 1.0 - compute_s / busy_s) if busy_s > 0 else 0.0,
        }


def _check_workload(workload: Workload, settings: ModelBackendConfig) -> None:
    if settings.output_length.type in ORACLES and not settings.sampling.ignore_eos:
        message = (
            f"knows the workload's lengths, but outputs end where the model ends them ({settings.output_length.type})"
        )
        problem = Problem(
            f"backend.{settings.kind}.output_length", message, "Allowed with `sampling: {ignore_eos: true}`"
        )
        raise ConfigError(problem)
    columns = workload.columns
    for since, times in (("the run's begin", columns.arrived_at), ("the one it follows", columns.think_time_s)):
        last = 0.0 if times is None else float(times.max()) * settings.time_scale
        if not last <= LAST_S:
            message = f"a request arrives {last:g} s after {since}, times this factor"
            allowed = f"Allowed: at most {LAST_S:,} s; a smaller factor"
            raise ConfigError(Problem(f"backend.{settings.kind}.time_scale", message, allowed))


def _check_vocabulary(workload: Workload, vocab_size: int) -> None:
    for spec in workload:
        tokens = spec.prompt_token_ids
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            message = f"request {spec.request_id!r} has a token that is not in the model's vocabulary ({wrong})"
            raise ConfigError(Problem("workload", message, f"Allowed: 0 to {vocab_size - 1}"))
