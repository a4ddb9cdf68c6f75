"""What the scheduler for vLLM reads and refuses before it meets a vLLM, on a machine that need not have one."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vajra_py.contract import Layer
from vajra_py.errors import ConfigError
from vajra_py.plugins import Registry, load_registry
from vajra_py.vllm.mechanism import RequestFacts, Submission, check_policies, make_mechanism
from vajra_py.vllm.plugin import TimeToRecord, abort_at_once, grant_time_to_record, is_own
from vajra_py.vllm.settings import Sizes, VajraOptions, experiment_of, fallback_of, vajra_options_of
from vajra_py.vllm.support import check_cache, check_options, check_version, policy_options

SIZES = Sizes("a-model", 16, 40, 8, 128, 256, prefix_caching=True)
DEFAULTS = SimpleNamespace()
"""vLLM's scheduler options when none is given."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def options_of(folder: Path, text: str) -> VajraOptions:
    (folder / "experiment.yaml").write_text("version: 1\n" + text)
    return VajraOptions(folder / "experiment.yaml")


def options(**given: Any) -> Any:
    """A `VllmConfig` of a plain model, but for what is given as `part__name`."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "runner_type": "generate",
            "supports_multimodal_inputs": False,
            "get_sliding_window": lambda: None,
            "is_hybrid": False,
            "is_encoder_decoder": False,
        },
        "cache_config": {"enable_prefix_caching": True},
        "parallel_config": {},
        "scheduler_config": {
            "max_num_scheduled_tokens": None,
            "max_num_batched_tokens": 64,
            "async_scheduling": False,
            "long_prefill_token_threshold": 0,
        },
    }
    whole: dict[str, Any] = {
        "speculative_config": None,
        "num_prefill_lookahead_tokens": 0,
        "lora_config": None,
        "kv_transfer_config": None,
    }
    for name, value in given.items():
        part, _, attribute = name.partition("__")
        if attribute:
            parts[part][attribute] = value
        else:
            whole[part] = value
    return SimpleNamespace(**whole, **{name: SimpleNamespace(**values) for name, values in parts.items()})


def speculative(**given: Any) -> Any:
    """A `SpeculativeConfig` with n-grams, but for what is given."""
    usual = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "max_num_new_slots_for_drafting": 0,
        "num_speculative_tokens_per_batch_size": None,
    }
    return SimpleNamespace(**usual | given)


def test_a_plain_model_is_taken() -> None:
    check_options(options())


def test_drafts_and_a_connector_are_taken_together() -> None:
    check_options(options(speculative_config=speculative(), kv_transfer_config=object()))


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"speculative_config": speculative(method="draft_model")}, "--speculative-config"),
        ({"speculative_config": speculative(max_num_new_slots_for_drafting=1)}, "--speculative-config"),
        ({"speculative_config": speculative(), "num_prefill_lookahead_tokens": 2}, "--speculative-config"),
        ({"speculative_config": speculative(), "num_hash_lookahead_tokens": 1}, "--speculative-config"),
        ({"ec_transfer_config": object()}, "--ec-transfer-config"),
        ({"model_config__runner_type": "pooling"}, "--runner"),
        ({"model_config__supports_multimodal_inputs": True}, "model"),
        ({"model_config__is_hybrid": True}, "--enable-prefix-caching"),
        ({"model_config__has_inner_state": True}, "--enable-prefix-caching"),
        (
            {"model_config__hf_text_config": SimpleNamespace(layer_types=["full_attention", "mamba"])},
            "--enable-prefix-caching",
        ),
        (
            {"model_config__hf_text_config": SimpleNamespace(layer_types=["linear_attention"])},
            "--enable-prefix-caching",
        ),
        ({"model_config__is_encoder_decoder": True}, "model"),
        ({"model_config__is_diffusion": True}, "model"),
        ({"model_config__enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"model_config__return_sampling_mask": True}, "--return-sampling-mask"),
        ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size"),
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"scheduler_config__max_num_scheduled_tokens": 65}, "--max-num-scheduled-tokens"),
    ],
)
def test_what_cannot_be_scheduled_is_one_line_with_a_way_out(given: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(options(**given))
    said = str(caught.value)
    assert said.startswith(f"{option}: ")
    assert said.endswith("Leave --scheduler-cls out to use vLLM's own scheduler.")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"model_config__get_sliding_window": lambda: 64}, "model: has a sliding window of 64 tokens"),
        ({"lora_config": object()}, "--enable-lora: "),
        ({"speculative_config": speculative()}, "--speculative-config: "),
        ({"kv_transfer_config": object()}, "--kv-transfer-config: "),
    ],
)
def test_what_the_scheduler_alone_takes_is_refused_where_only_workers_are_used(
    given: dict[str, Any], refusal: str
) -> None:
    check_options(options(**given))
    with pytest.raises(ConfigError, match=refusal):
        check_options(options(**given), has_core=False)


def test_parallelism_over_tensors_and_layers_of_full_attention_are_taken() -> None:
    layers = SimpleNamespace(layer_types=["full_attention", "attention"])
    check_options(options(parallel_config__tensor_parallel_size=2, model_config__hf_text_config=layers))


class FullAttentionSpec:
    sliding_window = None


class MambaSpec:
    pass


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([FullAttentionSpec(), MambaSpec()], "2 groups of KV blocks (FullAttentionSpec, MambaSpec)"),
        ([MambaSpec()], "another kind than full attention (MambaSpec)"),
        ([], "0 groups of KV blocks (none)"),
    ],
)
def test_a_cache_of_several_kinds_is_refused(specs: list[Any], said: str) -> None:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    with pytest.raises(ConfigError) as caught:
        check_cache(SimpleNamespace(kv_cache_groups=groups))
    assert said in str(caught.value)


def test_a_cache_of_full_attention_is_taken() -> None:
    check_cache(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())]))


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "main", ""])
def test_versions_whose_interface_is_not_known_are_refused_in_one_line(version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_version(version)
    assert str(caught.value) == f"vllm: has a version whose scheduler is not known here ({version}). 0.32, 0.33."


def test_options_are_those_that_were_changed() -> None:
    assert policy_options(SimpleNamespace(policy="fcfs", watermark=0.0)) == {}
    assert policy_options(SimpleNamespace(policy="priority", watermark=0.1)) == {"policy": "priority", "watermark": 0.1}


def test_without_a_file_vllms_algorithm_schedules_under_vllms_options(registry: Registry) -> None:
    given = SimpleNamespace(policy="priority", long_prefill_token_threshold=32, watermark=0.2)
    config = experiment_of(SIZES, VajraOptions(), given, registry)
    chosen = config.effective_replicasets["default"].scheduling.choice(Layer.REPLICA_SCHEDULER)
    assert chosen.policy == "vllm_v1"
    assert chosen.params["long_prefill_threshold_tokens"] == 32
    assert chosen.params["watermark_fraction"] == 0.2
    assert chosen.params["victim"] == "lowest_priority"
    assert config.effective_replicasets["default"].scheduling.choice(Layer.REQUEST_PRIORITIZER).policy == "priority"


def test_sizes_are_vllms_whatever_the_file_says(tmp_path: Path, registry: Registry) -> None:
    text = "preset: sarathi\nreplica: {max_batch_size: 3, memory: {num_blocks: 7, block_size: 64}}\n"
    replica = (
        experiment_of(SIZES, options_of(tmp_path, text), DEFAULTS, registry).effective_replicasets["default"].replica
    )
    assert (replica.max_batch_size, replica.max_batch_tokens, replica.max_model_len) == (8, 128, 256)
    assert (replica.memory.num_blocks, replica.memory.block_size) == (40, 16)
    assert replica.memory.prefix_cache.enabled


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("preset: sarathi\nsweep: {seed: [1, 2]}\n", "expected one system"),
        ("preset: sarathi\nreplications: 2\n", "expected one system"),
        ("preset: sarathi\nnum_replicas: 2\n", "one replica"),
        ("replicasets: {a: {preset: sarathi}}\n", "several replicasets"),
        ("preset: sarathi\nreplica: {memory: {host_blocks: 4}}\n", "host_blocks"),
        ("preset: sarathi\nreplica: {pipeline_stages: 2}\n", "pipeline_stages"),
        ("preset: sarathy\n", "sarathi"),
        ("preset: sarathi\nscheduling: {request_prioritizer: fcsf}\n", "fcfs"),
    ],
)
def test_a_file_that_no_vllm_can_follow_is_refused(tmp_path: Path, registry: Registry, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_policies(experiment_of(SIZES, options_of(tmp_path, text), DEFAULTS, registry), registry, 256)


def test_vllms_own_policy_beside_a_file_is_refused(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"--watermark: .* Set it in the experiment file"):
        experiment_of(SIZES, options_of(tmp_path, "preset: sarathi\n"), SimpleNamespace(watermark=0.5), registry)


def test_a_policy_that_wants_predictions_that_nobody_makes_is_refused_at_the_start(
    tmp_path: Path, registry: Registry
) -> None:
    text = "preset: sarathi\nscheduling: {request_prioritizer: edf}\n"
    with pytest.raises(ConfigError, match=r"backend\.vllm\.latency: is missing, and a policy needs"):
        check_policies(experiment_of(SIZES, options_of(tmp_path, text), DEFAULTS, registry), registry, 256)
    text += "backend: {vllm: {latency: {type: affine, base_s: 0.004, per_token_s: 0.0001}}}\n"
    check_policies(experiment_of(SIZES, options_of(tmp_path, text), DEFAULTS, registry), registry, 256)


def test_a_fallback_is_a_preset(tmp_path: Path, registry: Registry) -> None:
    text = "preset: sarathi\nbackend: {vllm: {fallback: %s}}\n"
    config = experiment_of(SIZES, options_of(tmp_path, text % "nano-vllm"), DEFAULTS, registry)
    found = fallback_of(config, registry)
    assert found is not None
    assert found[Layer.REPLICA_SCHEDULER].policy == "nano_vllm"
    with pytest.raises(ConfigError, match="nano-vllm"):
        fallback_of(experiment_of(SIZES, options_of(tmp_path, text % "nano-vlm"), DEFAULTS, registry), registry)
    assert (
        fallback_of(experiment_of(SIZES, options_of(tmp_path, "preset: sarathi\n"), DEFAULTS, registry), registry)
        is None
    )


@pytest.mark.parametrize("given", ["text", {"experimnt": "a"}, {"save_run": ""}, {"experiment": 3}])
def test_additional_config_that_is_not_understood_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"--additional-config vajra"):
        vajra_options_of({"vajra": given}, {})


def test_settings_of_others_in_additional_config_are_left_alone() -> None:
    assert vajra_options_of({"theirs": 1}, {}) == vajra_options_of(None, {}) == VajraOptions()


def test_its_own_classes_are_known_by_name_and_as_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Theirs", (), {"__module__": "elsewhere"})
    ours = type(
        "Ours", (type("Scheduler", (), {"__module__": "vajra_py.vllm.scheduler"}),), {"__module__": "elsewhere"}
    )
    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(Ours=ours, Theirs=theirs))
    assert is_own("vajra_py.vllm.Scheduler")
    assert is_own("elsewhere.Ours")
    assert is_own(ours)
    assert not is_own("elsewhere.Theirs")
    assert not is_own("elsewhere.Missing")
    assert not is_own(theirs)
    assert not is_own("vllm.v1.core.sched.scheduler.Scheduler")
    assert not is_own(None)


def test_a_recording_gets_time_to_end_and_requests_are_aborted_as_before() -> None:
    config = SimpleNamespace(shutdown_timeout=0, additional_config={"vajra": {"save_run": "monday"}})
    grant_time_to_record(config)
    sent = pickle.loads(pickle.dumps(config.shutdown_timeout))
    assert sent > 10
    scheduling = SimpleNamespace(shutdown_timeout=sent)
    abort_at_once(scheduling)
    assert scheduling.shutdown_timeout == 0


@pytest.mark.parametrize(("timeout", "additional"), [(7, {"vajra": {"save_run": "monday"}}), (0, {})])
def test_a_time_to_drain_is_the_users(timeout: int, additional: dict[str, Any]) -> None:
    config = SimpleNamespace(shutdown_timeout=timeout, additional_config=additional)
    grant_time_to_record(config)
    abort_at_once(config)
    assert config.shutdown_timeout == timeout
    assert not isinstance(config.shutdown_timeout, TimeToRecord)


def test_turns_end_the_last_step_before_they_form_the_next(tmp_path: Path, registry: Registry) -> None:
    """As vLLM's engine core calls: a step is asked for, executed elsewhere, and ends when the next one is asked for."""
    clock = iter(range(1000, 10**9, 1000))
    config = experiment_of(SIZES, options_of(tmp_path, "preset: sarathi\n"), DEFAULTS, registry)
    mechanism = make_mechanism(config, registry, lambda: next(clock), 256, 1)
    ended: list[tuple[str, str]] = []
    for index in range(3):
        facts = RequestFacts(request_id=f"r-{index}", num_prompt_tokens=20, max_tokens=3)
        mechanism.arrive(Submission(facts, 0.0, None, "", lambda one, why: ended.append((one.request_id, why.value))))
    plan = mechanism.step()
    assert plan is not None
    assert sorted(chunk.request.request_id for chunk in plan.chunks) == ["r-0", "r-1", "r-2"]
    mechanism.abort("r-1")
    mechanism.stop(plan.chunks[0].request)
    assert ended == []
    mechanism.step()
    assert sorted(ended) == [(plan.chunks[0].request.request_id, "stop"), ("r-1", "aborted")]
    assert mechanism.num_running == 1
    while mechanism.step() is not None:
        pass
    assert len(ended) == 3
    memory = mechanism.replica.memory
    assert memory.free_blocks == memory.num_blocks == 40
    mechanism.controller.check_conservation()
