from __future__ import annotations

import csv
import gzip
import json
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.contract.latency import BatchFeatures
from vajra_py.errors import ConfigError, ExecutorError
from vajra_py.latency import GridTableModel, OperatorTableModel, TableOptions
from vajra_py.latency.models.table import CACHE_WRITE, OPERATORS

VIDUR = Path(__file__).resolve().parents[3] / "shared" / "golden" / "vidur"
needs_vidur = pytest.mark.skipif(not VIDUR.is_dir(), reason=f"reference data not found at {VIDUR}")


# Grid of whole steps ---------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[tuple[float, ...]], header: str) -> Path:
    text = header + "\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


ROWS: list[tuple[float, ...]] = [(n, c, 1e-3 + 1e-5 * n + 1e-8 * c * n) for n in (1, 64, 256) for c in (0, 1000, 4000)]
HEADER = "num_tokens,mean_decode_context_tokens,time_s"


@pytest.fixture
def table(tmp_path: Path) -> GridTableModel:
    return GridTableModel.from_file(write_csv(tmp_path / "steps.csv", ROWS[::-1], HEADER))


def test_a_grid_returns_its_own_values_and_interpolates_between(table: GridTableModel) -> None:
    assert table.batch_time_s(BatchFeatures(64, 64_000)) == pytest.approx(1e-3 + 64e-5 + 64e-5, rel=1e-12)
    # The formula is bilinear, so interpolation is exact.
    assert table.batch_time_s(BatchFeatures(100, 250_000)) == pytest.approx(
        1e-3 + 100e-5 + 1e-8 * 2500 * 100, rel=1e-12
    )
    assert table.stage_time_s(BatchFeatures(64, 64_000)) == table.batch_time_s(BatchFeatures(64, 64_000))
    assert table.num_stages == 1


def test_all_formats_hold_the_same_table(tmp_path: Path, table: GridTableModel) -> None:
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(HEADER.split(","))}
    (tmp_path / "a.json").write_text(json.dumps(columns))
    (tmp_path / "b.json").write_text(json.dumps([dict(zip(columns, row, strict=True)) for row in ROWS]))
    np.savez(tmp_path / "c.npz", **columns)  # type: ignore[arg-type]
    times = np.array([row[2] for row in ROWS]).reshape(3, 3)
    np.savez(tmp_path / "d.npz", num_tokens=[1, 64, 256], mean_decode_context_tokens=[0, 1000, 4000], time_s=times)
    write_csv(tmp_path / "e.csv.gz", ROWS, HEADER)
    shape = BatchFeatures(17, 17 * 777)
    for name in ("a.json", "b.json", "c.npz", "d.npz", "e.csv.gz"):
        assert GridTableModel.from_file(tmp_path / name).batch_time_s(shape) == pytest.approx(
            table.batch_time_s(shape), rel=1e-12
        )


def test_outside_of_the_grid_it_refuses_clamps_or_extrapolates(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", [(1, 0.01), (101, 0.02)], "num_tokens,time_s")
    shape = BatchFeatures(201, 0)
    with pytest.raises(ExecutorError, match=r"num_tokens 201 lies outside of the table \(1 to 101\)"):
        GridTableModel.from_file(path).batch_time_s(shape)
    assert GridTableModel.from_file(path, beyond="clamp").batch_time_s(shape) == 0.02
    assert GridTableModel.from_file(path, beyond="extrapolate").batch_time_s(shape) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([(1, 0.1)], "num_tokens,seconds", "has no column 'time_s'"),
        ([(1, 0.1)], "tokens,time_s", r"unknown feature \('tokens'\). Did you mean 'num_tokens'"),
        ([(1, 0.1), (1, 0.2)], "num_tokens,time_s", "has 2 rows at num_tokens 1"),
        ([(1, 1, 0.1), (2, 2, 0.1)], "num_tokens,num_requests,time_s", "has 0 rows at num_tokens 1, num_requests 2"),
        ([(1, -0.1)], "num_tokens,time_s", "negative or infinite time"),
        ([(1, "x")], "num_tokens,time_s", r"t\.csv:2 time_s: is not a number \('x'\)"),
        ([(1, "nan")], "num_tokens,time_s", "is not a finite number"),
        ([], "num_tokens,time_s", "has no rows"),
    ],
)
def test_broken_tables_say_what_and_where(
    tmp_path: Path, rows: list[tuple[float, ...]], header: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GridTableModel.from_file(write_csv(tmp_path / "t.csv", rows, header))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        GridTableModel.from_file(tmp_path / "missing.csv")
    (tmp_path / "t.xlsx").write_text("")
    with pytest.raises(ConfigError, match=r"unknown kind \('.xlsx'\)"):
        GridTableModel.from_file(tmp_path / "t.xlsx")
    (tmp_path / "t.npz").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="npz"):
        GridTableModel.from_file(tmp_path / "t.npz")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"num_tokens,time_s\n1,0.1\n" * 400)[:30])
    with pytest.raises(ConfigError, match="cannot be read"):
        GridTableModel.from_file(tmp_path / "t.csv.gz")


# Operator tables -------------------------------------------------------------------------------------------------


def small_tables(folder: Path) -> Path:
    names = ["num_tokens", *OPERATORS, CACHE_WRITE]
    rows = [(n, *[0.001 * n * (i + 1) for i in range(len(OPERATORS))], 0.0005 * n) for n in range(1, 65)]
    write_csv(folder / "per_token_ops_ms.csv.gz", rows, ",".join(names))
    kv = 64 * np.arange(9)
    decode = 0.01 * np.arange(1, 17)[:, None] + 1e-4 * kv
    prefill = 0.02 * np.arange(1, 65)[:, None] + 1e-4 * kv
    np.savez(folder / "attention_ms.npz", kv=kv, decode=decode, prefill=prefill)
    return folder


def test_operator_tables_add_up_as_documented(tmp_path: Path) -> None:
    model = OperatorTableModel.from_folder(small_tables(tmp_path), TableOptions(num_layers=10))
    # 2 decodes with 64 and 65 tokens in memory, so 65 and 66 with the new one: the mean 65.5 is cut to 65 and rounded up to 128.
    shape = BatchFeatures(2, 129).with_chunk(3, 70).with_chunk(4, 0)
    per_token = sum(0.001 * 16 * (i + 1) for i in range(len(OPERATORS))) + 0.0005 * 9  # 9 tokens, rounded up to 16
    decode = (0.02 + 1e-4 * 128) * 1.1
    prefill = (0.02 * 5 + 1e-4 * 128) * 1.1  # root of 9 + 16 is 5; 70 and 0 round up to 128 in sum
    assert model.batch_time_s(shape) == pytest.approx(1e-3 * 10 * (per_token + decode + prefill), rel=1e-12)
    assert model.batch_time_s(BatchFeatures()) == 0


def test_without_the_new_token_the_context_is_what_lies_in_memory(tmp_path: Path) -> None:
    folder = small_tables(tmp_path)
    vidur, plain = (
        OperatorTableModel.from_folder(folder, TableOptions(decode_context_includes_new_token=flag))
        for flag in (True, False)
    )
    assert plain.batch_time_s(BatchFeatures(1, 64)) < vidur.batch_time_s(BatchFeatures(1, 64))
    assert plain.batch_time_s(BatchFeatures(1, 65)) == vidur.batch_time_s(BatchFeatures(1, 64))


@settings(max_examples=50)
@given(num_decodes=st.integers(0, 16), context=st.integers(0, 400), num_steps=st.integers(0, 60))
def test_decode_runs_equal_single_steps_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, num_decodes: int, context: int, num_steps: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "operator_tables"
    if not folder.is_dir():
        folder.mkdir()
        small_tables(folder)
    model = OperatorTableModel.from_folder(folder)
    first = num_decodes * context
    single = [model.batch_time_s(BatchFeatures(num_decodes, first + i * num_decodes)) for i in range(num_steps)]
    assert model.decode_run_times_s(num_decodes, first, num_steps).tolist() == single


def test_batches_beyond_the_tables_are_refused(tmp_path: Path) -> None:
    model = OperatorTableModel.from_folder(small_tables(tmp_path))
    with pytest.raises(ExecutorError, match=r"a step of 65 tokens lies outside of the tables \(up to 64\)"):
        model.batch_time_s(BatchFeatures().with_chunk(65, 0))
    with pytest.raises(ExecutorError, match=r"decode attention of 17 requests.*up to 16 requests and 512"):
        model.batch_time_s(BatchFeatures(17, 0))
    with pytest.raises(ExecutorError, match=r"prefill attention of 8 tokens over a context of 576"):
        model.batch_time_s(BatchFeatures().with_chunk(8, 513))
    with pytest.raises(ExecutorError, match="decode attention"):
        model.decode_run_times_s(1, 400, 200)


def test_broken_operator_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        OperatorTableModel.from_folder(tmp_path)
    assert len(caught.value.problems) == 2
    folder = small_tables(tmp_path)
    with pytest.raises(ConfigError, match="does not run from 0 in steps of 32"):
        OperatorTableModel.from_folder(folder, TableOptions(context_grain=32))
    np.savez(folder / "attention_ms.npz", kv=64 * np.arange(9), decode=np.zeros((4, 9)))
    with pytest.raises(ConfigError, match="has no column 'prefill'"):
        OperatorTableModel.from_folder(folder)
    write_csv(folder / "per_token_ops_ms.csv.gz", [(1, 2)], "num_tokens,add")
    with pytest.raises(ConfigError, match="has no column 'attn_pre_proj'"):
        OperatorTableModel.from_folder(folder)


# Vidur's published step times ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vidur() -> OperatorTableModel:
    return OperatorTableModel.from_folder(VIDUR)


@needs_vidur
def test_the_documented_formula_is_followed_exactly(vidur: OperatorTableModel) -> None:
    """Computed again from the files with nothing of the model but its result."""
    with gzip.open(VIDUR / "per_token_ops_ms.csv.gz", "rt") as file:
        operators = {int(row["num_tokens"]): {k: float(v) for k, v in row.items()} for row in csv.DictReader(file)}
    attention = np.load(VIDUR / "attention_ms.npz")
    at_rounded = [
        "attn_pre_proj",
        "attn_post_proj",
        "mlp_up_proj",
        "mlp_down_proj",
        "mlp_act",
        "attn_rope",
        "input_layernorm",
        "post_attention_layernorm",
        "add",
    ]
    random = np.random.default_rng(7)
    for _ in range(300):
        processed = random.integers(1, 8000, random.integers(0, 100)).tolist()  # Vidur's count, with the new token
        chunks = [
            (int(n), int(c)) for n, c in zip(random.integers(1, 250, 3), random.integers(0, 4000, 3), strict=True)
        ]
        chunks = chunks[: int(random.integers(0, 4))]
        num_tokens = len(processed) + sum(n for n, _ in chunks)
        if not num_tokens:
            continue
        layer = sum(operators[(num_tokens + 7) // 8 * 8][name] for name in at_rounded)
        layer += operators[num_tokens]["attn_kv_cache_save"]
        if processed:
            context = (int(sum(processed) / len(processed)) + 63) // 64
            layer += attention["decode"][len(processed) - 1, context] * (1.1 if len(processed) > 1 else 1)
        if chunks:
            context = sum((c + 63) // 64 for _, c in chunks)
            row = round(sqrt(sum(n * n for n, _ in chunks)))
            layer += attention["prefill"][row - 1, context] * (1.1 if len(chunks) > 1 else 1)
        shape = BatchFeatures().with_decodes(len(processed), sum(processed) - len(processed))
        for n, c in chunks:
            shape = shape.with_chunk(n, c)
        assert vidur.batch_time_s(shape) == pytest.approx(1e-3 * 32 * layer, rel=1e-12)


@needs_vidur
def test_a_small_simulation_on_the_tables_gives_vidurs_times_for_all_requests(vidur: OperatorTableModel) -> None:
    """Vidur's rules (README beside the data) in a few lines, timed by the model: every request's TTFT and E2E must come out.

    This pins what a decode's context counts: without the new token E2E is off by up to 2 %.
    """
    with gzip.open(VIDUR / "W3_workload.csv.gz", "rt") as file:
        work = [
            (float(r["arrived_at"]), int(r["num_prefill_tokens"]), int(r["num_decode_tokens"]))
            for r in csv.DictReader(file)
        ]
    with gzip.open(VIDUR / "W3_requests.csv.gz", "rt") as file:
        expected = [(float(row["ttft"]), float(row["e2e"])) for row in csv.DictReader(file)]
    ttft, e2e = simulate(vidur, work)
    assert ttft == pytest.approx([first for first, _ in expected], rel=1e-5)
    assert e2e == pytest.approx([last for _, last in expected], rel=1e-5)


def simulate(model: OperatorTableModel, work: list[tuple[float, int, int]]) -> tuple[list[float], list[float]]:
    done, ttft, e2e = [0] * len(work), [0.0] * len(work), [0.0] * len(work)
    waiting, running = list(range(len(work))), list[int]()
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, work[waiting[0]][0])
        decodes = [r for r in running if done[r] >= work[r][1]]
        chunks = list[tuple[int, int]]()
        budget = 512 - len(decodes)
        for request in [r for r in running if done[r] < work[r][1]] + [r for r in waiting if work[r][0] <= now]:
            if budget <= 0 or len(decodes) + len(chunks) >= 128:
                break
            chunks.append((request, min(work[request][1] - done[request], budget)))
            budget -= chunks[-1][1]
        shape = BatchFeatures().with_decodes(len(decodes), sum(done[r] for r in decodes))
        for request, size in chunks:
            shape = shape.with_chunk(size, done[request])
            if request in waiting:
                waiting.remove(request)
                running.append(request)
        now += model.batch_time_s(shape)
        for request, size in [(r, 1) for r in decodes] + chunks:
            arrived, prompt, output = work[request]
            done[request] += size
            if done[request] == prompt:
                ttft[request] = now - arrived
            if done[request] == prompt + output - 1:
                e2e[request] = now - arrived
                running.remove(request)
    return ttft, e2e
