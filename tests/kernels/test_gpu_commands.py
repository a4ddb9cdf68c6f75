"""The two GPU commands: what they say without a GPU, and that the check passes where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("name", ["gpu_check", "gpu_bench"])
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


@pytest.mark.parametrize("name", ["gpu_check", "gpu_bench"])
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


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_are_right_on_this_gpu(repository_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, str(repository_root / "benchmarks" / "gpu_check.py"), "--output", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(record["passed"] for record in json.loads(path.read_text())["checks"])
