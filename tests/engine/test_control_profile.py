"""Is a profile complete, resumable and usable, and is a simulation on true step times equal to what the engine measures?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.engine.fake_runner import FakeRunner
from vajra_py.config import TypedChoice, config_from_mapping
from vajra_py.contract import BatchFeatures
from vajra_py.engine.compute import DoneStep, PendingStep, RunnerOptions, StepInput, StepOutput
from vajra_py.engine.worker import Deliver, InlineWorker, ReplicaKey, Worker
from vajra_py.errors import ConfigError
from vajra_py.experiment.measured.accuracy import Accuracy, compare_with_measured
from vajra_py.experiment.measured.files import read_measured
from vajra_py.experiment.measured.validation import Assumed, check_validation, simulate_as_served, validate
from vajra_py.experiment.profiling import bench
from vajra_py.experiment.profiling.live import LiveStep
from vajra_py.experiment.profiling.profile import ProfileSettings, profile_config, profile_model
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import read_profile
from vajra_py.metrics.runs.run_data import RunData

T = TypeVar("T")


class Idle(FakeRunner):
    """Computes nothing at all, and counts."""

    num_runs = 0

    def run(self, step: StepInput) -> StepOutput:
        Idle.num_runs += 1
        self._take_changes(step)
        slots = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        assert set(slots) <= set(self._slots)
        return StepOutput(slots, [0] * len(slots), 1e-6)


SIZES = {"replica": {"max_batch_size": 8, "max_model_len": 128, "memory": {"num_blocks": 80}}}


def profile_settings(model: Path) -> ProfileSettings:
    return ProfileSettings(profile_config(model, {**SIZES, "backend": {"engine": {"random_weights": True}}}), passes=2)


def test_a_profile_predicts_steps(hollow_model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    file = tmp_path / "profile.json"
    made = profile_model(profile_settings(hollow_model), file, lambda *progress: seen.append(progress), load=Idle)
    assert seen[-1][0] == seen[-1][1] > 100
    assert read_profile(file).fit == made.fit
    assert {"all", "decode", "prefill", "mixed", "live"} <= set(made.errors)
    assert made.facts["model_type"] == "fake"
    assert list(tmp_path.iterdir()) == [file]  # what was measured on the way is gone
    config = config_from_mapping(
        {
            "version": 1,
            "preset": "vajra",
            "replica": {"memory": {"num_blocks": 80}},
            "workload": {
                "type": "synthetic",
                "arrivals": {"type": "at_once"},
                "num_requests": 3,
                "prompt_tokens": {"type": "constant", "value": 20},
                "output_tokens": {"type": "constant", "value": 5},
            },
            "backend": {"simulator": {"latency": {"type": "profiled", "path": str(file)}}},
        }
    )
    assert run_experiment(config, folder=tmp_path / "run").is_finished


class Device(FakeRunner):
    """Computes each step in a hundredth of a second beside the caller, who takes three thousandths to submit it."""

    now_s = free_s = 0.0

    def submit(self, step: StepInput) -> PendingStep:
        self._take_changes(step)
        for slot in step.decodes:
            self._end(slot, self._slots[slot].num_computed + 1)
        for chunk in step.chunks:
            self._end(chunk.slot, chunk.num_computed + len(chunk.token_ids))
        self.now_s += 0.003
        self.free_s = max(self.now_s, self.free_s) + 0.010
        return Computing(self, self.free_s, StepOutput([], [], 0.010))

    def run(self, step: StepInput) -> StepOutput:
        return self.submit(step).result()

    def _end(self, slot: int, num_tokens: int) -> None:
        row = self._slots[slot]
        assert 0 < num_tokens <= 4 * len(row.table)
        row.num_computed = num_tokens


class AtOnce(Device):
    """A runner whose steps are computed when they are submitted."""

    def submit(self, step: StepInput) -> PendingStep:
        return DoneStep(super().submit(step).result())


@dataclass(frozen=True)
class Computing:
    device: Device
    done_s: float
    output: StepOutput

    def result(self) -> StepOutput:
        self.device.now_s = max(self.device.now_s, self.done_s)
        return self.output


@pytest.mark.parametrize(
    ("kind", "begins_ahead", "time_s"), [(Device, False, 0.013), (Device, True, 0.010), (AtOnce, True, 0.013)]
)
def test_decodes_that_begin_ahead_take_the_devices_time(
    kind: type[Device], begins_ahead: bool, time_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = kind(RunnerOptions(model="none", block_size=4))
    device.allocate(8)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: device.now_s))
    one = bench.Bench(device, 4, 8, begins_ahead=begins_ahead)
    decodes = (1, 3, 4, 10)
    assert bench.Batch(decodes).num_blocks(4, begins_ahead) == (8 if begins_ahead else 7)
    assert one.time_s(bench.Batch(decodes)) == pytest.approx(time_s)
    assert one.time_s(bench.Batch(decodes[:1], ((5, 2),))) == pytest.approx(0.013)


@pytest.mark.parametrize("look_ahead", [None, False])
def test_a_profile_of_a_gpu_hides_the_forming_of_decodes_that_begin_ahead(
    look_ahead: bool | None, hollow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(bench.Bench, "time_s", lambda one, batch: made.append(one._begins_ahead) or 0.01)
    monkeypatch.setattr("vajra_py.experiment.profiling.profile.serve_a_while", lambda *_: live)
    decode, prompt = BatchFeatures().with_decodes(1, 20), BatchFeatures().with_chunk(20, 0)
    live = [LiveStep(features, 0.012, 0.002) for features in (decode, prompt)] * 2
    engine = {"random_weights": True, "device": "cuda", "look_ahead": look_ahead}
    config = profile_config(hollow_model, {**SIZES, "backend": {"engine": engine}})
    profile = profile_model(ProfileSettings(config, passes=2), tmp_path / "profile.json", load=Idle)
    assert set(made[:-10]) == {look_ahead is None, False}  # the reference does not
    assert profile.fit.time_s(decode) == pytest.approx(0.010 if look_ahead is None else 0.012, rel=0.02)
    assert profile.fit.time_s(prompt) == pytest.approx(0.012, rel=0.02)


def test_a_profile_that_was_broken_off_goes_on(hollow_model: Path, tmp_path: Path) -> None:
    def break_off(done: int, total: int) -> None:
        if done == 50:
            raise KeyboardInterrupt

    settings, file = profile_settings(hollow_model), tmp_path / "profile.json"
    with pytest.raises(KeyboardInterrupt):
        profile_model(settings, file, break_off, load=Idle)
    assert not file.exists()
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text()[:-5])  # the last line was being written
    seen: list[int] = []
    Idle.num_runs = 0
    profile_model(settings, file, lambda done, total: seen.append(done), load=Idle)
    assert seen[0] == 50
    assert file.exists()
    resumed, Idle.num_runs = Idle.num_runs, 0
    profile_model(settings, tmp_path / "other.json", load=Idle)
    assert resumed < Idle.num_runs


def test_a_profile_keeps_how_much_equal_steps_differ(hollow_model: Path, tmp_path: Path) -> None:
    def break_off(done: int, total: int) -> None:
        raise KeyboardInterrupt

    settings, file = replace(profile_settings(hollow_model), passes=5), tmp_path / "profile.json"
    with pytest.raises(KeyboardInterrupt):
        profile_model(settings, file, break_off, load=Idle)
    (kept,) = tmp_path.iterdir()
    header = kept.read_text().splitlines()[0]
    batches = json.loads(header)["batches"]
    # Every fifth step takes 1.5 times as long, or 3 times; the machine is half as fast in the second half, and nobody should notice.
    measured = []
    for turn in range(5):
        for index, batch in enumerate(batches):
            slow = 2.0 if turn >= 3 or (turn == 2 and index >= len(batches) // 2) else 1.0
            longer = 3.0 if batch["chunks"] else 1.5
            lasts = longer if (turn + index) % 5 == 0 else 1.0
            measured.append(json.dumps([turn, index, 0.5 * slow * lasts, 1e-4 * slow]))
    kept.write_text("\n".join([header, *measured]) + "\n")
    made = profile_model(replace(settings, reference_s=1e-4), file, load=Idle)
    assert made.variation is not None
    for factors, longer in ((made.variation.decodes, 1.5), (made.variation.prompts, 3.0)):
        average = 0.8 + 0.2 * longer
        assert factors[0] == pytest.approx(1.0 / average, rel=0.05)  # where the pace changes, two are misjudged
        assert np.quantile(factors, 0.9) == pytest.approx(longer / average, rel=0.05)
        assert sum(one > 1.2 for one in factors) / len(factors) == pytest.approx(0.2, abs=0.02)
    decodes = BatchFeatures(num_decodes=4, decode_context_tokens=100)
    assert made.fit.time_s(decodes) == pytest.approx(0.5 * 1.1, rel=0.05)
    assert made.facts["reference_s"] == 1e-4
    assert read_profile(file).variation == made.variation


def test_two_passes_do_not_tell_how_much_steps_differ(hollow_model: Path, tmp_path: Path) -> None:
    made = profile_model(profile_settings(hollow_model), tmp_path / "profile.json", load=Idle)
    assert made.variation is None


@pytest.mark.parametrize("backend", ["engine", "simulator"])
def test_an_experiment_whose_policies_need_the_profile_can_be_profiled(
    backend: str, hollow_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    experiment = {
        **SIZES,
        "scheduling": {
            "request_prioritizer": "lrs",
            "replicaset_scheduler": "pull",
            "replica_scheduler": {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.03}},
        },
        "num_replicas": 2,
        "admission": {"max_queued_requests": 1},
        "backend": {backend: {"latency": {"type": "profiled", "path": str(file)}}},
    }
    config = profile_config(hollow_model, experiment, ["backend.engine.random_weights=true"])
    assert config.replica.max_batch_size == SIZES["replica"]["max_batch_size"]
    made = profile_model(ProfileSettings(config, passes=1), file, load=Idle)
    assert made.errors["live"]["num_shapes"] > 100
    assert read_profile(file).fit == made.fit


def test_the_model_of_a_profile_is_the_experiments_own(hollow_model: Path, tmp_path: Path) -> None:
    named = {**SIZES, "backend": {"engine": {"model": hollow_model.name, "random_weights": True}}}
    file = hollow_model.parent / "own.yaml"
    file.write_text(json.dumps({"version": 1, **named}))  # JSON is YAML
    assert Path(profile_config(None, file).backend.settings.model) == hollow_model
    with pytest.raises(ConfigError, match=r"model: is missing.*a `--config` whose backend names one"):
        profile_config(None, {**SIZES, "backend": {"simulator": {}}})


def test_a_backend_that_does_not_exist_is_not_passed_over(hollow_model: Path) -> None:
    with pytest.raises(ConfigError, match="got enigne"):
        profile_config(hollow_model, {**SIZES, "backend": {"enigne": {"num_threads": 1}}})


def test_other_settings_are_measured_anew(hollow_model: Path, tmp_path: Path) -> None:
    def break_off(done: int, total: int) -> None:
        if done == 50:
            raise KeyboardInterrupt

    file = tmp_path / "profile.json"
    with pytest.raises(KeyboardInterrupt):
        profile_model(profile_settings(hollow_model), file, break_off, load=Idle)
    seen: list[int] = []
    other = profile_config(hollow_model, {"replica": {"max_batch_size": 4, "max_model_len": 64}}, ["seed=1"])
    with pytest.raises(ConfigError):
        profile_model(ProfileSettings(other), file, load=Idle)  # no weights in the directory
    settings = profile_config(
        hollow_model,
        {"replica": {"max_batch_size": 4, "max_model_len": 64}, "backend": {"engine": {"random_weights": True}}},
    )
    profile_model(ProfileSettings(settings, passes=1), file, lambda done, total: seen.append(done), load=Idle)
    assert seen[0] == 1


# Validation


@dataclass(frozen=True)
class StepTime:
    base_s: float = 0.004
    per_token_s: float = 0.0002

    def of(self, step: StepInput) -> float:
        num_tokens = len(step.decodes) + sum(len(chunk.token_ids) for chunk in step.chunks)
        return self.base_s + self.per_token_s * num_tokens


class PredictableWorld:
    """A world in which steps take exactly what a formula says, and nothing else takes any time."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self._now = 0
        self._under_way: list[tuple[int, Callable[[], None]]] = []

    def now(self) -> int:
        return self._now

    def wait(self, inbox: SimpleQueue[T], until: int) -> T | None:
        due, deliver = min(self._under_way, key=lambda one: one[0], default=(until, None))
        self._now = max(self._now, min(due, -(-until // 1000) * 1000))
        if deliver is None or due > self._now:
            return None
        self._under_way.remove((due, deliver))
        deliver()
        return inbox.get_nowait()

    def worker(self, replica: ReplicaKey, options: RunnerOptions) -> Worker:
        return _PredictableWorker(self, replica, options)

    def begin(self, step: StepInput, deliver: Callable[[], None]) -> None:
        self._under_way.append((self._now + round(self._step_time.of(step) * 10**9) * 1000, deliver))


class _PredictableWorker(InlineWorker):
    def __init__(self, world: PredictableWorld, replica: ReplicaKey, options: RunnerOptions) -> None:
        super().__init__(replica, FakeRunner(options))
        self._world = world
        self._steps: list[StepInput] = []

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        super().start(
            num_blocks, num_host_blocks, lambda done: self._world.begin(self._steps.pop(), lambda: deliver(done))
        )

    def submit(self, step: StepInput) -> None:
        self._steps.append(step)
        super().submit(step)


def engine_experiment(model: Path, latency: Any, **engine: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "num_replicas": 2,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "least_loaded",
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 64}},
        },
        "replica": {"max_batch_size": 8, "memory": {"block_size": 8, "num_blocks": 60}},
        "workload": {
            "type": "synthetic",
            "arrivals": {"type": "poisson", "rate": 40.0},
            "num_requests": 60,
            "prompt_tokens": {"type": "uniform", "min": 1, "max": 120},
            "output_tokens": {"type": "uniform", "min": 1, "max": 40},
        },
        "backend": {"engine": {"model": str(model), "random_weights": True, "latency": latency, **engine}},
    }


def run_predictably(mapping: dict[str, Any], folder: Path, step_time: StepTime) -> RunData:
    config = config_from_mapping(mapping)
    world = PredictableWorld(step_time)
    return run_experiment(
        config,
        folder=folder,
        backend=lambda run: EngineRun(run, make_worker=world.worker, make_clock=lambda: world),
    )


def largest_error(accuracy: Accuracy) -> float:
    return max(abs(one.relative) for one in accuracy.errors)


@pytest.mark.parametrize("engine", [{}, {"time_scale": 0.5}, {"sampling": {"ignore_eos": False}}])
def test_a_simulation_on_true_step_times_is_what_was_measured(
    engine: dict[str, Any], hollow_model: Path, tmp_path: Path
) -> None:
    latency = {"type": "affine", "base_s": 0.004, "per_token_s": 0.0002}
    mapping = engine_experiment(hollow_model, latency, **engine)
    run = run_predictably(mapping, tmp_path / "run", StepTime())
    accuracy = validate(run, config_from_mapping(mapping))
    names = [one.name for one in accuracy.errors]
    assert {"ttft_p99_ms", "tpot_mean_ms", "e2e_p50_ms", "tbt_p90_ms", "output_tokens_per_s"} <= set(names)
    assert all(one.measured > 1.0 for one in accuracy.errors)
    assert largest_error(accuracy) < 1e-4
    assert accuracy.passes
    assert accuracy.measured.num_output_tokens.tolist() == accuracy.simulated.num_output_tokens.tolist()


def test_wrong_step_times_show(hollow_model: Path, tmp_path: Path) -> None:
    latency = {"type": "affine", "base_s": 0.006, "per_token_s": 0.0003}
    mapping = engine_experiment(hollow_model, latency)
    accuracy = validate(run_predictably(mapping, tmp_path / "run", StepTime()), config_from_mapping(mapping))
    assert not accuracy.passes
    assert all(one.relative > 0.1 for one in accuracy.errors if one.name.startswith(("ttft_mean", "tpot", "e2e")))
    error = next(row for row in accuracy.table().rows if row.head == "ttft_mean_ms").cells[-1]
    assert error.spread == "beyond 15%"


def test_policies_are_told_in_the_simulation_what_they_were_told_on_the_engine(
    hollow_model: Path, tmp_path: Path
) -> None:
    told = {"type": "affine", "base_s": 0.006, "per_token_s": 0.0003}
    mapping = engine_experiment(hollow_model, told)
    mapping["scheduling"]["replica_scheduler"] = {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.02}}
    measured = run_predictably(mapping, tmp_path / "run", StepTime())
    config = config_from_mapping(mapping)
    true = TypedChoice.model_validate({"type": "affine", "base_s": 0.004, "per_token_s": 0.0002})
    simulated = simulate_as_served(measured, config, assumed=Assumed(latency=true))
    assert largest_error(compare_with_measured(read_measured(measured.path), simulated)) < 0.001
    assert largest_error(validate(measured, config)) > 0.1


def test_what_cannot_be_validated(hollow_model: Path) -> None:
    config = config_from_mapping(engine_experiment(hollow_model, None))
    with pytest.raises(ConfigError, match=r"backend\.engine\.latency: is needed"):
        check_validation(config)
