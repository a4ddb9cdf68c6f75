"""Drafts under `--speculative-config`: decisions and messages beside vLLM's own scheduler, policies that say how many, recordings."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from tests.vllm.core import EOS, Core, RequestScript, make_scheduler, request_of, vllm_config
from tests.vllm.fuzz import RequestScript as Script
from tests.vllm.fuzz import Session, compare, compare_in, play, propose
from tests.vllm.test_vllm_fuzz import PLAIN, cached, message, new, runner
from tests.vllm.test_vllm_recording import LATENCY, fuzzed
from tests.vllm.worker_model import FirstRunner, WorkerFault
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.draft_log import DRAFTS_FILE, read_drafts
from vajra_py.vllm import Scheduler

MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@MODES
@pytest.mark.parametrize("first", range(5_000_000, 5_000_016, 8))
def test_a_session_with_drafts_is_vllms_and_its_messages_are_carried_out(
    tiny_model: str, first: int, is_async: bool
) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + 8):
        happened += compared(tiny_model, seed, is_async)
    assert happened["accepted"] > 200
    assert happened["drafted"] > happened["accepted"] + 200
    assert (happened["exact"] > 0) is is_async


@MODES
def test_drafts_of_this_run_alone(tiny_model: str, is_async: bool) -> None:
    """Other seeds each time; a failure names its own."""
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + 4):
        compared(tiny_model, seed, is_async)


def compared(tiny_model: str, seed: int, is_async: bool) -> Counter[str]:
    """Counts of a session that is the same under both schedulers."""
    found, counts = compare(tiny_model, seed, is_async=is_async, kind="drafts")
    assert found is None, f"make vllm-fuzz RUNS=drafts/{'async' if is_async else 'sync'} SEED={seed} COUNT=1: {found}"
    return counts


def session(scripts: list[Script], num_drafts: int, **options: Any) -> Session:
    given = PLAIN | options
    return Session(0, 4, 60, given, scripts, [], is_async=False, second_runner=False, num_drafts=num_drafts)


def test_a_request_that_one_token_is_left_of_has_places_for_drafts_as_in_vllm(tiny_model: str) -> None:
    prompt = tuple(range(100, 109))  # two blocks and a token: a second request with it has one token to compute
    scripts = [Script(f"r{index}", prompt, 12, 4 * index, 1.0 * index) for index in range(2)]
    given = session(scripts, 3)
    found, counts = compare_in(tiny_model, given)
    assert found is None
    assert counts["cached"] == 1
    ours = play(Scheduler, tiny_model, given)
    (first,) = (step for step in ours.steps if step.computed.get("r1") == 8)
    assert first.drafts["r1"] == [-1, -1, -1]
    assert first.scheduled["r1"] == 4


def test_what_vllm_never_admits_for_want_of_budget_is_computed_here(tiny_model: str) -> None:
    prompt = tuple(range(100, 109))
    scripts = [Script("r0", prompt, 4, 0, 0.0), Script("r1", prompt, 4, 30, 1.0)]
    given = session(scripts, 5, max_num_batched_tokens=4, max_num_seqs=4)
    assert play(VllmScheduler, tiny_model, given).is_endless
    ours = play(Scheduler, tiny_model, given)
    assert ours.reasons.keys() == {"r0", "r1"}
    assert len(ours.tokens["r1"]) == 4


class DraftingCore(Core):
    """A core whose workers propose up to four tokens after each step."""

    def propose(self, result: Any) -> None:
        propose(self, result, 4)


def core_of(
    model: str, folder: Path, text: str, *, is_async: bool = False, blocks: int = 61, **options: Any
) -> DraftingCore:
    folder.mkdir(exist_ok=True)
    (folder / "experiment.yaml").write_text(f"version: 1\n{text}\n")
    wanted = {"experiment": str(folder / "experiment.yaml"), "save_run": str(folder / "run")}
    config = vllm_config(
        model,
        is_async=is_async,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        additional_config={"vajra": wanted},
        **options,
    )
    return DraftingCore(make_scheduler(Scheduler, config, blocks, 4), is_async)


RECORDED = {
    "vllm-v1": "preset: vllm-v1",
    "lrs": f"scheduling: {{request_prioritizer: lrs, replicaset_scheduler: pull, replica_scheduler: nano_vllm}}\n{LATENCY}",
    "adaserve": f"scheduling: {{preset: vllm-v1, replica_scheduler: {{policy: adaserve, params: {{budget_tokens: 24}}}}}}\n{LATENCY}",
}


@pytest.mark.parametrize(("is_async", "seed"), [(False, 3), (True, 3), (True, 4)])
@pytest.mark.parametrize("name", RECORDED)
def test_a_session_with_drafts_is_recorded_and_replayed(
    tiny_model: str, tmp_path: Path, name: str, is_async: bool, seed: int
) -> None:
    core = core_of(tiny_model, tmp_path, RECORDED[name], is_async=is_async, blocks=61 if seed == 3 else 41)
    scripts = fuzzed(random.Random(seed), 24)
    core.run(scripts, 4, True)
    core.scheduler.schedule()
    core.scheduler.shutdown()
    assert core.scheduler.mechanism.fault is None
    for script in scripts:
        expected = [core.token(script.name, place) for place in range(script.max_tokens)]
        if EOS in expected:
            expected = expected[: expected.index(EOS) + 1]
        found = core.tokens.get(script.name, [])
        assert found == expected[: len(found)]
        assert script.aborts is not None or found == expected
    assert replay(tmp_path / "run").difference is None
    rows = list(read_drafts(tmp_path / "run" / DRAFTS_FILE))
    assert sum(map(sum, (row["accepted"] for row in rows))) > 50
    run = RunData.load(tmp_path / "run").requests()
    assert sum(run["num_accepted_tokens"].to_pylist()) > 50


def test_a_policy_says_how_many_drafts_a_request_has(tiny_model: str, tmp_path: Path) -> None:
    """`adaserve` has a budget of tokens for decodes and their drafts."""
    counts = []
    for name in ("vllm-v1", "adaserve"):
        core = core_of(tiny_model, tmp_path / name, RECORDED[name].replace("24", "12"))
        prompts = [tuple(range(20 * index, 20 * index + 5)) for index in range(4)]
        core.run([RequestScript(f"r-{index}", prompt, 40, 0) for index, prompt in enumerate(prompts)], 4, True)
        core.scheduler.shutdown()
        decodes = [step for step in core.steps if step.drafts and min(step.computed.values()) >= 5]
        counts.append(max(sum(step.scheduled.values()) for step in decodes))
        assert {len(tokens) for tokens in core.tokens.values()} == {40}
    assert counts[0] > 12
    assert counts[1] <= 12


# The workers' model detects the errors that it is meant to detect


def test_kv_of_a_rejected_draft_is_not_read() -> None:
    worker = runner(FirstRunner, a=[1, 2, 3])
    worker.execute(message(scheduled_new_reqs=[new("a", [1, 2, 3], [1, 2])], num_scheduled_tokens={"a": 3}))
    told = cached("a", 3, 1)
    given = {"num_scheduled_tokens": {"a": 3}, "scheduled_spec_decode_tokens": {"a": [101, 5]}}
    assert worker.execute(message(scheduled_cached_reqs=told, **given)) == {"a": [101, 102]}
    worker.rows["a"].tokens.append(103)  # type: ignore[attr-defined]
    worker.requests["a"].output.append(103)  # type: ignore[attr-defined]
    behind = message(scheduled_cached_reqs=cached("a", 6, 4), num_scheduled_tokens={"a": 1})
    with pytest.raises(WorkerFault, match="another content"):  # token 5 was not the one that was drafted
        worker.execute(behind)


def test_drafts_behind_a_part_of_a_prompt_are_noticed() -> None:
    worker = runner(FirstRunner, a=[1, 2, 3])
    first = new("a", [1, 2, 3], [1])
    given = {"num_scheduled_tokens": {"a": 3}, "scheduled_spec_decode_tokens": {"a": [7]}}
    with pytest.raises(WorkerFault, match="behind a part"):
        worker.execute(message(scheduled_new_reqs=[first], **given))


class NoDrafts:
    """A grammar manager under which no draft is allowed."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def grammar_init(self, request: Request) -> None:
        request.structured_output_request.grammar = object()

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        self.asked.append(request.request_id)
        return []

    def accept_tokens(self, *_: Any) -> bool:
        return True

    def grammar_bitmask(self, *_: Any) -> None:
        return None


def test_drafts_are_checked_by_their_grammar_while_another_request_is_computed_again(tiny_model: str) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = vllm_config(
        tiny_model,
        max_model_len=512,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    grammars = NoDrafts()
    scheduler = make_scheduler(Scheduler, config, 64, 16, grammars=grammars)
    for name, length in (("g-0", 3), ("p-1", 100), ("q-2", 4)):
        request = request_of(RequestScript(name, tuple(range(10, 10 + length)), 60, 0), 16, False)
        if name == "g-0":
            format_ = StructuredOutputsParams(json_object=True)
            request.sampling_params.structured_outputs = format_
            request.structured_output_request = StructuredOutputRequest(format_)
        scheduler.add_request(request)
        if name == "g-0":
            grammars.grammar_init(request)
    for step in range(22):
        if step == 12:
            scheduler.finish_requests("q-2", RequestStatus.FINISHED_ABORTED)
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        assert "g-0" not in output.scheduled_spec_decode_tokens
        sampled = [[] if scheduler._records[name].own.num_remaining_tokens > 0 else [300] for name in names]
        scheduler.update_from_output(
            output, ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)
        )
        scheduler.update_draft_token_ids(DraftTokenIds(names, [[1, 2, 3] if one else [] for one in sampled]))
    assert "g-0" in grammars.asked
