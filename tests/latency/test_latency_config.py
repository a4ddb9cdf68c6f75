from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vajra_py.contract.latency import BatchFeatures
from vajra_py.errors import ConfigError
from vajra_py.latency import BUILTIN_LATENCY_MODELS, AffineModel, ConstantModel, RooflineConfig

SPECS = {spec.name: spec for spec in BUILTIN_LATENCY_MODELS}


def build(kind: str, **parameters: Any) -> Any:
    spec = SPECS[kind]
    return spec.build(spec.config.model_validate(parameters))


def test_all_models_are_offered_and_describe_every_field() -> None:
    assert set(SPECS) == {
        "roofline",
        "profiled",
        "profile_bundle",
        "aiconfigurator",
        "recorded",
        "constant",
        "affine",
    }
    for spec in SPECS.values():
        schema = spec.config.model_json_schema()
        undescribed = [
            key for key, field in schema["properties"].items() if key != "type" and "description" not in field
        ]
        assert not undescribed
        assert schema["additionalProperties"] is False


def test_a_roofline_from_names_and_from_figures() -> None:
    shape = BatchFeatures(8, 8000)
    slow = build("roofline", model="qwen3-8b", device="a100")
    fast = build("roofline", model="qwen3-8b", device={"base": "a100", "memory_bandwidth": 4e12})
    assert fast.batch_time_s(shape) < slow.batch_time_s(shape)
    assert build("roofline", tensor_parallel=2, pipeline_parallel=4).num_stages == 4


def test_dtypes_follow_the_model_unless_given() -> None:
    assert RooflineConfig(model="Llama-2-7B").model_spec().dtype == "float16"
    spec = RooflineConfig(model="Llama-3.1-70B", device="h100", dtype="fp8").model_spec()
    assert (spec.dtype, spec.kv_dtype) == ("fp8", "bfloat16")
    assert RooflineConfig(kv_dtype="fp8", device="h100").model_spec().kv_bytes_per_token == 65_536


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"model": "Llama-3.1-9B"}, "Did you mean 'Llama-3.1-8B'"),
        ({"device": "a10"}, "there is no such device"),
        ({"device": {"base": "a100", "bandwidth": 3}}, "bandwidth"),
        ({"device": {"memory_bandwidth": 1e12}}, "device.peak_flops: is missing"),
        ({"tensor_parallel": 3}, "does not divide the 32 attention heads"),
        ({"dtype": "fp8"}, "does not multiply in fp8"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor": 2}, "tensor"),
    ],
)
def test_mistakes_are_found_when_the_parameters_are_checked(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build("roofline", **parameters)


def test_paths_may_be_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("replica_id,step_index,duration_s\n0,0,0.25\n")
    spec = SPECS["recorded"]
    config = spec.config.model_validate({"steps": "steps.csv"}, context={"base_folder": tmp_path})
    assert spec.build(config).next_duration_s(0) == 0.25
    with pytest.raises(ConfigError, match="there is no such file"):
        build("recorded", steps="steps.csv")


def test_constant_and_affine_models_are_their_formulas() -> None:
    assert build("constant", step_time_s=0.5).batch_time_s(BatchFeatures(3, 30)) == 0.5
    model = build(
        "affine",
        base_s=1.0,
        per_token_s=0.1,
        per_request_s=0.01,
        per_prefill_pair_s=0.001,
        per_decode_context_token_s=1e-4,
    )
    shape = BatchFeatures(2, 100).with_chunk(3, 5)
    assert model.batch_time_s(shape) == pytest.approx(1 + 0.5 + 0.03 + 0.001 * (15 + 6) + 0.01)
    with pytest.raises(ValidationError, match="no time"):
        build("affine", base_s=0.0)
    with pytest.raises(ValidationError):
        build("constant", step_time_s=0.0)


@given(num_decodes=st.integers(0, 300), context=st.integers(0, 10_000), num_steps=st.integers(0, 30))
def test_runs_of_decodes_equal_single_steps_bit_for_bit(num_decodes: int, context: int, num_steps: int) -> None:
    for model in (ConstantModel(0.02), AffineModel(0.01, 1.1e-5, 3e-6, 1e-9, 7.7e-9)):
        run = model.decode_run_times_s(num_decodes, context, num_steps)
        single = [model.batch_time_s(BatchFeatures(num_decodes, context + i * num_decodes)) for i in range(num_steps)]
        assert run.dtype == np.float64
        assert run.tolist() == single


def test_importing_and_predicting_needs_no_heavy_library() -> None:
    code = (
        "import sys, json, vajra_py.latency as l\n"
        "from vajra_py.contract.latency import BatchFeatures\n"
        "l.RooflineConfig().build().batch_time_s(BatchFeatures(1, 1))\n"
        "print(json.dumps([m for m in ('torch', 'scipy', 'pandas', 'pyarrow', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
