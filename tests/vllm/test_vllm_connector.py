"""A KV connector is called as vLLM's own scheduler calls it, and decisions are vLLM's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler as VllmsOwn
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.vllm import fuzz
from tests.vllm.connector_fuzz import ConnectedSession, breaking, compare, compare_in, play, replayed, session_of
from tests.vllm.core import Core, calls_of, kv_cache, make_scheduler, vllm_config
from tests.vllm.fuzz import RequestScript, Session
from tests.vllm.plugins import install_broken
from tests.vllm.test_vllm_fuzz import PLAIN
from vajra_py.errors import ConfigError
from vajra_py.plugins import build_registry
from vajra_py.vllm import Scheduler
from vajra_py.vllm.plugin import check

BLOCK = 4
MODULE = "tests.vllm.scripted_connector"


@pytest.mark.parametrize("seed", range(5_000_000, 5_000_006))
def test_a_session_is_vllms(tiny_model: str, seed: int) -> None:
    found, _ = compare(tiny_model, seed)
    assert found is None


@pytest.mark.parametrize("kind", ["adapters", "drafts", "windows", "windows-drafts"])
@pytest.mark.parametrize("seed", range(5_000_000, 5_000_003))
def test_a_session_with_more_than_a_connector_is_vllms(tiny_model: str, seed: int, kind: str) -> None:
    found, counts = compare(tiny_model, seed, kind=kind)
    assert found is None
    assert counts["requests"]


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        pytest.param(150_009, "drafts", id="a load waits behind one that lacks blocks"),
        pytest.param(160_015, "windows-drafts", id="a load leaves room for drafts whatever the window"),
        pytest.param(160_039, "drafts", id="a load never leaves room for drafts"),
    ],
)
def test_a_session_that_differed_is_vllms(tiny_model: str, seed: int, kind: str) -> None:
    found, counts = compare(tiny_model, seed, kind=kind)
    assert found is None
    assert counts["vllm_stuck"] == (seed == 160_039)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["plain", "drafts"])
@pytest.mark.parametrize("seed", range(5_000_000, 5_000_003))
def test_a_recorded_session_is_replayed(tiny_model: str, tmp_path: Path, seed: int, kind: str, is_async: bool) -> None:
    assert replayed(tiny_model, session_of(seed, is_async=is_async, kind=kind), tmp_path / "run") is None


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["plain", "drafts", "windows"])
@pytest.mark.parametrize("seed", range(5_000_000, 5_000_004))
def test_other_policies_take_over_when_transfers_are_over(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, kind: str, is_async: bool
) -> None:
    install_broken(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = build_registry(metadata.entry_points(group="vajra"))
    monkeypatch.setattr("vajra_py.vllm.scheduler.load_registry", lambda: registry)
    found, has_broken = breaking(tiny_model, session_of(seed, is_async=is_async, kind=kind), tmp_path, at_step=3)
    assert found is None
    assert has_broken


def test_sessions_of_this_run_alone(tiny_model: str) -> None:
    """Other seeds each time; a failure names its own."""
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + 2):
        found, _ = compare(tiny_model, seed)
        assert found is None, f"make vllm-fuzz SEED={seed} COUNT=1 RUNS=connector/sync: {found}"


def test_a_steady_step_makes_at_most_a_fifth_of_vllms_calls(tiny_model: str, tmp_path: Path) -> None:
    """A steady step of 48 requests with a connector that has nothing to load, for which an evidence page has figures of 256."""

    def num_calls(cls: type[Any]) -> int:
        config = vllm_config(tiny_model, max_model_len=512, max_num_seqs=48, max_num_batched_tokens=4096)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        place = {"shared_storage_path": str(tmp_path)}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=place
        )
        core = Core(make_scheduler(cls, config, 48 * 20 + 1, 16))
        for index in range(48):
            core.add(RequestScript(f"r-{index}", tuple(range(10, 20 + index)), 100, 0, 0.0), 16, True)
        while len(core.tokens) < 48:
            core.step()
        counted = sum(calls_of(core) for _ in range(16))
        core.scheduler.shutdown()
        return counted

    assert num_calls(Scheduler) * 5 < num_calls(VllmsOwn)


@pytest.fixture
def config(tiny_model: str) -> Any:
    made = vllm_config(tiny_model, max_model_len=64, max_num_batched_tokens=64, enforce_eager=True)
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="GroupedConnector", kv_role="kv_both", kv_connector_module_path=MODULE
    )
    return made


@pytest.fixture
def scheduler(config: Any) -> Iterator[Any]:
    made = make_scheduler(Scheduler, config, 33, BLOCK, log_stats=True)
    yield made
    made.shutdown()


def request(name: str = "r0", num_tokens: int = 16, *, first: int = 100, **transfer: Any) -> Any:
    script = RequestScript(name, tuple(range(first, first + num_tokens)), 4, 0, 0.0, transfer=transfer)
    fuzz._MADE.setdefault("zero", 0.0)
    fuzz.init_none_hash(fuzz._HASH)
    return fuzz.request_of(script, Session(0, BLOCK, 32, {"caches": True}, [script], [], False, False))


def turn(scheduler: Any, report: KVConnectorOutput | None = None, tokens: bool = True) -> tuple[Any, Any]:
    """A step: its message, and what the clients get."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[9] for _ in names]
    result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
    result.kv_connector_output = report
    return output, scheduler.update_from_output(output, result)


def received(*names: str) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=set(names))


def test_a_load_that_lasts_is_no_violation_of_an_idle_policy(scheduler: Any) -> None:
    scheduler.add_request(request(remote=16, load_turns=1))
    for _ in range(1_200):
        output, _ = turn(scheduler)
        assert not output.num_scheduled_tokens
    assert scheduler.has_requests()
    assert scheduler.make_stats().num_kv_fetch_reqs_by_stage["in_progress"] == 1
    turn(scheduler, received("r0"))
    output, told = turn(scheduler)
    assert output.num_scheduled_tokens == {"r0": 1}  # the last token of the prompt
    (first,) = told[0].outputs
    assert first.prefill_stats.num_external_cached_tokens == 16


def test_what_a_connector_raises_is_not_the_policys(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(scheduler.connector, "get_num_new_matched_tokens", fail)
    scheduler.add_request(request(remote=16))
    with pytest.raises(ConnectionError, match="the store is gone"):
        scheduler.schedule()
    assert scheduler.mechanism.fault is None


def test_loads_begun_go_on_while_new_requests_are_paused(scheduler: Any) -> None:
    scheduler.add_request(request("r0", remote=16, load_turns=1))
    turn(scheduler)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.add_request(request("r1", remote=16, load_turns=1))
    assert scheduler.get_num_unfinished_requests() == 1
    turn(scheduler, received("r0"))
    output, _ = turn(scheduler)
    assert list(output.num_scheduled_tokens) == ["r0"]
    assert scheduler.get_num_unfinished_requests() == 1


def test_the_cache_is_not_reset_under_a_load(scheduler: Any) -> None:
    scheduler.add_request(request(remote=16, load_turns=1))
    turn(scheduler)
    assert not scheduler.reset_prefix_cache(reset_running_requests=True)
    turn(scheduler, received("r0"))
    output, _ = turn(scheduler)
    assert output.num_scheduled_tokens == {"r0": 1}
    assert scheduler.reset_prefix_cache(reset_running_requests=True)


def test_blocks_of_an_ended_request_are_free_when_they_are_sent(scheduler: Any) -> None:
    scheduler.add_request(request(send_turns=1))
    for _ in range(4):
        _, told = turn(scheduler)
    (last,) = told[0].outputs
    assert last.kv_transfer_params == {"blocks": [5], "tokens": [9, 9, 9, 9]}
    assert scheduler.get_kv_cache_usage() > 0
    turn(scheduler)
    assert scheduler.has_requests()
    turn(scheduler, KVConnectorOutput(finished_sending={"r0", "unknown"}))
    assert not scheduler.has_requests()
    assert scheduler.get_kv_cache_usage() == 0


def test_a_load_that_fails_ends_its_request_with_an_error(scheduler: Any) -> None:
    scheduler.add_request(request(remote=16, load_turns=1))
    turn(scheduler)
    report = KVConnectorOutput(finished_recving={"r0"}, failed_recving={"r0"})
    _, told = turn(scheduler, report)
    (end,) = told[0].outputs
    assert str(end.finish_reason) == "error"
    assert "could not be loaded" in end.stop_reason
    assert not scheduler.requests


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_block_that_is_reported_late_costs_no_token(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """Both requests hold the block, and are decodes by then: what that step computed of them is void."""
    monkeypatch.setitem(fuzz._MADE, "zero", 0.0)
    transfer = {"remote": 8, "bad_block": 1, "bad_steps": 2}
    scripts = [RequestScript(name, tuple(range(100, 109)), 12, 0, 0.0, transfer=transfer) for name in ("r0", "r1")]
    session = ConnectedSession(0, BLOCK, 64, PLAIN | {"caches": True}, scripts, [], is_async=False, second_runner=False)
    played = play(Scheduler, tiny_model, replace(session, on_failure="recompute", num_drafts=num_drafts))
    for one in scripts:
        assert played.tokens[one.name] == [fuzz.token_of(one, place) for place in range(one.max_tokens)]
    assert fuzz.end_check(session, played) is None


# Several block tables


@pytest.mark.parametrize("is_async", [False, True])
def test_the_last_token_of_a_loaded_prompt_finds_its_window(tiny_model: str, is_async: bool) -> None:
    """Every token is loaded, and the window of the last one begins in a block that no later token reads; vLLM lacks that block."""
    script = RequestScript("r0", tuple(range(100, 109)), 6, 0, 0.0, transfer={"remote": 9, "load_turns": 1})
    given = ConnectedSession(0, 1, 64, PLAIN, [script], [], is_async, second_runner=False, windows=(None, 4))
    found, counts = compare_in(tiny_model, replace(given, connector="GroupedConnector"))
    assert found is None
    assert counts["vllm_faults"] == 1


def test_blocks_that_were_not_loaded_have_to_be_told_by_requests(config: Any) -> None:
    made = make_scheduler(Scheduler, config, 33, BLOCK, cache=kv_cache(33, BLOCK, (None, 8)))
    made.add_request(request(remote=16, load_turns=1))
    with pytest.raises(RuntimeError, match="failed_recving"):
        turn(made, KVConnectorOutput(invalid_block_ids={3}))
    made.shutdown()


# Refused settings


def refused(config: Any, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config, (0, 33))
    return str(caught.value)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_connector_on_vllms_own_memory_is_refused(config: Any, is_part: bool) -> None:
    part: dict[str, Any] = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, part]},
    }
    config.kv_transfer_config = KVTransferConfig(**(several if is_part else part))
    assert "names SimpleCPUOffloadConnector, which uses the block pool" in refused(config)
