"""The GPU commands: what they say without a GPU, that the check passes where there is one, and
that the measurement of predictions runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("gpu_check", "gpu_bench", "gpu_prediction")


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_gpu_one_line_and_code_2(name: str, repository_root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(repository_root / "benchmarks" / f"{name}.py"),
        "--output",
        str(tmp_path / "out.json"),
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{name}: torch ")
    assert "sees no CUDA device" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_results_are_not_tracked_unless_asked_for(name: str, repository_root: Path) -> None:
    code = (
        "import argparse, gpu_facts\nparser = argparse.ArgumentParser()\n"
        f"gpu_facts.output_arguments(parser, '{name}.json')\n"
        "for given in ([], ['--record']): print(parser.parse_args(given).output.relative_to(gpu_facts.ROOT))"
    )
    folder = repository_root / "benchmarks"
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    default, recorded = found.stdout.split()
    ignored = subprocess.run(["git", "check-ignore", "-q", default], cwd=repository_root, check=False)
    assert ignored.returncode == 0
    assert recorded == f"benchmarks/results/{name}.json"
    assert subprocess.run(["git", "check-ignore", "-q", recorded], cwd=repository_root, check=False).returncode == 1


@pytest.fixture
def tokens(repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part that checks the engine's tokens, with few requests."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(repository_root / "benchmarks"))
    import gpu_tokens

    for name, value in (("NUM_REQUESTS", 12), ("NUM_OUTPUTS", 16)):
        monkeypatch.setattr(gpu_tokens, name, value)
    return gpu_tokens


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_swapped_sampled_tokens_begun_ahead_are_those_of_transformers_logits(family: str, tokens: Any) -> None:
    error, _, known = tokens.check_tokens(tokens.Case(family, graphs=False), "cpu")
    assert error == 0.0, known


@pytest.mark.parametrize("how", [{"tier": True}, {"drafts": True, "look_ahead": False}], ids=["tier", "drafts"])
def test_tokens_from_a_tier_and_of_accepted_drafts_are_those_of_transformers_logits(how: Any, tokens: Any) -> None:
    error, _, known = tokens.check_tokens(tokens.Case("llama", graphs=False, **how), "cpu")
    assert error == 0.0, known


def test_every_family_is_captured_and_one_computed_in_every_way(tokens: Any) -> None:
    from vajra_py.engine.compute.model.fused import KNOWN_TYPES

    cases = list(tokens.cases())
    assert {case.family for case in cases if case.captures} == KNOWN_TYPES | {"gpt_oss"}
    ways = {
        (one.graphs, one.look_ahead)
        for one in cases
        if (one.family, one.dtype, one.tier or one.drafts) == ("llama", "float32", False)
    }
    assert len(ways) == 4
    assert len({case.label for case in cases}) == len(cases)


def changed(tokens: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    plain = tokens._outputs

    def outputs(*arguments: Any) -> Any:
        found, counts = plain(*arguments)
        change(found, counts)
        return found, counts

    monkeypatch.setattr(tokens, "_outputs", outputs)


def test_a_wrong_token_is_found(tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(found: Any, counts: Any) -> None:
        found[0][0].token_ids[2] ^= 1

    changed(tokens, monkeypatch, change)
    error, tolerance, _ = tokens.check_tokens(tokens.Case("llama", graphs=False), "cpu")
    assert error > tolerance


@pytest.mark.parametrize("what", ["rows ahead", "swapped blocks"])
def test_tokens_that_were_computed_otherwise_than_asked_for_prove_nothing(
    what: str, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(tokens, monkeypatch, lambda found, counts: counts.update({what: -counts[what]}))
    with pytest.raises(RuntimeError, match=f"there were no {what}"):
        tokens.check_tokens(tokens.Case("llama", graphs=False), "cpu")


def test_without_graphs_a_case_that_wants_them_fails_and_says_so(tokens: Any) -> None:
    with pytest.raises(RuntimeError, match="there were no replays"):
        tokens.check_tokens(tokens.Case("llama"), "cpu")


@pytest.fixture
def prediction(repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The measurement of predictions, with few requests and a short profile."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(repository_root / "benchmarks"))
    import gpu_prediction

    from vajra_py.experiment.profiling import live

    monkeypatch.setattr(live, "_LIVE_WAVES", (1, 2))
    monkeypatch.setattr(gpu_prediction, "FEWEST_REQUESTS", 6)
    return gpu_prediction


@pytest.fixture
def predict(prediction: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """Call it on the CPU; gives its exit code and what it wrote."""
    path = tmp_path / "out.json"
    command = [*("--model", "tiny", "--device", "cpu", "--passes", "1", "--random", "0"), "--arrivals", "0.01"]

    def call(*arguments: str) -> tuple[int, Any]:
        monkeypatch.setattr(sys, "argv", ["gpu_prediction", *command, "--output", str(path), *arguments])
        return prediction.main(), json.loads(path.read_text())

    return call


@pytest.mark.slow
def test_every_run_is_simulated_and_compared(
    prediction: Any, predict: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, content = predict()
    assert code == 0
    assert content["profile"]["facts"]["model_type"] == "llama"
    rows = content["rows"]
    assert [(row["load"], row["look_ahead"]) for row in rows] == [
        (load, ahead) for load in ("heavy", "moderate") for ahead in (True, True, True, False)
    ]
    for row in rows:
        assert set(prediction.METRICS) <= set(row["errors"])
        assert bool(row["engine"]["steps_begun_ahead"]) == row["look_ahead"]
        steps = row["steps"]
        assert steps["all"]["measured_s"] == pytest.approx(row["engine"]["busy_s"])
        assert steps["decode"]["num_steps"] > 0
        assert steps["decode"]["num_steps"] < steps["all"]["num_steps"]
    printed = capsys.readouterr().out
    assert all(f"| {row['load']} | {row['policy']} |" in printed for row in rows)
    assert f"of {len(content['orders'])} orders of policies are kept" in printed
    monkeypatch.setattr(prediction.EngineRun, "__init__", None)
    code, again = predict("--again")
    assert code == 0
    assert again["rows"] == rows
    assert again["seconds"] == content["seconds"]


@pytest.mark.slow
def test_what_a_failed_run_and_the_time_leave_is_written(
    prediction: Any, predict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(prediction.Prediction, "run", fails)
    code, content = predict()
    assert code == 1
    assert all("no memory" in row["failed"] for row in content["rows"])
    code, content = predict("--seconds", "0")
    assert code == 0
    assert {row["left_out"] for row in content["rows"]} == {"no time was left"}
    assert content["profile"]["errors"]
    assert predict("--again")[1]["rows"] == content["rows"]


def test_a_simulation_that_orders_policies_otherwise_is_shown(prediction: Any) -> None:
    def row(policy: str, measured: float, simulated: float) -> dict[str, Any]:
        errors = {"e2e_mean_ms": {"measured": measured, "simulated": simulated, "error": simulated / measured - 1.0}}
        return {"load": "heavy", "policy": policy, "look_ahead": True, "errors": errors}

    (pair,) = prediction.orders([row("a", 100.0, 90.0), row("b", 120.0, 80.0)])
    assert not pair["kept"]
    assert pair["measured"] == pytest.approx(0.2)
    rows = [row("a", 100.0, 90.0), row("c", 101.0, 70.0), row("b", 120.0, 95.0)]
    assert [(one["policies"], one["kept"]) for one in prediction.orders(rows)] == [
        (["a", "b"], True),
        (["c", "b"], True),
    ]
    assert "b over a" not in prediction.table(rows)


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_are_right_on_this_gpu(repository_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, str(repository_root / "benchmarks" / "gpu_check.py"), "--output", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(record["passed"] for record in json.loads(path.read_text())["checks"])
