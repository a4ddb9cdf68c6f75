"""Programs, keys by group, retention, pins and wake-ups under `--scheduler-cls`, on a model of vLLM's workers."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from tests.vllm.core import Core, RequestScript, request_of
from tests.vllm.plugins import install
from tests.vllm.test_vllm_interface import core_of as plain_core_of
from tests.vllm.test_vllm_recording import core_of, end
from vajra_py.experiment.runs.replay import replay
from vajra_py.plugins import Registry, build_registry

TOLD = '''
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicySpec, hookimpl

TOLD = []


class Told:
    """Order of arrival; notes ends of programs, and wakes right after each arrival."""

    key_motion = KeyMotion.STATIC

    def __init__(self, context):
        self.wake = context.wake

    def key(self, request, now):
        program = request.program
        TOLD.append(("asked", request.request_id, None if program is None else (program.program_id, program.num_ended)))
        return 0.0

    def on_arrivals(self, requests, now):
        for request in requests:
            self.wake.at(now + 1e-6, request.request_id)

    def on_wake(self, key, now):
        TOLD.append(("wakes", key))

    def on_program_end(self, program, now):
        TOLD.append(("ended", program.program_id, program.num_calls, program.end_reason.value))


@hookimpl
def vajra_policies():
    return [PolicySpec("told", Layer.REQUEST_PRIORITIZER, PolicyConfig, lambda config, context: Told(context), "Notes.")]
'''
BLOCK = 4


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    install(tmp_path, "told-policies", "[vajra]\ntold_policies = told_policies\n", TOLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "told_policies", raising=False)
    found = build_registry(metadata.entry_points(group="vajra"))
    monkeypatch.setattr("vajra_py.vllm.scheduler.load_registry", lambda: found)
    return found


def scheduled(core: Core, name: str, prompt: tuple[int, ...], *, session: str | None = None, **facts: Any) -> int:
    """Serve one request to its end; return the tokens that were in the cache when it was first scheduled."""
    script = RequestScript(name, prompt, 3, 0)
    plain = request_of(script, BLOCK, True)
    params = SamplingParams(
        max_tokens=3, temperature=0.0, extra_args={f"vajra_{key}": value for key, value in facts.items()}
    )
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    request = Request(
        name, list(prompt), params, None, arrival_time=plain.arrival_time, session_id=session, block_hasher=hasher
    )
    before = len(core.steps)
    core.take_in(script, request)
    while core.scheduler.has_unfinished_requests() or core.queue:
        core.step()
    assert core.reasons[name] == "length"
    return next(step.computed[name] for step in core.steps[before:] if name in step.computed)


def text(number: int, num_blocks: int) -> tuple[int, ...]:
    """Return a prompt of so many full blocks and a token, unlike those of other numbers."""
    return tuple(1 + (number * 7919 + at) % 480 for at in range(num_blocks * BLOCK + 1))


def keeping(retention: str) -> str:
    return f"preset: vllm-v1\nscheduling: {{retention: {retention}}}"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("retention", "hit"), [("lru", 0), ("lfu", 8), ("{policy: session_pin, params: {pin_s: 3600}}", 8)]
)
def test_a_retention_policy_decides_what_is_found_again(
    tiny_model: str, tmp_path: Path, retention: str, hit: int, is_async: bool
) -> None:
    core = core_of(tiny_model, tmp_path, keeping(retention), is_async=is_async, blocks=21)
    for name in ("r-0", "r-1"):  # used twice, by a session
        scheduled(core, name, text(0, 8), session="mine")
    for index in range(2, 6):
        scheduled(core, f"r-{index}", text(index, 7))
    assert scheduled(core, "r-6", text(0, 8), session="mine") == hit * BLOCK
    end(core)
    assert replay(tmp_path / "run").difference is None


def test_pins_that_leave_no_room_end_and_nobody_waits_for_ever(tiny_model: str, tmp_path: Path) -> None:
    pins = keeping("{policy: session_pin, params: {pin_s: 3600}}")
    memory = "replica: {memory: {prefix_cache: {max_pinned_fraction: 1.0}}}"
    core = core_of(tiny_model, tmp_path, f"{pins}\n{memory}", blocks=21)
    for index in range(4):
        scheduled(core, f"r-{index}", text(index, 9), session=f"s-{index}")
    assert scheduled(core, "r-9", text(9, 17)) == 0
    end(core)
    assert replay(tmp_path / "run").difference is None


def test_a_program_of_no_calls_is_refused(tiny_model: str) -> None:
    core = plain_core_of(tiny_model)
    params = SamplingParams(max_tokens=3, extra_args={"vajra_program_id": "p", "vajra_num_program_calls": 0})
    core.scheduler.add_request(Request("r-0", [1, 2], params, None))
    while core.scheduler.has_requests():
        core.step()
    assert core.reasons == {"r-0": "error"}


def test_programs_end_and_policies_wake(tiny_model: str, tmp_path: Path, registry: Registry) -> None:
    core = core_of(tiny_model, tmp_path, "preset: vllm-v1\nscheduling: {request_prioritizer: told}")
    scheduled(core, "r-0", text(0, 2), program_id="p")
    scheduled(core, "r-1", text(1, 2), program_id="q", num_program_calls=1)
    scheduled(core, "r-2", text(2, 2), program_id="p", is_last_call=True)
    scheduled(core, "r-3", text(3, 2))
    told = list(sys.modules["told_policies"].TOLD)
    end(core)
    asked = {what[1]: what[2] for what in told if what[0] == "asked"}
    assert asked == {"r-0": ("p", 0), "r-1": ("q", 0), "r-2": ("p", 1), "r-3": None}
    assert [what[1:] for what in told if what[0] == "ended"] == [("q", 1, "all calls"), ("p", 2, "last call")]
    assert {what[1] for what in told if what[0] == "wakes"} >= {"r-0", "r-1", "r-2"}
    assert replay(tmp_path / "run", registry).difference is None


@pytest.mark.parametrize(("prioritizer", "is_first"), [("vtc", True), ("fcfs", False)])
def test_a_counter_moves_all_requests_of_its_group(
    tiny_model: str, tmp_path: Path, prioritizer: str, is_first: bool
) -> None:
    core = core_of(tiny_model, tmp_path, f"preset: vllm-v1\nscheduling: {{request_prioritizer: {prioritizer}}}")
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    for index in range(40):  # of a tenant that sends much, then one of another
        tenant = "many" if index < 39 else "one"
        script = RequestScript(f"r-{index}", text(index, 2), 3, 0)
        params = SamplingParams(max_tokens=3, temperature=0.0, extra_args={"vajra_tenant": tenant})
        core.take_in(script, Request(script.name, list(script.prompt), params, None, block_hasher=hasher))
    while core.scheduler.has_unfinished_requests():
        core.step()
    place = list(core.reasons).index("r-39")
    assert (place < 10) is is_first
    end(core)
    assert replay(tmp_path / "run").difference is None
