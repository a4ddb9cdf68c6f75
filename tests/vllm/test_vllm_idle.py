"""What somebody sees who asks a scheduler between steps, while it is paused, or when a policy does nothing."""

from __future__ import annotations

import logging
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from tests.vllm.core import Core, make_scheduler, request_of, vllm_config
from tests.vllm.plugins import install
from tests.vllm.test_vllm_interface import core_of, script
from tests.vllm.test_vllm_recording import core_of as recorded_core_of
from tests.vllm.test_vllm_recording import end
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.replay import replay
from vajra_py.plugins import Registry, build_registry
from vajra_py.vllm import Scheduler
from vajra_py.vllm.support import check_options

LAZY = """
import os, sys
from vajra_py.contract import Layer, PolicyConfig, PolicySpec, fill, hookimpl


class Config(PolicyConfig):
    how: str = "nothing"


class Lazy:
    def __init__(self, config):
        self.how, self.step = config.how, 0

    def schedule(self, replica, batch, now):
        self.step += 1
        if self.step > 6:
            if self.how == "nothing":
                return
            if self.how == "exits":
                sys.exit(3)
            raise KeyboardInterrupt
        fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))

    def solo_chunk_size(self, num_done_tokens, num_remaining_tokens):
        return num_remaining_tokens


@hookimpl
def vajra_policies():
    return [PolicySpec("lazy", Layer.REPLICA_SCHEDULER, Config, lambda c, x: Lazy(c), "Stops.")]
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    install(tmp_path, "lazy-policies", "[vajra]\nlazy_policies = lazy_policies\n", LAZY)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = build_registry(metadata.entry_points(group="vajra"))
    monkeypatch.setattr("vajra_py.vllm.scheduler.load_registry", lambda: found)
    return found


def until_over(core: Core) -> None:
    """As `LLM.generate` steps: nobody asks for a step when no client waits any more."""
    while core.scheduler.has_unfinished_requests() or core.queue:
        core.step()


@pytest.mark.parametrize("is_async", [False, True])
def test_when_the_last_client_has_its_answer_nothing_is_held_and_the_cache_can_be_reset(
    tiny_model: str, is_async: bool
) -> None:
    core = core_of(tiny_model, is_async=is_async)
    for index in range(2):
        core.add(script(index), 4, True)
    until_over(core)
    assert core.scheduler.get_request_counts() == (0, 0)
    assert core.scheduler.get_kv_cache_usage() == 0.0
    assert core.scheduler.reset_prefix_cache()
    core.add(script(0).__class__(**{**script(0).__dict__, "name": "r-9"}), 4, True)
    before = len(core.steps)
    until_over(core)
    assert core.steps[before].computed == {"r-9": 0}, "nothing of before the reset is hit"


@pytest.mark.parametrize("is_async", [False, True])
def test_who_is_aborted_in_a_pause_holds_nothing(tiny_model: str, is_async: bool) -> None:
    core = core_of(tiny_model, is_async=is_async)
    for index in range(2):
        core.add(script(index), 4, True)
    for _ in range(4):
        core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.queue or core.scheduler.has_requests():
        core.step()
    usage = core.scheduler.get_kv_cache_usage()
    core.abort("r-0")
    assert core.scheduler.get_request_counts() == (1, 0)
    assert 0.0 < core.scheduler.get_kv_cache_usage() < usage
    core.abort("r-1")
    assert core.scheduler.get_request_counts() == (0, 0)
    assert core.scheduler.get_kv_cache_usage() == 0.0
    assert core.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("fallback", [True, False])
def test_a_policy_that_schedules_nothing_has_broken_the_contract(
    tiny_model: str, tmp_path: Path, registry: Registry, caplog: pytest.LogCaptureFixture, fallback: bool
) -> None:
    settings = "max_idle_steps: 50" + (", fallback: vllm-v1" if fallback else "")
    text = f"scheduling: {{request_prioritizer: fcfs, replica_scheduler: lazy}}\nbackend: {{vllm: {{{settings}}}}}"
    core = recorded_core_of(tiny_model, tmp_path, text)
    with caplog.at_level(logging.WARNING):
        core.run([script(index) for index in range(3)], 4, True, max_steps=400)
    assert set(core.reasons.values()) == {"length" if fallback else "error"}
    assert any("policy lazy" in one.getMessage() and "scheduled nothing" in one.getMessage() for one in caplog.records)
    assert sum(not one.scheduled for one in core.steps) <= 55
    end(core)
    assert replay(tmp_path / "run", registry).difference is None


@pytest.mark.parametrize("how", ["exits", "interrupts"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_policy_that_wants_to_end_the_process_ends_its_requests(
    tiny_model: str, tmp_path: Path, registry: Registry, how: str, is_async: bool
) -> None:
    lazy = f"{{policy: lazy, params: {{how: {how}}}}}"
    text = f"scheduling: {{request_prioritizer: fcfs, replica_scheduler: {lazy}}}\nbackend: {{vllm: {{fallback: vllm-v1}}}}"
    core = recorded_core_of(tiny_model, tmp_path, text, is_async=is_async)
    core.run([script(index) for index in range(3)], 4, True, max_steps=400)
    assert set(core.reasons.values()) == {"length"}
    assert core.scheduler._fallback is None


@pytest.mark.parametrize("is_async", [False, True])
def test_a_session_with_log_probabilities_of_prompts_replays_equal(
    tiny_model: str, tmp_path: Path, is_async: bool
) -> None:
    core = recorded_core_of(tiny_model, tmp_path, "preset: vllm-v1", is_async=is_async, blocks=31)
    scripts = [script(index, prompt=40, output=40, prompt_logprobs=1 if index % 2 else None) for index in range(6)]
    core.run(scripts, 4, True)
    end(core)
    assert any(one.preempted for one in core.steps)
    assert replay(tmp_path / "run").difference is None


def test_streamed_input_ends_with_an_error_whatever_chunk_it_is(tiny_model: str) -> None:
    core = core_of(tiny_model)
    ends = []
    for _ in range(2):
        for _ in range(2):
            core.scheduler.add_request(chunk(resumable=True))
        told = core.scheduler.update_from_output(*nothing(core)).values()
        ends += [(one.request_id, str(one.finish_reason)) for each in told for one in each.outputs]
    core.scheduler.add_request(chunk(resumable=False))
    assert ends == [("s-0", "error")] * 2
    assert not core.scheduler.has_unfinished_requests()


def chunk(*, resumable: bool) -> Request:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    return Request("s-0", [1, 2, 3], params, None, resumable=resumable)


def nothing(core: Core) -> tuple[Any, Any]:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    return core.scheduler.schedule(), EMPTY_MODEL_RUNNER_OUTPUT


def test_an_id_that_is_used_twice_raises_nothing(tiny_model: str) -> None:
    core = core_of(tiny_model)
    core.add(script(0), 4, True)
    core.scheduler.add_request(request_of(script(0), 4, True))
    until_over(core)
    assert core.reasons == {"r-0": "length"}


def test_vllms_own_session_is_the_views_session(tiny_model: str) -> None:
    core = core_of(tiny_model)
    for name, extra, expected in (("a", {}, "mine"), ("b", {"vajra_session_id": "other"}, "other")):
        params = SamplingParams(max_tokens=2, temperature=0.0, extra_args=extra)
        core.scheduler.add_request(Request(name, [1, 2], params, None, session_id="mine"))
        assert core.scheduler._records[name].submission.facts.session_id == expected


def test_a_line_at_the_start_says_which_policies_schedule(tiny_model: str, tmp_path: Path) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.vajra")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        core_of(tiny_model)
        recorded_core_of(
            tiny_model, tmp_path, "scheduling: {request_prioritizer: fcfs, replica_scheduler: fixed_chunk}"
        )
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert "no experiment file" in lines[0]
    assert "vllm_v1" in lines[0]
    assert str(tmp_path / "experiment.yaml") in lines[1]
    assert "fixed_chunk" in lines[1]


@pytest.mark.parametrize("name", ["kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics"])
def test_figures_that_nobody_fills_are_refused(tiny_model: str, name: str) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    setattr(config.observability_config, name, True)
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        check_options(config)


def test_routed_experts_are_refused(tiny_model: str) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(ConfigError, match="routed-experts"):
        check_options(config)


FILLED = {"num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage", "prefix_cache_stats"}
WITH_CONNECTOR = {"connector_prefix_cache_stats", "kv_connector_stats", "num_kv_fetch_reqs_by_stage"}
"""Compared with vLLM's by `test_vllm_connector.py`."""
BY_OTHERS = {"step_counter", "current_wave", "iteration_details", "waiting_lora_adapters", "running_lora_adapters"}
"""Filled by vLLM's engine core or frontend."""
REFUSED = {
    "cudagraph_stats": "cudagraph_metrics",
    "ec_connector_stats": "ec_transfer_config",
    "kv_cache_eviction_events": "kv_cache_metrics",
    "perf_stats": "enable_mfu_metrics",
    "spec_decoding_stats": "speculative_config",
}


def test_every_figure_of_vllms_is_filled_or_its_option_refused(tiny_model: str) -> None:
    """Of this vLLM: a figure that comes with another version is found here."""
    assert {one.name for one in fields(SchedulerStats)} == FILLED | WITH_CONNECTOR | BY_OTHERS | REFUSED.keys()
    source = Path(check_options.__code__.co_filename).read_text()
    assert all(option in source for option in REFUSED.values())
    config = vllm_config(tiny_model, max_model_len=256)
    core = Core(make_scheduler(Scheduler, config, 41, 4, log_stats=True))
    core.add(script(0), 4, True)
    core.step()
    assert core.scheduler.make_stats().num_running_reqs == 1
