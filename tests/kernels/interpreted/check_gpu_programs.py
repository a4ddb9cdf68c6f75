"""The GPU programs with small sizes, kernels in the interpreter, and stand-ins for CUDA's functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks")]

import gpu_bench  # noqa: E402
import gpu_check  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_tokens  # noqa: E402

from vajra_kernels import checks  # noqa: E402
from vajra_kernels.launch import Launch  # noqa: E402
from vajra_py.engine.compute.step.runner import TorchRunner  # noqa: E402

# Overflow gives infinity, on a GPU without a warning.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TINY = gpu_engine.Shape("llama", 32, 48, 2, 64, 4, 2, 16)


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph` that repeats the captured launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def replay(self) -> None:
        for launch in list(self.launches):
            launch.run()


class WhenJoined:
    """Stand-in for a thread: the interpreter runs one kernel at a time."""

    def __init__(self, target: Callable[[], None]) -> None:
        self.join = target

    def start(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[list[Launch]] = []
    run = Launch.run

    def recorded(launch: Launch) -> None:
        for launches in captured:
            launches.append(launch)
        run(launch)

    @contextmanager
    def graph(made: Graph) -> Iterator[None]:
        captured.append(made.launches)
        yield
        captured.pop()

    def load(options: Any, capture: Any = None) -> TorchRunner:
        return plain(options, lambda function: function() or function)

    plain = TorchRunner.load
    monkeypatch.setattr(Launch, "run", recorded)
    monkeypatch.setattr(TorchRunner, "load", load)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (gpu_check, gpu_bench):
        monkeypatch.setattr(module, "require_gpu", lambda program: None)
        monkeypatch.setattr(module, "machine", lambda: {"chip": "none"})

    def milliseconds(function: Callable[[], object]) -> float:
        function()
        return 1.0

    monkeypatch.setattr(gpu_bench, "milliseconds", milliseconds)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(gpu_engine, "SMALL", replace(TINY, vocab_size=512))
    monkeypatch.setattr(gpu_engine, "NUM_STEPS", 2)
    monkeypatch.setattr(gpu_engine, "SLOTS", 3)
    monkeypatch.setattr(gpu_engine, "CHECKED_STEPS", 3)


def on_cpu(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The program's exit code, with "cuda" read as "cpu"."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    made = compile(source[source.index("def main()") :].replace('"cuda"', '"cpu"'), module.__file__, "exec")
    monkeypatch.setattr(sys, "argv", [module.__file__, *arguments])
    scope = dict(vars(module), __name__="program")
    exec(made, scope)
    return int(scope["main"]())


def test_every_check_runs_and_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "gpu_cases", lambda: checks.interpreter_cases()[:1])
    monkeypatch.setattr(gpu_check, "LARGE_ELEMENTS", 2**16)
    monkeypatch.setattr(gpu_check, "VOCABULARY", 60)
    monkeypatch.setattr(gpu_check, "SAMPLED", 1)
    monkeypatch.setattr(gpu_check, "DTYPES", (torch.float32,))
    monkeypatch.setattr(gpu_check, "KV_HEADS", (2,))
    monkeypatch.setattr(gpu_check, "WIDTHS", (64, 48))
    monkeypatch.setattr(gpu_check, "FLOAT32_TOLERANCE", 3e-6)
    monkeypatch.setattr(gpu_tokens, "cases", lambda: [gpu_tokens.Case("llama"), gpu_tokens.Case("gpt_oss", "bfloat16")])
    small_tokens(monkeypatch)
    path = tmp_path / "check.json"
    assert on_cpu(gpu_check, monkeypatch, "--output", str(path)) == 0
    found = json.loads(path.read_text())["checks"]
    assert all(one["passed"] for one in found)
    kinds = {one["check"].split()[0] for one in found}
    assert kinds == {"attention", "write", "layer", "merge", "copy", "graph", "sampling", "large", "tokens", "kernels"}
    known = [one["known"] for one in found if one["check"].startswith("tokens")]
    assert len(known) == 2
    assert all("captured as graphs" in one for one in known), known


def small_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests of a model that is small even for the interpreter, and hardly any memory."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    monkeypatch.setattr(gpu_tokens, "SHAPE", gpu_tokens.SHAPE | sizes | {"vocab_size": 64, "initializer_range": 0.3})
    for name, value in (("NUM_REQUESTS", 6), ("NUM_OUTPUTS", 6), ("NUM_BLOCKS", 7)):
        monkeypatch.setattr(gpu_tokens, name, value)


def test_a_plan_that_is_not_made_anew_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of graphs can fail: without the line that clears plans, the replay divides by the captured lengths."""
    source = Path(gpu_check.__file__).read_text(encoding="utf-8")
    begin = source.index("def check_graph(")
    code = source[begin : source.index("def check_large_cache")].replace("metadata.memo.decode_plans.clear()", "pass")
    scope = dict(vars(gpu_check))
    exec(compile(code, gpu_check.__file__, "exec"), scope)
    error, tolerance = scope["check_graph"](torch.float32, torch.Generator().manual_seed(0), "cpu")
    assert error > 100 * tolerance
    error, tolerance = gpu_check.check_graph(torch.float32, torch.Generator().manual_seed(0), "cpu")
    assert error <= tolerance


def test_every_measurement_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = gpu_bench.Shape(1, 2, 40, (2, 1), 16, 16)
    monkeypatch.setattr(gpu_bench, "DECODES", [(2, 300)])
    monkeypatch.setattr(gpu_bench, "CHUNKS", [(5, 5)])
    monkeypatch.setattr(gpu_bench, "SWEPT", [tiny, replace(tiny, query_len=1, num_seqs=2, kv_len=200)])
    monkeypatch.setattr(gpu_bench, "DECODE_TILES", gpu_bench.DECODE_TILES[:1])
    monkeypatch.setattr(gpu_bench, "CHUNK_TILES", gpu_bench.CHUNK_TILES[-1:])
    monkeypatch.setattr(gpu_bench, "LONG_PROMPT", 6)
    monkeypatch.setattr(gpu_bench, "VOCABULARY", 60)
    monkeypatch.setattr(gpu_bench, "NUM_SAMPLED", 3)
    monkeypatch.setattr(gpu_bench, "NUM_BLOCKS", 4)
    monkeypatch.setattr(gpu_bench, "WRITTEN", (2, 5))
    monkeypatch.setattr(gpu_bench, "COPY_BYTES", 2**10)
    monkeypatch.setattr(gpu_bench, "MATRIX", 8)
    monkeypatch.setattr(gpu_engine, "DECODES", [gpu_engine.Decodes(TINY, 2, 20, 400)])
    monkeypatch.setattr(gpu_engine, "SERVED", [gpu_engine.Served(TINY, 3, (2, 6), (2, 6), 24)])
    monkeypatch.setattr(gpu_engine, "BESIDE_COPIES", gpu_engine.Decodes(TINY, 2, 20, 400))
    monkeypatch.setattr(gpu_engine, "NUM_COPIED", 3)
    monkeypatch.setattr(gpu_engine, "Thread", WhenJoined)
    path = tmp_path / "bench.json"
    assert on_cpu(gpu_bench, monkeypatch, "--sweep", "--output", str(path)) == 0
    content = json.loads(path.read_text())
    assert set(content) == {"machine", "limits", "attention", "memory", "engine", "copies", "serving", "sweep"}
    assert content["engine"][0]["replayed"]
    assert content["engine"][0]["shape"]["hidden_size"] == 32
    assert [len(content["copies"][name]["gb_per_s"]) for name in ("alone", "to_host", "to_device", "both")] == [
        0,
        1,
        1,
        2,
    ]
    (served,) = content["serving"]
    assert 6 <= served["output_tokens"] <= 18
    assert 0.0 < served["outside_device_fraction"] < 1.0
    assert served["decode_floor_x"] > 0.0
    prompt = next(one for one in content["attention"] if one["query_len"] == one["kv_len"] and one["window"] is None)
    assert prompt["torch_sdpa_ms"] == prompt["torch_flex_ms"] == 1.0
    windowed = next(one for one in content["attention"] if one["window"] is not None)
    assert "no window" in windowed["torch_sdpa_left_out"]
    assert windowed["torch_flex_ms"] == 1.0
    assert not any("left_out" in one for one in content["sweep"])


@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(1, 9, None), (9, 9, None), (3, 9, None), (9, 9, 4)], ids=lambda one: str(one)
)
def test_torchs_own_attention_is_given_the_same_work(queries: int, keys: int, window: int | None) -> None:
    shape = gpu_bench.Shape(2, queries, keys, (4, 2), 16, 16, window)
    q, k, v = (torch.randn((2, heads, count, 16)) for heads, count in ((4, queries), (2, keys), (2, keys)))
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    hidden = (distance < 0) | (distance >= (keys if window is None else window))
    wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    peers = [gpu_bench.flex_peer] if window else [gpu_bench.flex_peer, gpu_bench.sdpa_peer]
    for peer in peers:
        torch.testing.assert_close(peer(shape, torch.device("cpu"))(q, k, v), wanted)


def test_a_part_that_fails_leaves_the_others_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    for name in ("bench_attention", "device_limits"):
        monkeypatch.setattr(gpu_bench, name, lambda *_: {})
    monkeypatch.setattr(gpu_bench, "bench_memory", fails)
    monkeypatch.setattr(gpu_engine, "bench_decodes", lambda *_: [1])
    monkeypatch.setattr(gpu_engine, "bench_copies", lambda *_: {})
    monkeypatch.setattr(gpu_engine, "bench_serving", lambda *_: [2])
    path = tmp_path / "bench.json"
    assert on_cpu(gpu_bench, monkeypatch, "--output", str(path)) == 1
    content = json.loads(path.read_text())
    assert "no memory" in content["memory"]["failed"]
    assert (content["engine"], content["serving"]) == ([1], [2])
