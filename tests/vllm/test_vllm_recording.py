"""A session of a vLLM that schedules by this package is recorded, and the simulator takes every decision again."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.vllm.core import Core, RequestScript, make_scheduler, vllm_config
from tests.vllm.plugins import breaking
from tests.vllm.test_vllm_interface import script
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.input_log import INPUTS_FILE, Arrival, read_inputs
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.vllm import Scheduler
from vajra_py.vllm.settings import EXPERIMENT_VARIABLE, SAVE_RUN_VARIABLE, vajra_options_of

LATENCY = "backend: {vllm: {latency: {type: affine, base_s: 0.004, per_token_s: 0.0001}}}"
POLICIES = {
    "vllm-v1": "preset: vllm-v1",
    "lrs": "scheduling: {request_prioritizer: lrs, replicaset_scheduler: pull, replica_scheduler: nano_vllm}\n"
    + LATENCY,
    "edf": "preset: sarathi\nscheduling: {request_prioritizer: edf}\n" + LATENCY,
}


def core_of(model: str, folder: Path, text: str, *, is_async: bool = False, blocks: int = 61) -> Core:
    folder.mkdir(exist_ok=True)
    (folder / "experiment.yaml").write_text(f"version: 1\n{text}\n")
    wanted = {"experiment": str(folder / "experiment.yaml"), "save_run": str(folder / "run")}
    config = vllm_config(
        model,
        is_async=is_async,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        additional_config={"vajra": wanted},
    )
    return Core(make_scheduler(Scheduler, config, blocks, 4), is_async)


def fuzzed(rng: random.Random, number: int) -> list[RequestScript]:
    common = tuple(rng.randrange(500) for _ in range(40))
    found = []
    for index in range(number):
        own = tuple(rng.randrange(500) for _ in range(rng.randint(1, 50)))
        tokens = common[: rng.choice((0, 17, 40))] + own
        arrives, output = rng.randint(0, 30), rng.randint(1, 50)
        found.append(
            RequestScript(
                f"r-{index}",
                tokens,
                output,
                arrives,
                priority=rng.randint(0, 2),
                aborts=arrives + rng.randint(0, 20) if rng.random() < 0.15 else None,
                ends_at=rng.randint(1, output) if rng.random() < 0.4 else None,
                salt=rng.choice((None, None, "a", "b")),
            )
        )
    return found


def end(core: Core) -> None:
    core.scheduler.schedule()
    core.scheduler.shutdown()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_session_is_replayed(tiny_model: str, tmp_path: Path, name: str, is_async: bool, seed: int) -> None:
    core = core_of(tiny_model, tmp_path, POLICIES[name], is_async=is_async, blocks=41 + 20 * seed)
    core.run(fuzzed(random.Random(seed), 24), 4, True)
    end(core)
    report = replay(tmp_path / "run")
    assert report.difference is None
    assert report.num_requests == 24
    assert report.num_steps == sum(bool(one.scheduled) for one in core.steps)
    told = {row["request_id"]: row["token_ids"] for row in read_rows(tmp_path / "run" / "outputs.jsonl.gz")}
    for request_id, tokens in core.tokens.items():
        assert told[request_id][: len(tokens)] == tokens
        assert len(told[request_id]) <= len(tokens) + is_async
    run = RunData.load(tmp_path / "run")
    assert run.is_finished
    assert run.requests().num_rows == 24
    assert core.scheduler.mechanism.fault is None
    assert run.summary is not None


def test_preemptions_and_prefix_hits_are_among_what_is_replayed(tiny_model: str, tmp_path: Path) -> None:
    core = core_of(tiny_model, tmp_path, POLICIES["vllm-v1"], blocks=36)
    core.run([replace(one, aborts=None) for one in fuzzed(random.Random(9), 30)], 4, True)
    end(core)
    assert replay(tmp_path / "run").difference is None
    rows = RunData.load(tmp_path / "run").requests().to_pylist()
    assert sum(row["num_preemptions"] for row in rows)
    assert sum(row["num_cached_tokens"] for row in rows)


def test_a_changed_recording_is_found_out(tiny_model: str, tmp_path: Path) -> None:
    core = core_of(tiny_model, tmp_path, POLICIES["lrs"])
    core.run(fuzzed(random.Random(3), 16), 4, True)
    end(core)
    file = tmp_path / "run" / "config.yaml"
    assert "max_batch_tokens: 64" in file.read_text()
    file.write_text(file.read_text().replace("max_batch_tokens: 64", "max_batch_tokens: 48"))
    assert replay(tmp_path / "run").difference is not None


@pytest.mark.parametrize("is_async", [False, True])
def test_a_fallback_a_reset_and_a_pause_are_replayed(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    text, registry = breaking(tmp_path, monkeypatch)
    core = core_of(tiny_model, tmp_path, text, is_async=is_async, blocks=41)
    for index in range(6):
        core.add(script(index, output=30), 4, True)
    for _ in range(14):
        core.step()
    assert core.scheduler._fallback is None
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(3):
        core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(4):
        core.step()
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    while core.scheduler.has_requests() or core.queue:
        core.step()
    end(core)
    assert core.reasons == {f"r-{index}": "length" for index in range(6)}
    assert replay(tmp_path / "run", registry).difference is None


def test_what_runs_at_the_end_is_recorded_as_unfinished(tiny_model: str, tmp_path: Path) -> None:
    core = core_of(tiny_model, tmp_path, POLICIES["vllm-v1"])
    for index in range(3):
        core.add(script(index, output=40), 4, True)
    for _ in range(12):
        core.step()
    core.scheduler.shutdown()
    core.scheduler.shutdown()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["status"], manifest["num_unfinished"]) == ("finished", 3)
    assert replay(tmp_path / "run").difference is None


def test_salts_and_prompts_are_in_the_inputs(tiny_model: str, tmp_path: Path) -> None:
    core = core_of(tiny_model, tmp_path, POLICIES["vllm-v1"])
    core.run([script(0, salt="a"), script(1)], 4, True)
    end(core)
    arrivals = [one for one in read_inputs(tmp_path / "run" / INPUTS_FILE) if isinstance(one, Arrival)]
    assert [one.salt for one in arrivals] == ["a", ""]
    assert arrivals[0].prompt_token_ids == script(0).prompt


def test_a_folder_that_holds_something_is_refused(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        core_of(tiny_model, tmp_path, POLICIES["vllm-v1"])
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_the_folder_is_named_by_option_or_environment() -> None:
    found = vajra_options_of({"vajra": {"save_run": "a"}}, {EXPERIMENT_VARIABLE: "b.yaml", SAVE_RUN_VARIABLE: "c"})
    assert (str(found.save_run), str(found.experiment)) == ("a", "b.yaml")
    assert str(vajra_options_of(None, {SAVE_RUN_VARIABLE: "c"}).save_run) == "c"
    assert vajra_options_of({}, {}).save_run is None
    wrong: Any = {"vajra": {"save_runs": "a"}}
    with pytest.raises(ConfigError, match="save_run"):
        vajra_options_of(wrong, {})
