"""Figures that policies emit become a table, columns of requests, a section of the summary and a picture; unmet wishes become notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vajra_py as vajra
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec
from vajra_py.errors import PolicyError, RunError
from vajra_py.metrics.report.figures import FIGURES
from vajra_py.runtime.records import emitted


class Nothing(PolicyConfig):
    """No parameters."""


class Emits:
    """Longest prompt last; emits how long the queue seemed, and a score of each request twice."""

    key_motion = KeyMotion.STATIC

    def __init__(self, context: PolicyContext, value: float = 1.5) -> None:
        self._context = context
        self._value = value
        self._num_arrived = 0

    def key(self, request: Any, now: float) -> float:
        return float(request.num_prompt_tokens)

    def on_arrivals(self, requests: Any, now: float) -> None:
        for one in requests:
            self._num_arrived += 1
            self._context.emit("num_arrived", self._num_arrived, now)
            self._context.emit("score", 0.0, now, one)
            self._context.emit("score", one.num_prompt_tokens * self._value, now, one)


class Asks:
    """Shortest job first, by a predictor."""

    key_motion = KeyMotion.STATIC

    def __init__(self, context: PolicyContext) -> None:
        self._lengths = context.output_lengths

    def key(self, request: Any, now: float) -> float:
        estimate = self._lengths.predict(request)
        return 0.0 if estimate is None else estimate.mean_tokens


def spec(name: str, build: Any) -> PolicySpec:
    return PolicySpec(name, Layer.REQUEST_PRIORITIZER, Nothing, lambda params, context: build(context), "For a test.")


EMITS, ASKS = spec("emits", Emits), spec("asks", Asks)


def experiment(folder: Path, policy: str = "emits", **settings: Any) -> dict[str, Any]:
    simulator: dict[str, Any] = {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}
    return {
        "version": 1,
        "scheduling": {
            "request_prioritizer": policy,
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": "fixed_chunk",
        },
        "workload": {"type": "profile", "profile": "azure2023_conv", "num_requests": 30, "rate": 6},
        "backend": {"simulator": simulator | settings},
        "output": {"dir": str(folder)},
    }


def run(folder: Path, policy: PolicySpec, **settings: Any) -> vajra.RunData:
    return vajra.run(experiment(folder, policy.name, **settings), policies=[policy], overwrite=True)


def test_what_a_policy_emits_is_a_table_columns_and_a_section(tmp_path: Path) -> None:
    result = run(tmp_path, EMITS)
    rows = result.emitted().to_pylist()
    assert len(rows) == 90
    counted = [row for row in rows if row["name"] == "num_arrived"]
    assert [row["value"] for row in counted] == list(range(1, 31))
    assert {(row["replicaset"], row["policy"], row["index"]) for row in counted} == {("default", "emits", None)}
    frame = result.requests_frame()
    assert (frame["emitted.emits.score"] == 1.5 * frame["num_prompt_tokens"]).all(), "the last value counts"
    some = result.requests_frame("request_id", "emitted.emits.score")
    assert some.equals(frame[["request_id", "emitted.emits.score"]])
    with pytest.raises(RunError, match=r"no such column \(emitted.emits.scor\). Allowed: .*emitted.emits.score"):
        result.requests_frame("emitted.emits.scor")
    section = result.summary.value("emitted.emits")
    assert section["num_arrived"] == {"count": 30, "mean": 15.5, "min": 1.0, "p50": 15.0, "p99": 30.0, "max": 30.0}
    assert section["score"]["count"] == 60


def test_what_was_emitted_is_drawn(tmp_path: Path) -> None:
    result = run(tmp_path, EMITS)
    (figure,) = [one for one in FIGURES if one.key == "emitted_over_time"]
    assert figure.wanted([result])
    drawn = figure.draw([result])
    titles = {axes.get_ylabel(): axes.lines[0].get_ydata() for axes in drawn.axes if axes.lines}
    assert set(titles) == {"num_arrived", "score"}
    assert list(titles["num_arrived"]) == list(range(1, 31))


def test_a_run_whose_policies_emit_nothing_has_no_trace_of_it(tmp_path: Path) -> None:
    result = run(tmp_path, ASKS)
    assert not (result.path / "emitted.parquet").exists()
    assert result.emitted().num_rows == 0
    assert "emitted" not in json.loads((result.path / "summary.json").read_text())
    assert not [name for name in result.requests_frame().columns if name.startswith("emitted")]


@pytest.mark.parametrize(("name", "value"), [("Queue level", 1.0), ("level", float("nan")), ("level", float("inf"))])
def test_what_is_no_figure_ends_the_run_by_name(name: str, value: float, tmp_path: Path) -> None:
    class Wrong(Emits):
        def on_arrivals(self, requests: Any, now: float) -> None:
            self._context.emit(name, value, now)

    with pytest.raises(PolicyError, match="emit"):
        run(tmp_path, spec("wrong", Wrong))


def test_more_figures_than_are_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitted, "MAX_ROWS", 5)
    figures = emitted.EmittedFigures()
    emit = figures.of("default", "p")
    emit("before", 1.0, 0.0)
    assert len(figures) == 0, "nobody keeps them yet"
    figures.is_kept = True
    for value in range(8):
        emit("level", value, 0.1)
    assert (len(figures), figures.num_lost) == (5, 3)


def test_a_policy_that_asked_for_output_lengths_in_vain_is_named_in_the_notes(tmp_path: Path) -> None:
    (note,) = [one for one in run(tmp_path, ASKS).summary.data["warnings"] if "output lengths" in one]
    assert note.startswith("Policy 'asks' asked for output lengths, and the predictor 'none' knows none")
    for result in (run(tmp_path, ASKS, output_length={"type": "oracle"}), run(tmp_path, EMITS)):
        assert not [one for one in result.summary.data["warnings"] if "output lengths" in one]
