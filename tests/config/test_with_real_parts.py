"""Files with the workloads and latency models that the framework brings along."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vajra_py.config import dump_effective, json_schema, load_config
from vajra_py.errors import ConfigError
from vajra_py.plugins import Registry


@pytest.fixture(autouse=True)
def _workload() -> None:
    """The real kinds of workload."""


TEXT = """\
version: 1
preset: vllm-v1
workload:
  type: merge
  rate: 8
  workloads:
    - type: profile
      profile: azure2023_conv
      num_requests: 100
    - type: synthetic
      arrivals: {type: poisson, rate: 2.0}
      prompt_tokens: {type: constant, value: 100}
      output_tokens: {type: constant, value: 10}
      num_requests: 50
      slo_classes: [{name: chat, ttft_slo_s: 1.0}]
backend:
  simulator:
    latency: {type: roofline, model: llama-3.1-8b, device: a100-80gb-sxm, tensor_parallel: 2}
    output_length: {type: oracle}
"""


def test_a_file_and_its_effective_form_agree(write: Any, registry: Registry) -> None:
    config: Any = load_config(write(TEXT), ["workload.workloads.0.num_requests=7"], registry)
    assert config.workload.workloads[0].num_requests == 7
    assert config.backend.simulator.latency.params["tensor_parallel"] == 2
    dumped = dump_effective(config)
    again = load_config(write(dumped, "again.yaml"), registry=registry)
    assert again == config
    assert dump_effective(again) == dumped


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("profile: azure2023_conv", "profile: azure2023_con"), "exp.yaml:8: workload.workloads.0.profile: is not known (got 'azure2023_con'). Did you mean 'azure2023_conv'?"),
        (("num_requests: 100", "num_request: 100"), "exp.yaml:9: workload.workloads.0.num_request: unknown key. Did you mean 'num_requests'?"),
        (("type: poisson", "type: poison"), "exp.yaml:11: workload.workloads.1.arrivals.type: is not known (got 'poison'). Did you mean 'poisson'?"),
        (("rate: 2.0", "rate: -2.0"), "exp.yaml:11: workload.workloads.1.arrivals.rate: must be greater than 0 (got -2.0)."),
        (("ttft_slo_s: 1.0", "ttft_s: 1.0"), "exp.yaml:15: workload.workloads.1.slo_classes.0.ttft_s: unknown key. Did you mean 'ttft_slo_s'?"),
        (("  rate: 8", "  rate: 8\n  time_scale: 2"), "exp.yaml:3: workload: rate and time_scale both set the pace."),
        (("model: llama-3.1-8b", "model: llama-3.1-8"), "exp.yaml:18: backend.simulator.latency.model: "),
        (("tensor_parallel: 2", "tensor_paralel: 2"), "exp.yaml:18: backend.simulator.latency.tensor_paralel: unknown key. Did you mean 'tensor_parallel'?"),
        (("type: oracle", "type: orakel"), "exp.yaml:19: backend.simulator.output_length.type: no installed package offers an output-length predictor of that name (got 'orakel'). Did you mean 'oracle'?"),
    ],
)  # fmt: skip
def test_a_mistake_deep_inside_has_its_line(
    write: Any, registry: Registry, change: tuple[str, str], complaint: str
) -> None:
    assert change[0] in TEXT
    with pytest.raises(ConfigError) as caught:
        load_config(write(TEXT.replace(*change)), registry=registry)
    (line,) = str(caught.value).splitlines()
    assert complaint in line


def test_the_schema_knows_every_workload(registry: Registry) -> None:
    schema = json_schema(registry)
    text = json.dumps(schema)
    for name in ("azure", "mooncake", "burstgpt", "jsonl", "synthetic", "sessions", "profile", "merge"):
        assert f'"{name}"' in text
