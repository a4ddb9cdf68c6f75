"""Drafts under asynchronous scheduling: steps are formed before it is known which drafts of the last one are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds

from tests.vllm.fuzz import RequestScript, Session, compare_in, draft_session_of, play
from tests.vllm.plugins import breaking
from tests.vllm.test_vllm_draft_sessions import DraftingCore, core_of
from tests.vllm.test_vllm_fuzz import PLAIN, cached, message, new, runner
from tests.vllm.test_vllm_interface import script
from tests.vllm.worker_model import FirstRunner, Runner, SecondRunner, WorkerFault
from vajra_py.experiment.runs.replay import replay
from vajra_py.vllm import Scheduler


def test_steps_that_are_compared_one_by_one_have_preemptions_grammars_and_both_runners() -> None:
    exact = [one for one in (draft_session_of(seed, is_async=True) for seed in range(200)) if one.is_exact]
    assert {one.second_runner for one in exact} == {False, True}
    assert any(each.grammar for one in exact for each in one.scripts)
    assert sum(one.num_blocks * one.block_size < 100 for one in exact) > 20


def test_a_step_has_places_behind_drafts_that_were_rejected(tiny_model: str) -> None:
    one = RequestScript("r", tuple(range(100, 109)), 30, 0, 0.0, ends_at=20)
    given = Session(0, 4, 60, PLAIN, [one], [], is_async=True, second_runner=False, num_drafts=3, is_exact=True)
    found, counts = compare_in(tiny_model, given)
    assert found is None
    ours = play(Scheduler, tiny_model, given)
    decodes = [step for step in ours.steps if step.drafts]
    assert {step.scheduled["r"] for step in decodes} == {4}
    assert all(step.drafts["r"] == [-1, -1, -1] for step in decodes)
    assert decodes[1].computed["r"] == 9 + 4  # as if all had been accepted
    assert 0 < counts["accepted"] < counts["drafted"]


def test_tokens_that_a_grammar_does_not_allow_are_places_without_a_token(tiny_model: str, tmp_path: Path) -> None:
    core = core_of(tiny_model, tmp_path, "preset: vllm-v1", is_async=True)
    core.add(script(0, output=40), 4, True)
    core.step()
    core.step()
    core.step()
    output = core.queue[0][0]
    assert output.scheduled_spec_decode_tokens == {"r-0": [-1] * 4}
    core.scheduler._grammars.allowed_drafts = lambda request, tokens: tokens[:2]
    core.scheduler.update_draft_token_ids_in_output(DraftTokenIds(["r-0", "another"], [[7, 8, 9, 10, 11], [1]]), output)
    assert output.scheduled_spec_decode_tokens == {"r-0": [7, 8, -1, -1]}
    assert output.num_invalid_spec_tokens == {"r-0": 2}
    core.scheduler.shutdown()


def test_a_fallback_a_reset_and_a_pause_are_replayed(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, registry = breaking(tmp_path, monkeypatch)
    core = core_of(tiny_model, tmp_path, text, is_async=True, blocks=41)
    for index in range(6):
        core.add(script(index, output=60), 4, True)
    run(core, 14)
    assert core.scheduler._fallback is None
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    run(core, 3)
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run(core, 4)
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    while core.scheduler.has_requests() or core.queue:
        core.step()
    core.scheduler.schedule()
    core.scheduler.shutdown()
    assert core.tokens == {f"r-{index}": [core.token(f"r-{index}", at) for at in range(60)] for index in range(6)}
    assert replay(tmp_path / "run", registry).difference is None


def run(core: DraftingCore, num_steps: int) -> None:
    for _ in range(num_steps):
        core.step()


# The workers' model detects the errors that it is meant to detect


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
def test_a_message_that_takes_rejected_drafts_off_too_early_is_noticed(kind: type[Runner]) -> None:
    def step(worker: Runner, computed: int, output: int) -> dict[str, list[int]]:
        told: dict[str, Any] = {"scheduled_cached_reqs": cached("a", computed, output)}
        return worker.execute(
            message(num_scheduled_tokens={"a": 3}, scheduled_spec_decode_tokens={"a": [-1, -1]}, **told)
        )

    for told in ((6, 4), (4, 2)):
        worker = runner(kind, is_async=True, a=[1, 2, 3])
        worker.execute(message(scheduled_new_reqs=[new("a", [1, 2, 3], [1, 2])], num_scheduled_tokens={"a": 3}))
        worker.propose({"a": [101, 5]})
        assert step(worker, 3, 1) == {"a": [101, 102]}  # one of two is accepted
        worker.propose({"a": [103, 104]})
        if told == (6, 4):
            assert step(worker, *told) == {"a": [103, 104, 105]}
        else:
            with pytest.raises(WorkerFault):
                step(worker, *told)
