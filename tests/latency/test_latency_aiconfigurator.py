"""Steps are predicted from an engine's operator tables by size; what the tables lack is filled by a stated rule, counted, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.latency.measured import as_measured, write_run
from vajra_py.cli.calibrate import calibrate
from vajra_py.cli.validate import validate
from vajra_py.config import config_from_mapping
from vajra_py.contract import BatchFeatures
from vajra_py.errors import ConfigError, ExecutorError
from vajra_py.experiment.measured.run import read_measured_run
from vajra_py.experiment.measured.simulation import measured_config, simulate_measured, tables_latency
from vajra_py.experiment.runs.divided import why_whole
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import AiconfiguratorConfig, Calibration, OperatorTablesModel, step_times_of
from vajra_py.latency.operators.calibration_file import read_calibration
from vajra_py.plugins import load_registry

BANDWIDTH, KERNEL_S = 2e12, 2e-6
LAYERS, HIDDEN, WIDTH, VOCABULARY = 32, 4096, 14336, 128256
ROWS = (1, 8, 64, 512, 4096, 32768)
LENGTHS = (1, 128, 1024, 8192)
STEPS = (1, 1023, 8191)
SEARCH_US, CONVERT_US = 2.0, 1.0


def gemm_us(m: float, n: float, k: float) -> float:
    """Bilinear in the matrix's sizes, as the model interpolates."""
    return 1.0 + 1e-7 * n * k + 1e-10 * m * n * k


def causal_us(tokens: float) -> float:
    return 10.0 + 1e-5 * tokens * tokens


def decode_us(decodes: float, context: float) -> float:
    return 5.0 + 0.001 * decodes * context


def write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
    pq.write_table(pa.table(table), path)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of one engine on one system whose times follow formulas."""
    root = tmp_path_factory.mktemp("systems")
    (root / "h100_sxm.yaml").write_text(
        f"gpu: {{mem_bw: {2 * BANDWIDTH}, mem_bw_empirical_scaling_factor: 0.5, "
        f"mem_empirical_constant_latency: {KERNEL_S}, mem_capacity: 80000000000}}\n"
    )
    data = root / "data" / "h100_sxm"
    sizes = (128, 4096, 8192, 65536)
    gemm = [
        (dtype, m, n, k, 1e-3 * (gemm_us(m, n, k) + (SEARCH_US + CONVERT_US if dtype == "fp8" else 0.0)))
        for dtype, m, n, k in product(("bfloat16", "fp8"), ROWS, sizes, sizes)
    ]
    write(data / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet", ("gemm_dtype", "m", "n", "k", "latency"), gemm)
    for name, us in (("computescale_perf", SEARCH_US), ("scale_matrix_perf", CONVERT_US)):
        rows = [("fp8", m, k, 1e-3 * us) for m, k in product(ROWS, sizes)]
        write(data / "quantize" / "vllm" / "0.24.0" / f"{name}.parquet", ("quant_dtype", "m", "k", "latency"), rows)
    common = ("num_heads", "num_key_value_heads", "head_dim", "attn_dtype", "kv_cache_dtype", "window_size")
    attention = data / "attention" / "vllm" / "0.24.0"
    heads = [(32, 8), (16, 4)]
    write(
        attention / "context_attention_perf.parquet",
        (*common, "batch_size", "isl", "step", "latency"),
        [
            (h, kv, 128, "bfloat16", "bfloat16", 0, 1, n, 0, 1e-3 * causal_us(n))
            for (h, kv), n in product(heads, LENGTHS)
        ],
    )
    write(
        attention / "generation_attention_perf.parquet",
        (*common, "batch_size", "isl", "step", "latency"),
        [
            (h, kv, 128, "bfloat16", "bfloat16", 0, b, 1, s, 1e-3 * decode_us(b, s))
            for (h, kv), b, s in product(heads, (1, 16, 256), STEPS)
        ],
    )
    write(
        data / "comm" / "vllm" / "0.24.0" / "custom_allreduce_perf.parquet",
        ("num_gpus", "message_size", "kernel_source", "latency"),
        [(2, size, kind, us) for size in (128, 2**30) for kind, us in (("eager", 0.1), ("graph", 0.02))],
    )
    write(
        data / "moe" / "vllm" / "0.24.0" / "moe_perf.parquet",
        (
            *("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts"),
            *("moe_tp_size", "moe_ep_size", "distribution", "latency"),
        ),
        [("bfloat16", n, 4096, 14336, 2, 8, 1, 1, "balanced", 1e-3 * (100.0 + n)) for n in ROWS],
    )
    return root


def of(tables: Path, **settings: object) -> OperatorTablesModel:
    mapping = {"path": str(tables), "host": "none", "cuda_graphs": False, **settings}
    return AiconfiguratorConfig.model_validate(mapping).build()


def traffic_us(size: float, tokens: float) -> float:
    return 1e6 * (KERNEL_S + 2 * size * tokens / BANDWIDTH)


def dense_us(tokens: float, tensor: int = 1, extra: float = 0.0) -> float:
    """By hand: four matrices, two norms, rotary embedding and activation a layer; embedding and last norm once."""
    queries, keys, width = 4096 / tensor, 1024 / tensor, WIDTH / tensor
    matrices = [(queries + 2 * keys, HIDDEN), (HIDDEN, queries), (2 * width, HIDDEN), (HIDDEN, width)]
    layer = sum(gemm_us(tokens, n, k) + extra for n, k in matrices)
    layer += (
        2 * traffic_us(4 * HIDDEN, tokens) + traffic_us(2 * (queries + keys), tokens) + traffic_us(3 * width, tokens)
    )
    return LAYERS * layer + 2 * traffic_us(2 * HIDDEN, tokens)


def head_us(sequences: float) -> float:
    """The vocabulary is larger than any matrix that was measured: the largest one's time grown with it, and the draw."""
    matrix = gemm_us(sequences, 65536, HIDDEN) * VOCABULARY / 65536
    return matrix + 1e6 * (KERNEL_S + 16 * VOCABULARY * sequences / BANDWIDTH)


def test_a_step_is_the_sum_of_its_operators(tables: Path) -> None:
    model = of(tables)
    decodes = BatchFeatures(16, 16 * 1023)
    expected = dense_us(16) + head_us(16) + LAYERS * decode_us(16, 1023)
    assert model.batch_time_s(decodes) == pytest.approx(1e-6 * expected)
    chunk = BatchFeatures().with_chunk(1024, 0)
    expected = dense_us(1024) + head_us(1) + LAYERS * causal_us(1024)
    assert model.batch_time_s(chunk) == pytest.approx(1e-6 * expected)
    # Decodes beside a chunk cost what both cost.
    mixed = decodes.with_chunk(8192 - 16, 0)
    both = model.breakdown_s(mixed)
    assert both["decode_attention"] == pytest.approx(1e-6 * LAYERS * decode_us(16, 1023))
    assert sum(both.values()) == pytest.approx(model.batch_time_s(mixed))


def test_a_run_of_decodes_is_as_long_as_its_steps(tables: Path) -> None:
    model = of(tables)
    run = model.decode_run_times_s(7, 7 * 500, 100)
    assert list(run) == [model.batch_time_s(BatchFeatures(7, 7 * (500 + step))) for step in range(100)]


def test_gpus_share_every_layer_and_sum_by_the_table(tables: Path) -> None:
    one, two = (of(tables, tensor_parallel=degree).breakdown_s(BatchFeatures(16, 16 * 1023)) for degree in (1, 2))
    assert two["dense"] == pytest.approx(1e-6 * dense_us(16, tensor=2))
    # Two sums a layer, one for the embedding, and the scores.
    assert two["all_reduce"] == pytest.approx((2 * LAYERS + 2) * 20e-6)
    assert "all_reduce" not in one
    fused = of(tables, tensor_parallel=2, fused_norms=True).breakdown_s(BatchFeatures(16, 16 * 1023))
    assert two["dense"] - fused["dense"] == pytest.approx(1e-6 * 2 * LAYERS * traffic_us(4 * HIDDEN, 16))


def test_known_scales_and_fused_conversion_take_their_parts_off_products_of_eight_bits(tables: Path) -> None:
    shape = BatchFeatures(16, 16 * 1023)
    for conversion, left in (("dynamic", SEARCH_US + CONVERT_US), ("static", CONVERT_US), ("fused", 0.0)):
        dense = of(tables, precision="fp8", conversion=conversion).breakdown_s(shape)["dense"]
        assert dense == pytest.approx(1e-6 * dense_us(16, extra=left))


def test_a_chunk_behind_context_takes_what_the_longer_prefill_takes_beyond_the_shorter(tables: Path) -> None:
    model = of(tables)
    chunk = model.breakdown_s(BatchFeatures().with_chunk(1024, 1024))["prefill_attention"]
    by_rule = max(causal_us(1024), 0.5 * 0 + _causal(2048) - _causal(1024), decode_us(1, 1024))
    assert chunk == pytest.approx(1e-6 * LAYERS * by_rule)
    times = [model.batch_time_s(BatchFeatures().with_chunk(512, context)) for context in range(0, 8192, 256)]
    assert times == sorted(times)


def _causal(tokens: float) -> float:
    """Linear between the measured lengths."""
    low, high = (1024, 8192) if tokens > 1024 else (128, 1024)
    return causal_us(low) + (causal_us(high) - causal_us(low)) * (tokens - low) / (high - low)


def test_the_share_of_steps_by_rule_is_counted_and_told(tables: Path, tmp_path: Path) -> None:
    model = of(tables)
    shape = BatchFeatures(16, 16 * 1023)
    fillings = 2 * traffic_us(4 * HIDDEN, 16) + traffic_us(2 * 5120, 16) + traffic_us(3 * WIDTH, 16)
    expected = 1e-6 * (LAYERS * fillings + 2 * traffic_us(2 * HIDDEN, 16))
    assert model.filled_s(shape) == pytest.approx(expected)
    model.batch_time_s(shape)
    assert model.filled_fraction == 0.0  # a prediction does not count as a step
    seconds = model.taken_time_s(shape)
    assert model.filled_fraction == pytest.approx(expected / seconds)
    behind = BatchFeatures().with_chunk(1024, 4096)
    assert model.filled_s(behind) > 1e-6 * LAYERS * causal_us(1024)
    long = BatchFeatures().with_chunk(2 * ROWS[-1], 1024)  # longer than any that was measured: summed in another way
    parts = model.breakdown_s(long)
    assert parts["prefill_attention"] < model.filled_s(long) < parts["prefill_attention"] + parts["dense"]

    latency = {"type": "aiconfigurator", "path": str(tables), "host": "none"}
    config = config_from_mapping(
        {
            "version": 1,
            "name": "filled",
            "preset": "vllm-v1",
            "replica": {"memory": {"num_blocks": 4096}},
            "workload": {
                "type": "synthetic",
                "num_requests": 4,
                "arrivals": {"type": "closed_loop", "num_users": 2},
                "prompt_tokens": {"type": "constant", "value": 300},
                "output_tokens": {"type": "constant", "value": 20},
            },
            "backend": {"simulator": {"latency": latency}},
        }
    )
    assert why_whole(config, load_registry()) == "its latency model sums the times of all replicas' steps"
    summary = run_experiment(config, folder=tmp_path / "run").summary
    assert 0.0 < float(summary.value("step_times.filled_fraction")) < 0.5
    sentence = str(summary.value("step_times.sentence"))
    assert sentence.startswith("measured: operators measured on h100_sxm inside vLLM 0.24.0 (Llama-3.1-8B)")
    assert "of the step time by rules where the tables have holes" in sentence


def test_experts_are_looked_up_by_their_shape(tables: Path) -> None:
    mixtral = of(tables, model="Mixtral-8x7B", fallback=None)
    assert mixtral.breakdown_s(BatchFeatures(64, 64 * 100))["experts"] == pytest.approx(1e-6 * LAYERS * 164.0)
    with pytest.raises(ConfigError, match=r"no times for moe_ep_size 2\. There are: 1"):
        of(tables, model="Mixtral-8x7B", tensor_parallel=2, expert_parallel=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system": "h101_sxm"}, r"system: has no tables \('h101_sxm'\).*h100_sxm"),
        ({"engine": "trtllm"}, r"engine: has no tables of h100_sxm \('trtllm'\)\. There are: vllm"),
        ({"version": "0.1.0"}, r"version: has no tables of h100_sxm \('0.1.0'\)\. There are: 0.24.0"),
        ({"precision": "nvfp4"}, r"no times for gemm_dtype nvfp4\. There are: bfloat16, fp8"),
        ({"kv_dtype": "fp8"}, r"no times for kv_cache_dtype fp8\. There are: bfloat16"),
        ({"tensor_parallel": 8}, r"no times for 1 KV heads on a GPU\. There are: 4, 8"),
        ({"tensor_parallel": 3}, r"tensor_parallel: does not divide the 32 attention heads"),
        ({"model": "Gemma-2-9B"}, r"no times for head_dim 256\. There are: 128"),
        ({"model": "DeepSeek-V2-Lite"}, r"latent attention of another shape"),
        ({"model": "Qwen3-30B-A3B"}, r"no times for"),
        ({"path": "/nowhere"}, r"path: has no folder data \('/nowhere'\)"),
    ],
)
def test_what_the_tables_do_not_hold_is_refused_by_name(
    tables: Path, settings: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        of(tables, **settings)


def test_steps_beyond_the_reach_are_refused_or_answered_by_the_roofline(tables: Path) -> None:
    far = BatchFeatures(16, 16 * 100_000)
    with pytest.raises(ExecutorError, match="does not reach a step"):
        of(tables).batch_time_s(far)
    model = of(tables, fallback="roofline")
    assert model.batch_time_s(far) > 0
    assert step_times_of(model).kind == "measured"
    # A run whose first step is beyond the reach does not count: the simulator takes this step by itself.
    assert len(model.decode_run_times_s(16, 16 * 100_000, 10)) == 1
    assert model.filled_fraction == 0.0


def test_a_table_with_a_time_that_is_none_is_refused_with_its_row(tables: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "systems"
    shutil.copytree(tables, broken)
    path = broken / "data" / "h100_sxm" / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet"
    table = pq.read_table(path).to_pydict()
    table["latency"][3] = float("nan")
    pq.write_table(pa.table(table), path)
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet: row 3: has an invalid time \(nan ms\)"):
        of(broken)
    pq.write_table(pa.table({name: values for name, values in table.items() if name != "k"}), path)
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet: has no columns k"):
        of(broken)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vajra_py.latency.operators.operator_tables.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'vajra-py\[aiconfigurator\]'"):
        AiconfiguratorConfig().build()


def test_a_measured_run_is_simulated_and_fitted_with_the_tables(tables: Path, tmp_path: Path) -> None:
    """The run was made with slower products and a slower host than the tables': the fit on its first half tells the rest."""
    folder = write_run(tmp_path / "measured", count=44)
    run = read_measured_run(folder)
    latency = tables_latency(run, system="h100_sxm", path=str(tables), context_variation=0.0)
    assert (latency["type"], latency["model"], latency["capture_limit"]) == ("aiconfigurator", "Llama-3.1-8B", 16)
    truth = {"dense": 1.15, "decode_attention": 1.0, "mixed_attention": 1.0}
    Calibration("Llama-3.1-8B", "h100_sxm", 1, {"exposed_s": 0.002}, truth, "made up").write(tmp_path / "truth.json")
    as_measured(
        folder, simulate_measured(run, {**latency, "calibration": str(tmp_path / "truth.json")}, tmp_path / "t")
    )
    settings = [f"--latency={name}={latency[name]}" for name in ("system", "path", "context_variation")]
    fitted = [str(folder), *settings, "--fit-fraction", "0.5", "-q", "-o", str(tmp_path / "calibration.json")]
    assert CliRunner().invoke(calibrate, fitted, standalone_mode=False).exception is None
    errors = read_calibration(tmp_path / "calibration.json").errors
    assert max(abs(errors["tpot_s"]), abs(errors["e2e_s"])) < 0.01
    given = [str(folder), *settings, "-o", str(tmp_path / "again")]
    plain = CliRunner().invoke(validate, given, standalone_mode=False)
    assert plain.return_value == 1
    told = [*given, "--calibration", str(tmp_path / "calibration.json")]
    calibrated = CliRunner().invoke(validate, told, standalone_mode=False)
    assert (calibrated.return_value, calibrated.exception) == (0, None)
    assert "step times: calibrated: operators measured on h100_sxm inside vLLM 0.24.0" in calibrated.output


def test_settings_of_a_measured_run_s_tables_are_checked(tables: Path, tmp_path: Path) -> None:
    run = read_measured_run(write_run(tmp_path / "measured"))
    with pytest.raises(ConfigError, match="latency: nothing says where step times come from"):
        tables_latency(run, precision="fp8")
    with pytest.raises(ConfigError, match=r"latency.precision: .*\('fp9'\)"):
        measured_config(tables_latency(run, system="h100_sxm", path=str(tables), precision="fp9"))
    with pytest.raises(ConfigError, match=r"latency.type: is not made of measured operators \('roofline'\)"):
        measured_config({"type": "roofline"})
    wrong = CliRunner().invoke(validate, [str(run.path), "--latency", "system"])
    assert isinstance(wrong.exception, ConfigError)
    assert "--latency: is not NAME=VALUE ('system')" in str(wrong.exception)


def test_a_calibration_of_other_tables_is_refused(tables: Path, tmp_path: Path) -> None:
    Calibration("Llama-3.1-8B", "h200_sxm", 1, {}, {}, "another GPU").write(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"was fitted for .* on h200_sxm.* and the bundle is of .* on h100_sxm"):
        of(tables, calibration=str(tmp_path / "other.json"))
