"""What vLLM asks of a scheduler besides steps: refusals, errors, resets, counts."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.vllm.core import Core, RequestScript, make_scheduler, request_of, vllm_config
from vajra_py.errors import ConfigError
from vajra_py.vllm import Scheduler
from vajra_py.vllm.settings import EXPERIMENT_VARIABLE, vajra_options_of
from vajra_py.vllm.support import VERSIONS, check_version, installed_version


def script(index: int, prompt: int = 40, output: int = 12, arrives: int = 0, **given: Any) -> RequestScript:
    rng = random.Random(index)
    tokens = tuple(rng.randrange(500) for _ in range(prompt))
    return RequestScript(f"r-{index}", tokens, output, arrives, **given)


def core_of(model: str, num_blocks: int = 101, *, is_async: bool = False, **options: Any) -> Core:
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    config = vllm_config(model, is_async=is_async, **sizes, **options)
    return Core(make_scheduler(Scheduler, config, num_blocks, 4), is_async)


def test_after_a_reset_of_the_cache_everything_is_computed_again(tiny_model: str) -> None:
    core = core_of(tiny_model)
    for index in range(4):
        core.add(script(index), 4, True)
    for _ in range(6):
        core.step()
    assert not core.scheduler.reset_prefix_cache()
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    while core.scheduler.has_requests():
        core.step()
    assert set(core.reasons.values()) == {"length"}
    assert [len(tokens) for tokens in core.tokens.values()] == [12] * 4
    assert core.steps[6].computed == dict.fromkeys(core.steps[6].scheduled, 0)
    assert core.scheduler.get_kv_cache_usage() == 0.0


def test_a_pause_forms_no_steps(tiny_model: str) -> None:
    core = core_of(tiny_model)
    core.add(script(0), 4, True)
    core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not core.scheduler.has_unfinished_requests()
    assert core.scheduler.schedule().total_num_scheduled_tokens == 0
    core.scheduler.update_from_output(core.steps and _nothing(), _empty())
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    while core.scheduler.has_requests():
        core.step()
    assert core.reasons == {"r-0": "length"}


def _nothing() -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def _empty() -> Any:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    return EMPTY_MODEL_RUNNER_OUTPUT


def test_a_request_that_never_fits_is_told_so(tiny_model: str) -> None:
    core = core_of(tiny_model, num_blocks=21)
    core.add(script(0, prompt=60, output=100), 4, True)
    core.add(script(1, prompt=20, output=10), 4, True)
    while core.scheduler.has_requests():
        core.step()
    assert core.reasons == {"r-0": "abort", "r-1": "length"}


@pytest.mark.parametrize(
    ("options", "word"),
    [({"data_parallel_size": 2}, "data-parallel"), ({"pipeline_parallel_size": 2}, "pipeline-parallel")],
)
def test_what_cannot_be_scheduled_is_refused_with_the_reason(
    tiny_model: str, options: dict[str, int], word: str
) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    for name, value in options.items():
        setattr(config.parallel_config, name, value)
    with pytest.raises(ConfigError, match=word) as caught:
        make_scheduler(Scheduler, config, 20, 4)
    assert "vLLM's own scheduler" in str(caught.value)


def test_every_method_of_the_interface_is_there_and_takes_its_arguments() -> None:
    """Of this vLLM, whichever it is: an abstract method more would be an error when vLLM makes its scheduler."""
    assert check_version(installed_version()) in VERSIONS
    assert not Scheduler.__abstractmethods__
    for name, theirs in vars(SchedulerInterface).items():
        if not inspect.isfunction(theirs):
            continue
        ours = inspect.signature(getattr(Scheduler, name)).parameters
        assert set(inspect.signature(theirs).parameters) <= set(ours), name


def test_a_request_is_there_until_its_end(tiny_model: str) -> None:
    core = core_of(tiny_model)
    core.add(script(0), 4, True)
    assert core.scheduler.has_request("r-0")
    while core.scheduler.has_requests():
        core.step()
    assert not core.scheduler.has_request("r-0")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_pause_for_new_requests_lets_the_others_finish(tiny_model: str, is_async: bool) -> None:
    core = core_of(tiny_model, num_blocks=26, is_async=is_async)  # room for two of 14 blocks at most
    for index in range(4):
        core.add(script(index), 4, True)
    for _ in range(6):
        core.step()
    num_running, num_waiting = core.scheduler.get_request_counts()
    assert num_running
    assert num_waiting
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    core.add(script(4), 4, True)
    while core.scheduler.has_requests() or core.queue:
        core.step()
    finished = [name for name, reason in core.reasons.items() if reason == "length"]
    assert 0 < len(finished) < 4
    assert not core.scheduler.has_unfinished_requests()
    core.abort(next(name for name in ("r-0", "r-1", "r-2", "r-3") if name not in finished))
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert core.scheduler.has_unfinished_requests()
    while core.scheduler.has_requests() or core.queue:
        core.step()
    assert sorted(core.reasons.values()) == ["abort", "length", "length", "length", "length"]
    assert all(len(core.tokens[name]) == 12 for name, reason in core.reasons.items() if reason == "length")
    assert core.scheduler.get_kv_cache_usage() == 0.0


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole_after_a_preemption(tiny_model: str) -> None:
    core = core_of(tiny_model, num_blocks=31)
    prompts = [replace(script(index, prompt=40, output=40), prompt_logprobs=1) for index in range(2)]
    for one in prompts:
        core.add(one, 4, True)
    preempted: set[str] = set()
    resumed_at: list[int] = []
    while core.scheduler.has_requests():
        core.step()
        step = core.steps[-1]
        resumed_at += [step.computed[name] for name in preempted & step.scheduled.keys()]
        preempted = (preempted - step.scheduled.keys()) | set(step.preempted)
    assert resumed_at
    assert resumed_at[0] == 0
    assert set(core.reasons.values()) == {"length"}


def test_other_versions_are_refused_in_one_line() -> None:
    assert check_version("0.32.0") == (0, 32)
    assert check_version("0.33.1.dev3+cpu") == (0, 33)
    with pytest.raises(ConfigError) as caught:
        check_version("0.31.2")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("num_kv_heads", "are_unlike"),
    [((2, 2), False), ((2, 2), True), ((2, 4), True)],
    ids=["alike", "wrapped", "unlike"],
)
def test_a_block_holds_the_kv_of_every_layer_once(
    tiny_model: str, num_kv_heads: tuple[int, ...], are_unlike: bool
) -> None:
    specs = {
        f"layer-{index}": kv.FullAttentionSpec(block_size=4, num_kv_heads=heads, head_size=32, dtype=torch.float32)
        for index, heads in enumerate(num_kv_heads)
    }
    spec = kv.UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs) if are_unlike else specs["layer-0"]
    cache = kv.KVCacheConfig(101, [], [kv.KVCacheGroupSpec(list(specs), spec)])
    scheduler = make_scheduler(Scheduler, vllm_config(tiny_model, max_model_len=256), 101, 4, cache=cache)
    keys_and_values, bytes_per_number = 2, 4
    expected = keys_and_values * sum(num_kv_heads) * 32 * bytes_per_number * 4
    assert scheduler.mechanism.replica.limits.bytes_per_block == expected


@pytest.mark.parametrize("second_runner", [False, True], ids=["first runner", "second runner"])
def test_blocks_are_cleared_before_they_are_used_where_precisions_are_mixed(
    tiny_model: str, second_runner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {
        str(dtype): kv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=32, dtype=dtype)
        for dtype in (torch.float32, torch.float16)
    }
    group = kv.KVCacheGroupSpec(list(specs), kv.UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs))
    config = vllm_config(tiny_model, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=16)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(second_runner)))
    core = Core(make_scheduler(Scheduler, config, 31, 4, cache=kv.KVCacheConfig(31, [], [group])))
    execute, untouched = core.execute, set(range(1, 31))

    def checked(output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        tables = [(one.block_ids, one.num_computed_tokens // 4) for one in output.scheduled_new_reqs]
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tables.append((blocks or ([],), computed // 4 if name in cached.resumed_req_ids else 0))
        taken = [block for (table,), num_shared in tables for block in table[num_shared:]]
        assert sorted(output.new_block_ids_to_zero or []) == sorted(taken)
        untouched.difference_update(taken)
        return execute(output)

    core.execute = checked  # type: ignore[method-assign]
    twins = [replace(script(index // 2, prompt=21, output=30), name=f"r-{index}") for index in range(6)]
    core.run(twins, 4, True)  # the core checks what workers read
    assert any(one.preempted for one in core.steps)
    assert not untouched
    assert set(core.reasons.values()) == {"length"}


def test_the_experiment_is_named_by_option_or_environment() -> None:
    assert vajra_options_of({"vajra": {"experiment": "a.yaml"}}, {EXPERIMENT_VARIABLE: "b.yaml"}).experiment is not None
    assert str(vajra_options_of({}, {EXPERIMENT_VARIABLE: "b.yaml"}).experiment) == "b.yaml"
    assert vajra_options_of({}, {}).experiment is None
    with pytest.raises(ConfigError, match="experiment"):
        vajra_options_of({"vajra": {"experimnt": "a.yaml"}}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vajra_expires_after_s", 1e308),
        ("vajra_deadline_s", 9_000_001),
        ("vajra_ttft_slo_s", 1e-9),
        ("vajra_num_program_calls", "1e30"),
    ],
)
def test_a_number_beyond_the_limits_ends_its_request_alone(tiny_model: str, name: str, value: Any) -> None:
    core = core_of(tiny_model)
    core.add(script(0), 4, True)
    request = request_of(script(1), 4, True)
    request.sampling_params.extra_args = {name: value}
    core.take_in(script(1), request)
    while core.scheduler.has_requests():
        core.step()
    assert core.reasons == {"r-0": "length", "r-1": "error"}


def test_requests_that_come_before_the_first_step_wait_for_a_time_above_zero(tiny_model: str) -> None:
    core = core_of(tiny_model)
    now = iter(range(10**9, 10**12, 10**9))
    core.scheduler.mechanism._clock = lambda: next(now)
    for index in range(3):
        core.add(script(index), 4, True)
    core.step()
    own = core.scheduler._records["r-0"].own
    assert (
        own.admitted_at == 2.0
    )  # the second reading of the clock, by the step: the first request has begun a turn at 1 s


def test_a_name_may_be_used_again_while_the_step_of_its_aborted_request_is_in_flight(tiny_model: str) -> None:
    core = core_of(tiny_model, is_async=True)
    core.add(script(0, output=40), 4, True)
    for _ in range(5):
        core.step()
    core.scheduler.finish_requests("r-0", RequestStatus.FINISHED_ABORTED)
    core.tokens.clear()
    core.add(script(0, output=6), 4, True)
    while core.scheduler.has_requests() or core.queue:
        core.step()
    assert core.reasons["r-0"] == "length"


class Events(Core):
    """A core that collects the events of outputs."""

    happened: list[tuple[int, str, list[str]]]

    def update(self, output: Any, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                kinds = [event.type.name for event in one.events or ()]
                if kinds:
                    self.happened.append((len(self.steps), one.request_id, kinds))


def test_events_are_sent_with_the_outputs_with_which_vllm_sends_them(tiny_model: str) -> None:
    happened = []
    for cls in (VllmScheduler, Scheduler):
        config = vllm_config(
            tiny_model, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=16, enable_prefix_caching=False
        )
        core = Events(make_scheduler(cls, config, 26, 4, log_stats=True))
        core.happened = []
        for index in range(3):
            core.add(script(index, 20, 30), 4, False)
        while core.scheduler.has_requests():
            core.step()
        happened.append(core.happened)
    assert not core.scheduler._with_events
    assert happened[0] == happened[1]
    assert any("PREEMPTED" in kinds for _, _, kinds in happened[1])


def test_a_reset_clears_the_hit_rate_that_is_logged(tiny_model: str) -> None:
    config = vllm_config(tiny_model, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=16)
    scheduler = make_scheduler(Scheduler, config, 101, 4, log_stats=True)
    assert scheduler.reset_prefix_cache()
    assert scheduler.make_stats().prefix_cache_stats.reset
    assert not scheduler.make_stats().prefix_cache_stats.reset
