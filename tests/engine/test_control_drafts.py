"""Drafts on the engine: the tokens are those of a run without them, and the decisions are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import FakeRunner, expected_output
from tests.engine.test_control_replay import SESSIONS, SINGLES, layers, run_it, settings
from vajra_py.config import config_from_mapping
from vajra_py.engine.build import Engine
from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.drafts import NgramIndex, NgramRules, may_have_drafts
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.runtime.records.draft_log import DRAFTS_FILE, read_drafts
from vajra_py.runtime.records.json_lines import read_rows

BATCHERS: list[Any] = [
    "vllm_v1",
    {"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}},
    {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.008}},
    {"policy": "preemptive", "params": {"chunk_size": 32}},
    "orca",
    "nano_vllm",
]
DRAFTS: list[dict[str, Any]] = [
    {"num_tokens": 3},
    {"num_tokens": 5, "rejected_blocks": "keep", "past_max_tokens": True, "lookahead_tokens": 5},
]


def repeats_itself(token_ids: Sequence[int]) -> int:
    """A token that mostly follows from the last one, so that n-grams come again, and now and then from all of them."""
    if len(token_ids) % 7 == 0:
        return int(sum((place + 1) * token for place, token in enumerate(token_ids)) % 11) + 8
    return 3 * token_ids[-1] % 11 + 8


@pytest.mark.parametrize("number", range(len(BATCHERS)))
def test_tokens_are_those_without_drafts_and_decisions_are_replayed(
    number: int, hollow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine.fake_runner.next_token", repeats_itself)
    made: list[EngineRun] = []
    chooser = ("round_robin", "pull")[number % 2]
    mapping = settings(
        hollow_model,
        layers("fcfs", chooser, BATCHERS[number]),
        {**(SESSIONS if number % 2 else SINGLES), "slo_classes": []},
        replica={"draft": DRAFTS[number % 2]},
        engine={"ngram": {"min_tokens": 1 + number % 2, "max_tokens": 3}},
        seed=number,
    )
    run = run_it(mapping, tmp_path / "run", made=made)
    report = replay(tmp_path / "run")
    assert report.difference is None
    requests = {one["request_id"]: one for one in run.requests().to_pylist()}
    assert sum(one["num_accepted_tokens"] for one in requests.values()) > 20
    assert sum(one["num_draft_tokens"] - one["num_accepted_tokens"] for one in requests.values()) > 20
    prompts, specs = made[0]._prompts, {spec.request_id: spec for spec in made[0]._run.workload}
    for row in read_rows(tmp_path / "run" / "outputs.jsonl.gz"):
        spec = specs[row["request_id"]]
        expected = expected_output(prompts.prompt(spec).token_ids, spec.num_output_tokens)
        assert row["token_ids"] == expected[: len(row["token_ids"])]
        assert row["reason"] == "aborted" or len(row["token_ids"]) == spec.num_output_tokens
    for row in read_drafts(tmp_path / "run" / DRAFTS_FILE):
        assert sum(row["accepted"]) == requests[row["request_id"]]["num_accepted_tokens"]
        assert max(row["proposed"]) <= DRAFTS[number % 2]["num_tokens"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vajra_py.engine.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


PARAMETERS = [
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.4, top_k=3, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.2),
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.0, min_tokens=9, stop_token_ids=(248, 335)),
    SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(248, 335)),
    SamplingParams(max_tokens=30, temperature=0.0, stop=("e", "x"), ignore_eos=True),
]


def test_a_real_model_gives_the_same_tokens(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vajra_py import LLM
    from vajra_py.runtime.requests.request import DraftedOutputs

    counted: list[tuple[int, int]] = []

    class Counting(DraftedOutputs):
        def add(self, requests: Any, num_drafts: Any, num_accepted: Any, num_new: int, tick: int) -> None:
            counted.extend(zip(num_drafts, num_accepted, strict=True))
            super().add(requests, num_drafts, num_accepted, num_new, tick)

    monkeypatch.setattr("vajra_py.runtime.serving.replica.DraftedOutputs", Counting)
    rng = np.random.default_rng(0)
    prompts = [(rng.integers(5, 60, size=6).tolist() * 5)[: int(rng.integers(10, 30))] for _ in range(6)]

    def outputs(draft: dict[str, Any]) -> tuple[list[tuple[Sequence[int], str]], list[float]]:
        memory = {"num_blocks": 40, "block_size": 8, "reservation": "incremental"}
        sizes = {"replica": {"max_batch_size": 6, "max_model_len": 160, "memory": memory, "draft": draft}}
        with LLM(tiny_model, sizes) as llm:
            asked = [(prompt, params) for params in PARAMETERS for prompt in prompts]
            found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        return [(one.token_ids, one.text) for one in found], [
            each.logprob for one in found for each in one.logprobs or ()
        ]

    plain, logprobs = outputs({})
    assert not any(proposed for proposed, _ in counted)
    drafted, drafted_logprobs = outputs({"num_tokens": 4})
    assert drafted == plain
    assert drafted_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert sum(accepted for _, accepted in counted) > 10
    assert sum(proposed - accepted for proposed, accepted in counted) > 10


def _drawn(count: int) -> int:
    """The output token with this number: it repeats, so that drafts are accepted, and now and then it does not."""
    return 8 + (count % 4 if count % 7 else count)


class _Counting(FakeRunner):
    """A runner whose tokens depend on the number of output tokens, as the random numbers of a sampler do."""

    def _sample(self, row: Any, token_ids: Sequence[int], start: int, samples: bool = True) -> int:
        token = super()._sample(row, token_ids, start, samples)
        if samples:
            row.last = token = _drawn(row.num_output)
        return token


def test_a_preempted_request_goes_on_at_the_right_place_of_its_random_stream(hollow_model: Path) -> None:
    from vajra_py import LLM

    memory = {"num_blocks": 12, "block_size": 8, "reservation": "incremental"}
    sizes = {"replica": {"max_model_len": 80, "memory": memory, "draft": {"num_tokens": 4}}}
    sizes["backend"] = {"engine": {"random_weights": True, "ngram": {"min_tokens": 1, "max_tokens": 3}}}
    with LLM(hollow_model, sizes, load=_Counting) as llm:
        outputs = llm.generate([[1, 2, number] for number in range(6)], SamplingParams(max_tokens=40, ignore_eos=True))
    assert sum(output.metrics.num_preemptions for output in outputs) > 3
    for output in outputs:
        assert output.token_ids == list(map(_drawn, range(1, 41)))


def test_what_is_looked_up() -> None:
    index = NgramIndex(NgramRules(min_tokens=2, max_tokens=3, most_drafts=4), [1, 2, 3, 4, 9, 2, 3, 5, 6])
    assert index.drafts() == []
    index.extend([2, 3])
    assert index.drafts() == [4, 9, 2, 3]  # behind the first "2 3"
    index.extend([5])
    assert index.drafts() == [6, 2, 3, 5]  # behind "2 3 5", which is longer than "3 5"
    assert len(index) == 12


def test_whose_tokens_can_be_verified_together() -> None:
    assert may_have_drafts(SamplingParams(temperature=0.9, top_p=0.8, seed=1, stop=("a",)))
    for params in (
        SamplingParams(presence_penalty=0.1),
        SamplingParams(allowed_token_ids=(1, 2)),
        SamplingParams(bad_words_token_ids=((1,),)),
        SamplingParams(logit_bias=((1, 2.0),)),
        SamplingParams(min_tokens=3),
        SamplingParams(logprobs=0),
    ):
        assert not may_have_drafts(params)


@pytest.mark.parametrize(("replica", "message"), [
    ({"pipeline_stages": 2}, "several pipeline stages"),
    ({"draft": {"num_tokens": 500}, "max_model_len": 200}, "no room for as many drafts"),
    ({"draft": {"num_tokens": 4, "max_tokens": 2}}, "max_tokens is below num_tokens"),
])  # fmt: skip
def test_what_is_refused(replica: dict[str, Any], message: str, hollow_model: Path) -> None:
    mapping = settings(hollow_model, layers("fcfs", "pull", "vllm_v1"), replica={"draft": {"num_tokens": 2}, **replica})

    def load() -> None:
        Engine.load(config_from_mapping(mapping), engine_services())

    with pytest.raises(ConfigError, match=message):
        load()


def engine_services() -> Any:
    from vajra_py.engine.build import EngineServices
    from vajra_py.latency import AffineModel
    from vajra_py.latency.services.output_length import NoLengths
    from vajra_py.plugins import load_registry
    from vajra_py.runtime.support.seeds import SeedTree

    def never(*_: Any) -> Any:
        raise AssertionError("it is loaded")

    latency = AffineModel(base_s=0.01, per_token_s=1e-4, num_stages=2)
    return EngineServices(load_registry(), latency, NoLengths(), SeedTree(0), never)
