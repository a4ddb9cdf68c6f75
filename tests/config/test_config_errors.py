from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.config import load_config
from vajra_py.config.places import Entries, Items, Place, plain
from vajra_py.config.yaml_file import parse_yaml
from vajra_py.errors import ConfigError
from vajra_py.plugins import Registry


def complaints(path: str, registry: Registry, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, registry)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


BAD = """\
version: 2
seed: -1
scheduling:
  request_prioritizer: {policy: lsr, params: {deadline_multiplier: 2}}
  replicaset_scheduler: dynamic_chunk
  replica_scheduler:
    policy: dynamic_chunk
    params:
      target_batch_time_s: 0
      chunk: 3
num_replica: 4
replica:
  max_batch_size: true
  memory:
    prefix_cache: {publish: later}
    watermark_fraction: 2
  kv_parallel: {groups: 2}
workload: {type: synthetic, rate: fast, path: here}
backend:
  simulator:
    latency: {type: constnt}
    drain: 1
observers: [watsh, {type: watch, every_s: 0}]
output: runs
"""

EXPECTED = """\
exp.yaml:1: version: is not known (got 2). Allowed: 1.
exp.yaml:2: seed: must be at least 0 (got -1).
exp.yaml:4: scheduling.request_prioritizer.policy: no installed package offers a request prioritizer of that name (got 'lsr'). Did you mean 'lrs'? Allowed: crashing, fcfs, lars, lrs.
exp.yaml:5: scheduling.replicaset_scheduler.policy: no installed package offers a replicaset scheduler of that name; it is one for replica_scheduler (got 'dynamic_chunk'). Allowed: pull, round_robin.
exp.yaml:9: scheduling.replica_scheduler.params.target_batch_time_s: must be greater than 0 (got 0).
exp.yaml:10: scheduling.replica_scheduler.params.chunk: unknown key. Allowed: sizes, target_batch_time_s.
exp.yaml:11: num_replica: unknown key. Did you mean 'num_replicas'? Allowed: admission, backend, capacity, costs, description, elastic, hand_off, kv_event_lag_s, links, migration, name, num_replicas, observers, output, policy_timeout_s, pools, preset, programs, replica, replicasets, replications, scheduling, seed, sweep, version, view_interval_s, workload.
exp.yaml:13: replica.max_batch_size: must be an integer (got true).
exp.yaml:15: replica.memory.prefix_cache.publish: is not known (got 'later'). Allowed: schedule, step_end.
exp.yaml:16: replica.memory.watermark_fraction: must be less than 1 (got 2).
exp.yaml:17: replica.kv_parallel: group_tokens is needed with more than one group (got groups: 2).
exp.yaml:18: workload.rate: must be a number (got 'fast').
exp.yaml:18: workload.path: unknown key. Allowed: lengths, rate, type.
exp.yaml:21: backend.simulator.latency.type: no installed package offers a latency model of that name (got 'constnt'). Did you mean 'constant'? Allowed: LATENCY.
exp.yaml:22: backend.simulator.drain: must be a boolean (got 1).
exp.yaml:23: observers.0.type: no installed package offers an observer of that name (got 'watsh'). Did you mean 'watch'? Allowed: watch.
exp.yaml:23: observers.1.every_s: must be greater than 0 (got 0).
exp.yaml:24: output: must be a mapping (got 'runs'). Keys: decision_log, dir, steps.
"""


def test_every_mistake_of_a_file_is_told_at_once_with_its_line(write: Any, registry: Registry) -> None:
    expected = EXPECTED.replace("LATENCY", ", ".join(registry.latency_models))
    assert complaints(write(BAD), registry) == expected.splitlines()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("version: 1\n", ""), "exp.yaml:1: version: is missing."),
        (("  replicaset_scheduler: pull\n", ""), "exp.yaml:3: scheduling.replicaset_scheduler: is missing. Allowed: pull, round_robin."),
        (("replicaset_scheduler: pull", "replicaset_scheduler: [pull]"), "must be a policy's name, or a mapping of policy and params (got a list of 1)."),
        (("policy: lars", "policy: 3"), "scheduling.request_prioritizer.policy: must be a name (got 3)."),
        (("params: {deadline_multiplier: 2}", "params: [2]"), "scheduling.request_prioritizer.params: must be a mapping (got a list of 1)."),
        (("deadline_multiplier: 2", "order: fats"), "params.order: is not known (got 'fats'). Did you mean 'fast'? Allowed: fast, slow."),
        (("deadline_multiplier: 2", "deadline_multiplier: .nan"), "deadline_multiplier: must be"),
        (("sizes: [1, 2]", "sizes: [1, two]"), "exp.yaml:9: scheduling.replica_scheduler.params.sizes.1: must be an integer"),
        (("policy: dynamic_chunk\n    params:\n      sizes: [1, 2]", "policy: fixed_chunk"), "exp.yaml:6: scheduling.replica_scheduler.params.chunk_tokens: is missing."),
        (("type: synthetic, ", ""), "exp.yaml:10: workload.type: is missing."),
        (("type: synthetic", "type: synthetc"), "exp.yaml:10: workload.type: is not known (got 'synthetc'). Did you mean 'synthetic'? Allowed: azure, synthetic."),
        ((", rate: 4.0", ""), "exp.yaml:10: workload.rate: is missing."),
        (("workload: {type: synthetic, rate: 4.0}", "workload:"), "exp.yaml:10: workload: must be a mapping (got nothing)."),
        (("workload: {type: synthetic, rate: 4.0}\n", ""), "exp.yaml:1: workload: is missing."),
        (("latency: {type: constant, step_time_s: 0.5}", "drain: true"), "exp.yaml:11: backend.simulator.latency: is missing. Allowed:"),
        (("type: constant, ", ""), "backend.simulator.latency.type: is missing. Allowed:"),
        (("simulator: {latency: {type: constant, step_time_s: 0.5}}", ""), "exp.yaml:11: backend: exactly one backend is needed (got none)."),
        (("simulator:", "simulater:"), "exp.yaml:11: backend.simulater: no such backend. Did you mean 'simulator'? Allowed: engine, route, simulator, vllm."),
        (("seed: 42", "seed: '42'"), "exp.yaml:2: seed: must be an integer (got '42')."),
        (("seed: 42", f"seed: 1{'0' * 64}"), "exp.yaml:2: seed: must be at most 1000"),
        (("seed: 42", f"num_replicas: 0x{'f' * 4000}"), "exp.yaml:2: num_replicas: is not a valid int (got '0xfff"),
        (("seed: 42", "preset: vllm-v2"), "exp.yaml:2: preset: no installed package offers a preset of that name (got 'vllm-v2'). Did you mean 'vllm-v1'?"),
        (("scheduling:", "preset: vllm-v1\nscheduling:\n  preset: broken"), "exp.yaml:5: scheduling.preset: differs from the preset at the top level (got 'broken' and 'vllm-v1')."),
        (("seed: 42", "name: a/b"), "exp.yaml:2: name: must match pattern"),
        (("seed: 42", "replicasets: {a: {}, b: {}}"), "exp.yaml:2: replicasets: 'a' accepts every request, so 'b' never receives one"),
        (("seed: 42", "replicasets: {a: {num_replica: 2}}"), "exp.yaml:2: replicasets.a.num_replica: unknown key. Did you mean 'num_replicas'?"),
        (("seed: 42", "replicasets: {a: {scheduling: {request_prioritizer: x}}}"), "exp.yaml:2: replicasets.a.scheduling.request_prioritizer.policy: no installed"),
        (("seed: 42", "replicasets: {a: {select: {tenants: []}}}"), "exp.yaml:2: replicasets.a.select.tenants:"),
        (("seed: 42", "replica: {memory: {tiers: [{name: host, num_blocks: 0, bandwidth_gb_s: 1}]}}"), "exp.yaml:2: replica.memory.tiers.0.num_blocks: must be greater than 0 (got 0)."),
        (("seed: 42", "admission: {max_queued_requests: 0}"), "exp.yaml:2: admission.max_queued_requests: must be greater than 0 (got 0)."),
    ],
)  # fmt: skip
def test_a_mistake_reads(write: Any, good: str, registry: Registry, change: tuple[str, str], complaint: str) -> None:
    assert change[0] in good
    lines = complaints(write(good.replace(*change)), registry)
    assert len(lines) == 1, lines
    assert complaint in lines[0]


def test_a_misspelt_key_is_told_beside_what_is_missing(write: Any, good: str, registry: Registry) -> None:
    first, second = complaints(write(good.replace("policy: lars", "polcy: lars")), registry)
    assert first.startswith("exp.yaml:4: scheduling.request_prioritizer.polcy: unknown key. Did you mean 'policy'?")
    assert second.startswith("exp.yaml:4: scheduling.request_prioritizer.policy: is missing. Allowed: crashing, fcfs,")


def test_a_mistake_of_a_preset_names_its_package(write: Any, good: str, registry: Registry) -> None:
    text = good.replace("  replica_scheduler:\n    policy: dynamic_chunk\n    params:\n      sizes: [1, 2]\n", "")
    first, second = complaints(write(text + "preset: broken\n"), registry)
    assert first.startswith("preset broken of test-lab 1.2: scheduling.replica_scheduler.params.chunk_tokens: must be")
    assert second.startswith("preset broken of test-lab 1.2: replica.max_batch_sise: unknown key.")


def test_an_inherited_mistake_is_told_once(write: Any, good: str, registry: Registry) -> None:
    text = good.replace("pull", "pul") + "replicasets: {a: {select: {tenants: [x]}}, b: {}}\n"
    (line,) = complaints(write(text), registry)
    assert line.startswith("exp.yaml:5: scheduling.replicaset_scheduler.policy:")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [1\nb: 2\n", "exp.yaml:2: is not valid YAML:"),
        ("version: 1\n\tseed: 2\n", "exp.yaml:2: is not valid YAML:"),
        ("a: b: c", "exp.yaml:1: is not valid YAML:"),
        ("a: 1\n--- \nb: 2", "exp.yaml:2: is not valid YAML:"),
        ("x: 1\na: *nowhere", "exp.yaml:2: is not valid YAML:"),
        ("a: \x00", "exp.yaml:1: is not valid YAML:"),
        ("version: 1\nseed: 2\nseed: 3\n", "exp.yaml:3: seed: is given twice (first on line 2). Each key stands once"),
        ("a:\n  b: {c: 1, c: 2}\n", "exp.yaml:2: a.b.c: is given twice"),
        ("x: 1\na: !thing 3\n", "exp.yaml:2: a: has a tag that is not allowed (got !thing)"),
        ("? [1]\n: 2\n", "exp.yaml:1: has a key that is a list or a mapping"),
        ("a: &x [*x]\n", "is nested too deeply, or contains itself"),
        ("x: 1\n<<: 3\n", "exp.yaml:2: <<: is not a mapping"),
        ("x: !!int abc\n", "exp.yaml:1: x: is not a valid int (got 'abc')"),
        ('x: !!int ""\n', "exp.yaml:1: x: is not a valid int (got '')"),
        ('x: !!float ""\n', "exp.yaml:1: x: is not a valid float (got '')"),
        ("x: !!bool maybe\n", "exp.yaml:1: x: is not a valid bool (got 'maybe')"),
        ('a: 1\nx: "\\ud800"\n', "exp.yaml:2: x: has half of a surrogate pair (got '\\ud800')"),
        ('a: 1\nx: {"\\ud800": 1}\n', "exp.yaml:2: x: has half of a surrogate pair (got '\\ud800')"),
        ('a: 1\nx: "\\U00110000"\n', "exp.yaml:2: is not valid YAML: \\U00110000 is no character"),
        ('a: 1\nx: "\\UFFFFFFFF"\n', "exp.yaml:2: is not valid YAML: \\UFFFFFFFF is no character"),
        ("- 1\n", "exp.yaml:1: must be a mapping (got a list of 1)"),
        ("just text", "exp.yaml:1: must be a mapping"),
    ],
)
def test_what_is_no_proper_yaml_is_told_with_its_line(
    write: Any, registry: Registry, text: str, complaint: str
) -> None:
    (line,) = complaints(write(text), registry)
    assert line.startswith(complaint) or complaint in line


def test_an_empty_file_says_what_is_missing(write: Any, registry: Registry) -> None:
    lines = complaints(write(""), registry)
    for key in ("version", "workload", "backend", "scheduling.request_prioritizer"):
        assert any(line.startswith(f"exp.yaml:1: {key}: is missing.") for line in lines)


def test_files_that_cannot_be_read(write: Any, registry: Registry) -> None:
    write("")
    assert complaints("nowhere.yaml", registry) == ["nowhere.yaml: cannot be read (No such file or directory)."]
    Path("latin.yaml").write_bytes("name: M\xfcnchen".encode("latin-1"))
    assert complaints("latin.yaml", registry) == ["latin.yaml: is not valid UTF-8 (byte 7). Save it as UTF-8."]
    assert complaints(".", registry)[0].startswith(".: cannot be read")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("seed", "--set seed: is not an assignment. Write --set path.to.key=value"),
        ("=3", "--set =3: is not an assignment."),
        ("a..b=3", "--set a..b=3: is not an assignment."),
        ("seed=[1", "--set seed: is not valid YAML:"),
        ("seed={a: 1, a: 2}", "--set seed: a: is given twice. Each key stands once"),
        ("seed=x", "--set seed: must be an integer (got 'x')."),
        ("num_replica=3", "--set num_replica: unknown key. Did you mean 'num_replicas'?"),
        ("seed.x=3", "--set seed.x: 'seed' is neither a mapping nor a list (it is 42)."),
        ("workload.lengths.2=3", "--set workload.lengths.2: 'workload.lengths' is a list, and '2' is not an index of it; allowed: 0 to 1."),
        ('name="\\ud800"', "--set name: has half of a surrogate pair"),
        ("workload.lengths.²=3", "'²' is not an index of it"),
        pytest.param(f"workload.lengths.{'9' * 5000}=3", "9' is not an index of it", id="5,000 digits"),
        ("workload.lengths.x=3", "'x' is not an index of it"),
        ("workload.lengths.0=x", "--set workload.lengths.0: must be an integer (got 'x')."),
        ("replica={max_batch_size: 0}", "--set replica: replica.max_batch_size: must be greater than 0 (got 0)."),
        ("scheduling.request_prioritizer.policy=fcfs", "exp.yaml:4: scheduling.request_prioritizer.params.deadline_multiplier: unknown key. No keys are allowed here."),
        ("scheduling.request_prioritizer=lsr", "--set scheduling.request_prioritizer: scheduling.request_prioritizer.policy: no installed package"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named_as_typed(
    write: Any, good: str, registry: Registry, override: str, complaint: str
) -> None:
    text = good.replace("rate: 4.0", "rate: 4.0, lengths: [5, 6]")
    (line,) = complaints(write(text), registry, override)
    assert complaint in line


def test_overrides_apply_in_order_and_reach_everywhere(write: Any, good: str, registry: Registry) -> None:
    text = good.replace("rate: 4.0", "rate: 4.0, lengths: [5, 6]")
    overrides = [
        "seed=1",
        "seed=2",
        "workload.lengths.1=7",
        "scheduling.replicaset_scheduler.policy=round_robin",
        "replica.memory.prefix_cache.enabled=false",
        "output.dir=a=b",
        "replica.max_batch_tokens=null",
        "observers=[watch]",
        "observers.0.every_s=3",
    ]
    config: Any = load_config(write(text), overrides, registry)
    assert config.seed == 2
    assert config.workload.lengths == [5, 7]
    assert config.scheduling.replicaset_scheduler.policy == "round_robin"
    assert config.replica.memory.prefix_cache.enabled is False
    assert config.output.dir == "a=b"
    assert config.observers[0].params == {"every_s": 3.0}


def test_yaml_is_version_1_2_with_anchors_and_merge_keys() -> None:
    text = (
        "base: &base {a: 1, b: 2}\nmore: &more {c: 3}\nuse:\n  <<: [*base, *more]\n  b: 5\nalias: *base\n"
        "words: [yes, on, 2024-01-01, 12:30]\nnumbers: [010, 0o10, 1e3, 0x10]\nempty:\n"
    )
    data = plain(parse_yaml(text, Place("f", 1)))
    assert data["use"] == {"a": 1, "b": 5, "c": 3}
    assert data["alias"] == {"a": 1, "b": 2}
    assert data["words"] == ["yes", "on", "2024-01-01", "12:30"]
    assert data["numbers"] == [10, 8, 1000.0, 16]
    assert data["empty"] is None


@given(st.text(max_size=60))
def test_any_text_is_a_tree_or_a_list_of_mistakes(text: str) -> None:
    try:
        tree = parse_yaml(text, Place("f", 1))
        places = {tree.place.source if isinstance(tree, Entries | Items) else "f"}
    except ConfigError as error:
        places = {problem.where.partition(":")[0] for problem in error.problems}
    assert places == {"f"}
