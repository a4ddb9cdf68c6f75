"""Does a configuration of llm-d become a scheduling section that runs, with everything else named?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import config_from_mapping
from vajra_py.config.llm_d import read_llm_d
from vajra_py.errors import ConfigError
from vajra_py.plugins import load_registry

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
SPLIT = """\
plugins:
- type: approx-prefix-cache-producer
  parameters: {maxPrefixTokensToMatch: 16384, lruCapacityPerServer: 1000}
- type: prefix-cache-scorer
- {type: queue-scorer, name: short-queues}
- type: prefill-filter
- type: decode-filter
- type: max-score-picker
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: max-score-picker}, {pluginRef: short-queues, weight: 1}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer, weight: 2}, {pluginRef: short-queues}]
"""


def read(tmp_path: Path, text: str, head: str = HEAD) -> Any:
    file = tmp_path / "epp.yaml"
    file.write_text(head + text)
    return read_llm_d(file, load_registry())


def params(config: Any) -> Any:
    assert config.scheduling["replicaset_scheduler"]["policy"] == "endpoint_picker"
    return config.scheduling["replicaset_scheduler"]["params"]


def runs(config: Any, **keys: Any) -> None:
    """Load an experiment with what was read."""
    config_from_mapping(
        {
            "version": 1,
            "preset": config.preset,
            "scheduling": dict(config.scheduling),
            "num_replicas": 2,
            "workload": {"type": "profile", "profile": "azure2023_conv", "num_requests": 5, "rate": 4},
            "backend": {
                "simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}
            },
            **keys,
        },
        registry=load_registry(),
    )


def complaints(tmp_path: Path, text: str, head: str = HEAD) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, head)
    return [str(one).removeprefix(f"{tmp_path}/") for one in caught.value.problems]


def test_split_profiles_with_a_decider(tmp_path: Path) -> None:
    config = read(tmp_path, SPLIT)
    queue = {"scorer": "queue-scorer", "weight": 1.0}
    assert params(config) == {
        "producers": [
            {
                "producer": "approx-prefix-cache-producer",
                "params": {"max_prefix_tokens_to_match": 16384, "lru_capacity_per_server": 1000},
            }
        ],
        "profiles": {
            "decode": {
                "filters": [{"filter": "decode-filter"}],
                "scorers": [{"scorer": "prefix-cache-scorer", "weight": 2.0}, queue],
                "picker": {"picker": "max-score-picker"},
            },
            "prefill": {
                "filters": [{"filter": "prefill-filter"}],
                "scorers": [queue],
                "picker": {"picker": "max-score-picker"},
            },
        },
        "disaggregation": {
            "order": "decode-first",
            "decider": {"decider": "prefix-based-pd-decider", "params": {"non_cached_tokens": 16}},
        },
    }
    assert not config.unused
    runs(config)


def test_a_file_without_profiles_has_one_of_everything(tmp_path: Path) -> None:
    config = read(tmp_path, "plugins: [{type: queue-scorer}, {type: decode-filter}, {type: random-picker}]")
    assert params(config) == {
        "filters": [{"filter": "decode-filter"}],
        "scorers": [{"scorer": "queue-scorer", "weight": 1.0}],
        "picker": {"picker": "random-picker"},
    }
    runs(config)


def test_a_profile_without_a_picker_takes_the_best_score(tmp_path: Path) -> None:
    text = "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer, weight: 3}]}]"
    config = read(tmp_path, text)
    assert params(config) == {"filters": [], "scorers": [{"scorer": "queue-scorer", "weight": 3.0}]}
    runs(config)


def test_what_has_no_meaning_is_named_with_its_line_and_reason(tmp_path: Path) -> None:
    text = """\
featureGates: [flowControl]
plugins:
- type: token-producer
- type: topology-affinity-scorer
- type: queue-scorer
- {type: precise-prefix-cache-producer, parameters: {tokenProcessorConfig: {blockSize: 64}}}
- {type: by-label, name: zone-a, parameters: {label: zone, validValues: [a]}}
- {type: session-affinity-scorer, parameters: {strategy: session_id, sessionIdConfig: {evictionTtlSeconds: 60, sources: []}}}
- {type: context-length-aware, parameters: {label: other, enableFiltering: true}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: topology-affinity-scorer}, {pluginRef: zone-a}, {pluginRef: session-affinity-scorer}]
flowControl: {maxRequests: 100}
"""
    config = read(tmp_path, text)
    said = [str(one).removeprefix(f"{tmp_path}/") for one in config.unused]
    assert said == [
        "epp.yaml:3: featureGates: featureGates has no meaning here: there are no features to switch",
        "epp.yaml:5: plugins.0: token-producer has no meaning here: requests come parsed and with their tokens",
        "epp.yaml:6: plugins.1: topology-affinity-scorer has no meaning here: replicas have no place in a topology",
        "epp.yaml:8: plugins.3.parameters.tokenProcessorConfig: tokenProcessorConfig of precise-prefix-cache-producer "
        "has no meaning here: blocks are those of the replicas, whose caches are asked themselves",
        "epp.yaml:9: plugins.4: zone-a (by-label) has no meaning here: replicas have no 'zone' here; what they have is "
        "'pool' or 'llm-d.ai/role'",
        "epp.yaml:11: plugins.6.parameters.label: label of context-length-aware has no meaning here: replicas have no "
        "labels of their own; set ranges by replica or pool",
        "epp.yaml:15: flowControl: flowControl has no meaning here: flow control is a matter of admission, not of routing",
    ]
    assert params(config)["filters"] == []
    assert params(config)["scorers"] == [
        {"scorer": "queue-scorer", "weight": 1.0},
        {
            "scorer": "session-affinity-scorer",
            "params": {"strategy": "session_id", "eviction_ttl_seconds": 60.0},
            "weight": 1.0,
        },
    ]
    runs(config)


def test_producers_are_named_by_their_entries(tmp_path: Path) -> None:
    text = """\
plugins:
- {type: precise-prefix-cache-producer, name: exact}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: exact, matchLengthWeight: 0.5}}
"""
    assert params(read(tmp_path, text))["scorers"] == [
        {
            "scorer": "prefix-cache-scorer",
            "params": {"prefix_match_info_producer_name": "precise-prefix-cache-producer", "match_length_weight": 0.5},
            "weight": 1.0,
        }
    ]


def test_the_scorer_of_earlier_versions_is_two_parts(tmp_path: Path) -> None:
    config = read(tmp_path, "plugins: [{type: precise-prefix-cache-scorer, parameters: {indexerConfig: {}}}]")
    (scorer,) = params(config)["scorers"]
    assert scorer["params"] == {"prefix_match_info_producer_name": "precise-prefix-cache-producer"}
    assert [one.name for one in config.unused] == ["indexerConfig of precise-prefix-cache-scorer"]
    runs(config)


def test_the_older_handler_is_understood(tmp_path: Path) -> None:
    older = "{type: pd-profile-handler, parameters: {decodeProfile: d, prefillProfile: p, deciderPluginName: always-disagg-pd-decider}}"
    text = f"""\
plugins: [{{type: queue-scorer}}, {{type: always-disagg-pd-decider}}, {older}]
schedulingProfiles:
- {{name: p, plugins: [{{pluginRef: queue-scorer}}]}}
- {{name: d, plugins: [{{pluginRef: queue-scorer}}]}}
- {{name: e, plugins: [{{pluginRef: queue-scorer}}]}}
"""
    config = read(tmp_path, text)
    assert set(params(config)["profiles"]) == {"prefill", "decode"}
    assert params(config)["disaggregation"]["decider"] == {"decider": "always-disagg-pd-decider"}
    assert [one.name for one in config.unused] == ["profile e"]


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    text = """\
plugins:
- {type: queue-scorer}
- type: approx-prefix-cache-producer
  parameters: {lruCapacityPerServer: 0, lruCapacity: 5}
- {type: prefix-affinity-scorer}
- {type: prefix-cache-affinity-filter, parameters: {maxTTFTPenaltyMs: -4}}
- {type: queue-scorer}
- {name: nameless}
- 7
schedulingProfile: []
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: high}
  - {pluginRef: queue-scorers}
  - {ref: x}
- plugins: 5
"""
    said = complaints(tmp_path, text, HEAD.replace("PickerConfig", "PickerConfg"))
    starts = [
        "epp.yaml:2: kind: is not known (got 'EndpointPickerConfg'). Allowed: EndpointPickerConfig.",
        "epp.yaml:6: plugins.1.parameters.lruCapacityPerServer: must be at least 1 (got 0).",
        "epp.yaml:6: plugins.1.parameters.lruCapacity: unknown key. Did you mean 'lruCapacityPerServer'?",
        "epp.yaml:7: plugins.2.type: is no plug-in that is known here (got 'prefix-affinity-scorer'). Did you mean",
        "epp.yaml:8: plugins.3.parameters.maxTTFTPenaltyMs: must be at least 0 (got -4).",
        "epp.yaml:9: plugins.4.type: is given twice (got 'queue-scorer').",
        "epp.yaml:10: plugins.5.type: is missing.",
        "epp.yaml:11: plugins.6: must be a mapping (got 7). Keys: name, type, parameters.",
        "epp.yaml:12: schedulingProfile: unknown key. Did you mean 'schedulingProfiles'?",
        "epp.yaml:16: schedulingProfiles.0.plugins.0.weight: must be a finite number (got 'high').",
        "epp.yaml:17: schedulingProfiles.0.plugins.1.pluginRef: names no plug-in of the file (got 'queue-scorers'). Did you mean",
        "epp.yaml:18: schedulingProfiles.0.plugins.2.ref: unknown key. Allowed: pluginRef, weight.",
        "epp.yaml:18: schedulingProfiles.0.plugins.2.pluginRef: is missing.",
        "epp.yaml:19: schedulingProfiles.1.name: is missing.",
        "epp.yaml:19: schedulingProfiles.1.plugins: must be a list (got 5).",
    ]
    assert len(said) == len(starts)
    for line, start in zip(said, starts, strict=True):
        assert line.startswith(start)


TWO = "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}, {name: b, plugins: [{pluginRef: queue-scorer}]}]"

ONE = "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer, weight: %s}]}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plugins: is missing"),
        ("plugins: {}", "plugins: must be a list"),
        (f"plugins: [{{type: queue-scorer}}]\n{TWO}", "has 2 profiles and nothing that says which holds"),
        (
            f"plugins: [{{type: queue-scorer}}, {{type: disagg-profile-handler}}]\n{TWO}",
            "has no profile named 'decode'",
        ),
        (
            SPLIT.replace("prefill: prefix-based-pd-decider}", "prefill: queue-scorer}"),
            "names no decider of the file (got 'queue-scorer')",
        ),
        (SPLIT.replace("{deciders:", "{stageOrder: prefill-first, deciders:"), "needs stageOrder decode-first"),
        (SPLIT.replace("{deciders:", "{stageOrder: other, deciders:"), "stageOrder: is not known (got 'other')"),
        (
            SPLIT.replace("{pluginRef: decode-filter}", "{pluginRef: prefix-based-pd-decider}"),
            "is no filter, scorer or picker",
        ),
        (
            "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: lost}}]",
            "prefixMatchInfoProducerName: names no plug-in of the file (got 'lost')",
        ),
        (
            "plugins: [{type: max-score-picker}, {type: random-picker}, {type: queue-scorer}]\nschedulingProfiles: [{name: a, "
            "plugins: [{pluginRef: max-score-picker}, {pluginRef: random-picker}]}]",
            "is a second picker of the profile (got 'random-picker')",
        ),
        (
            "plugins: [{type: disagg-profile-handler, parameters: {profiles: [decode, prefill]}}]",
            "parameters.profiles: must be a mapping (got a list of 2)",
        ),
        (
            "plugins: [{type: disagg-profile-handler, parameters: {deciders: always}}]",
            "parameters.deciders: must be a mapping (got 'always')",
        ),
        (
            "plugins: [{type: disagg-profile-handler, parameters: {profiles: {decode: [d]}}}]",
            "parameters.profiles.decode: must be a name (got a list of 1)",
        ),
        (
            "plugins: [{type: disagg-profile-handler, parameters: {profiles: {decoding: d}}}]",
            "parameters.profiles.decoding: unknown key",
        ),
        ("plugins: [{type: disagg-profile-handler, parameters: {foo: 3}}]", "parameters.foo: unknown key"),
        (
            "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: [1]}}]",
            "prefixMatchInfoProducerName: must be a name (got a list of 1)",
        ),
        *(
            (f"plugins: [{{type: queue-scorer}}]\n{ONE % weight}", "weight: must be a finite number")
            for weight in (".nan", ".inf", "1e400", f"1{'0' * 400}")
        ),
        ("plugins: [{type: queue-scorer, parameters: 3}]", "parameters: must be a mapping (got 3)"),
        (
            "plugins: [{type: utilization-filter, parameters: {conditions: [{metric: kv-cache-utilization, maxValue: 80}]}}]",
            "maxValue of kv-cache-utilization is a fraction",
        ),
    ],
)
def test_a_mistake_is_told(tmp_path: Path, text: str, message: str) -> None:
    said = complaints(tmp_path, text)
    assert any(message in line for line in said), said
    assert all(line.startswith("epp.yaml:") for line in said)


def test_the_configurations_of_the_project_are_read(shared_dir: Path, tmp_path: Path) -> None:
    """The shortened file of the notes on llm-d, word for word."""
    notes = shared_dir / "reference" / "beyond_one_pool.md"
    if not notes.is_file():
        pytest.skip(f"notes absent: no file {notes}")
    text = notes.read_text().partition("```yaml\n")[2].partition("```")[0]
    config = read(tmp_path, text, "")
    assert set(params(config)["profiles"]) == {"prefill", "decode"}
    runs(config)
