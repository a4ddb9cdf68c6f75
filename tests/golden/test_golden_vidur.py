"""Compare the `sarathi` preset with recorded request times of the Vidur simulator."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.readers import Result, vidur
from tests.golden.readers.vidur_tables import CACHE_WRITE, OPERATORS, VidurTables

NAME = "W3"


@pytest.fixture(scope="module")
def recorded(shared_dir: Path) -> Path:
    folder = shared_dir / "golden" / "vidur"
    if not folder.is_dir():
        pytest.skip(f"recorded request times absent: no folder {folder}")
    return folder


def compared(folder: Path) -> Result:
    return vidur.compare("vidur", folder / f"{NAME}{vidur.WORKLOAD}")


@pytest.fixture
def vidur_folder(recorded: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "vidur"
    shutil.copytree(recorded, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)
    return folder


def test_every_request_gets_vidurs_times(recorded: Path) -> None:
    """Within 1e-9, once the digits are put back that the tables at hand were rounded by; see the module `rounding`."""
    result = compared(recorded)
    assert result.matches, result.difference and result.difference.lines()
    assert result.num_compared == 500


@pytest.mark.parametrize(
    "settings", [{"chunk_size": 504}, {"max_batch_size": 3}, {"num_blocks": 2000}, {"watermark_fraction": 0.9}]
)
def test_other_scheduling_is_not_mistaken_for_rounding(vidur_folder: Path, settings: dict[str, Any]) -> None:
    (vidur_folder / "settings.json").write_text(json.dumps(settings))
    result = compared(vidur_folder)
    assert result.difference is not None
    assert result.difference.field in ("ttft", "e2e", "the simulation")


def test_one_late_request_is_not_mistaken_for_rounding(vidur_folder: Path) -> None:
    path = vidur_folder / "W3_requests.csv.gz"
    with gzip.open(path, "rt") as stream:
        lines = stream.read().splitlines()
    columns = lines[0].split(",")
    row = lines[250].split(",")
    row[columns.index("e2e")] = str(float(row[columns.index("e2e")]) + 1e-5)
    lines[250] = ",".join(row)
    with gzip.open(path, "wt") as stream:
        stream.write("\n".join(lines))
    result = compared(vidur_folder)
    assert result.difference is not None


def test_settings_are_read_from_a_formula() -> None:
    text = """
    exec_time_s = 1e-3*80*( attn_pre_proj+mlp_up_proj+2*all_reduce [at N16 = num_tokens rounded up to a multiple of 16]
       + attn_kv_cache_save [at the exact num_tokens] + decode_attn*(1.2 if >1 decode requests else 1) + prefill_attn)
    chunk size 1,024, at most 64 sequences a step, block size 32, 12,000 KV blocks, watermark 2.5 %
    """
    settings = vidur.settings_in(text)
    assert (settings.num_layers, settings.token_grain, settings.attention_overhead) == (80, 16, 1.2)
    assert settings.rounded == {"attn_pre_proj": 1.0, "mlp_up_proj": 1.0, "all_reduce": 2.0}
    assert settings.exact == {"attn_kv_cache_save": 1.0}
    assert (settings.chunk_size, settings.max_batch_size, settings.block_size) == (1024, 64, 32)
    assert (settings.num_blocks, settings.watermark_fraction) == (12_000, 0.025)
    assert vidur.settings_in("") == vidur.Settings()


def test_a_column_that_no_formula_mentions_is_refused(vidur_folder: Path) -> None:
    path = vidur_folder / "per_token_ops_ms.csv.gz"
    with gzip.open(path, "rt") as stream:
        header, *rows = stream.read().splitlines()
    with gzip.open(path, "wt") as stream:
        stream.write("\n".join([f"{header},lm_head", *(f"{row},0.5" for row in rows)]))
    with pytest.raises(ValueError, match="lm_head"):
        compared(vidur_folder)


def test_the_documented_formula_is_followed_exactly(recorded: Path) -> None:
    """Computed again from the files with nothing of the reader but its result."""
    with gzip.open(recorded / "per_token_ops_ms.csv.gz", "rt") as file:
        operators = {int(row["num_tokens"]): {k: float(v) for k, v in row.items()} for row in csv.DictReader(file)}
    attention = np.load(recorded / "attention_ms.npz")
    tables = vidur.read_tables(recorded, NAME, vidur.Settings()).step_times(vidur.Settings())
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
        layer = (
            sum(operators[(num_tokens + 7) // 8 * 8][name] for name in OPERATORS) + operators[num_tokens][CACHE_WRITE]
        )
        if processed:
            context = (int(sum(processed) / len(processed)) + 63) // 64
            layer += attention["decode"][len(processed) - 1, context] * (1.1 if len(processed) > 1 else 1)
        if chunks:
            context = sum((c + 63) // 64 for _, c in chunks)
            row = round(sqrt(sum(n * n for n, _ in chunks)))
            layer += attention["prefill"][row - 1, context] * (1.1 if len(chunks) > 1 else 1)
        step_s = tables.step_s(len(processed), sum(processed) - len(processed), chunks)
        assert step_s == pytest.approx(1e-3 * 32 * layer, rel=1e-12)


def test_a_small_simulation_on_the_tables_gives_vidurs_times_for_all_requests(recorded: Path) -> None:
    """Vidur's rules (README beside the data) in a few lines, timed by the tables: every request's TTFT and E2E must come out.

    This pins what a decode's context counts: without the new token E2E is off by up to 2 %.
    """
    with gzip.open(recorded / "W3_workload.csv.gz", "rt") as file:
        work = [
            (float(r["arrived_at"]), int(r["num_prefill_tokens"]), int(r["num_decode_tokens"]))
            for r in csv.DictReader(file)
        ]
    with gzip.open(recorded / "W3_requests.csv.gz", "rt") as file:
        expected = [(float(row["ttft"]), float(row["e2e"])) for row in csv.DictReader(file)]
    tables = vidur.read_tables(recorded, NAME, vidur.Settings()).step_times(vidur.Settings())
    ttft, e2e = simulate(tables, work)
    assert ttft == pytest.approx([first for first, _ in expected], rel=1e-5)
    assert e2e == pytest.approx([last for _, last in expected], rel=1e-5)


def simulate(tables: VidurTables, work: list[tuple[float, int, int]]) -> tuple[list[float], list[float]]:
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
        step_s = tables.step_s(
            len(decodes), sum(done[r] for r in decodes), [(size, done[request]) for request, size in chunks]
        )
        for request, _ in chunks:
            if request in waiting:
                waiting.remove(request)
                running.append(request)
        now += step_s
        for request, size in [(r, 1) for r in decodes] + chunks:
            arrived, prompt, output = work[request]
            done[request] += size
            if done[request] == prompt:
                ttft[request] = now - arrived
            if done[request] == prompt + output - 1:
                e2e[request] = now - arrived
                running.remove(request)
    return ttft, e2e
