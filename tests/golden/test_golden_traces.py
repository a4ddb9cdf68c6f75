"""Do the policies reproduce every recorded run, and does the comparison notice when they do not?"""

from __future__ import annotations

import gzip
import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import compare_folder, vidur
from tests.golden.readers.__main__ import main
from tests.golden.readers.folder import report

SYSTEMS = ("vllm_v1", "nano_old", "nano_new", "minivllm_doc", "minivllm_real")


@pytest.fixture(scope="session")
def golden_dir(shared_dir: Path) -> Path:
    folder = shared_dir / "golden"
    if not folder.is_dir():
        pytest.skip(f"recorded decisions absent: no folder {folder}")
    return folder


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_recorded_decision_is_reproduced(golden_dir: Path, system: str) -> None:
    results = list(compare_folder(golden_dir / system))
    assert results
    for result in results:
        told = result.difference.lines() if result.difference else []
        assert result.matches, "\n".join([f"{result.system}/{result.name}", *told])
        assert result.num_compared


@pytest.fixture
def one_trace(golden_dir: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of its own for one recorded run, and the run."""
    with gzip.open(golden_dir / "vllm_v1" / "preempt_fcfs.json.gz", "rt") as stream:
        trace = json.load(stream)
    folder = tmp_path / "traces"
    (folder / "vllm_v1").mkdir(parents=True)
    return folder, trace


def written(folder: Path, trace: dict[str, Any]) -> Path:
    (folder / "vllm_v1" / "changed.json").write_text(json.dumps(trace))
    return folder


def preempting_step(trace: dict[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = next(step for step in trace["steps"] if step.get("preempted"))
    return step


def test_a_difference_is_told_with_both_sides(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    step = preempting_step(trace)
    right = list(step["preempted"])
    step["preempted"] = ["r0"]
    out = StringIO()
    assert not report(written(folder, trace), out)
    told = out.getvalue()
    assert f"step {step['step']}: preempted" in told
    assert "recorded: ['r0']" in told
    assert f"here:     {right}" in told
    assert "free blocks:" in told
    assert "0 of 1 traces match" in told


@pytest.mark.parametrize(
    "field", ["sched", "kind", "computed", "preempted", "free_sched", "free_end", "running", "num_waiting", "waiting"]
)
def test_each_field_is_compared(one_trace: tuple[Path, dict[str, Any]], field: str) -> None:
    folder, trace = one_trace
    step = preempting_step(trace)
    value = step[field]
    step[field] = value + 1 if isinstance(value, int) else value[1:]
    (result,) = compare_folder(written(folder, trace))
    assert result.difference is not None
    assert (result.difference.step, result.difference.field) == (str(step["step"]), field)


def test_an_end_that_is_not_recorded_is_noticed(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    next(step for step in trace["steps"] if step.get("finished")).pop("finished")
    (result,) = compare_folder(written(folder, trace))
    assert result.difference is not None
    assert result.difference.field == "finished"


def test_requests_left_at_the_end_are_noticed(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    del trace["steps"][-3:]
    (result,) = compare_folder(written(folder, trace))
    assert result.difference is not None
    assert result.difference.field == "requests left"


def test_an_unknown_kind_of_trace_is_no_match(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    (result,) = compare_folder(written(folder, {**trace, "schema": "vllm-sched-golden-9"}))
    assert not result.matches


def test_the_command_tells_by_its_exit_code(
    one_trace: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trace = one_trace
    monkeypatch.setattr("sys.argv", ["golden", str(written(folder, trace))])
    assert main() == 0
    assert "1 of 1 traces match" in capsys.readouterr().out
    preempting_step(trace)["free_end"] = -1
    written(folder, trace)
    assert main() == 1
    monkeypatch.setattr("sys.argv", ["golden", str(folder / "nothing")])
    assert main() == 2


# Vidur


@pytest.fixture
def vidur_folder(golden_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "vidur"
    shutil.copytree(golden_dir / "vidur", folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)
    return folder


def test_every_request_gets_vidurs_times(golden_dir: Path) -> None:
    """Within 1e-9, once the digits are put back that the tables at hand were rounded by; see the module `rounding`."""
    (result,) = compare_folder(golden_dir / "vidur")
    assert result.matches, result.difference and result.difference.lines()
    assert result.num_compared == 500


@pytest.mark.parametrize(
    "settings", [{"chunk_size": 504}, {"max_batch_size": 3}, {"num_blocks": 2000}, {"watermark_fraction": 0.9}]
)
def test_other_scheduling_is_not_mistaken_for_rounding(vidur_folder: Path, settings: dict[str, Any]) -> None:
    (vidur_folder / "settings.json").write_text(json.dumps(settings))
    (result,) = compare_folder(vidur_folder)
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
    (result,) = compare_folder(vidur_folder)
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
        list(compare_folder(vidur_folder))
