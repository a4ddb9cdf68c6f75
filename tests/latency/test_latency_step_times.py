"""Every run says where its step times come from, and a comparison whether it shows more than they are known to be off by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vajra_py import api as vajra
from vajra_py.contract.latency import BatchFeatures, ModelDescription
from vajra_py.latency import (
    REAL,
    AffineModel,
    BundleOptions,
    Calibration,
    ProfileBundleModel,
    RooflineConfig,
    StepTimes,
    combined_step_times,
    load_model,
    read_bundle,
    step_times_of,
)
from vajra_py.metrics.comparison.step_time_trust import judged_differences, step_time_origins
from vajra_py.metrics.report.report import render_report

EXPERIMENT: dict[str, Any] = {
    "version": 1,
    "preset": "vllm-v1",
    "replica": {"memory": {"num_blocks": 2000}},
    "workload": {
        "type": "synthetic",
        "num_requests": 60,
        "arrivals": {"type": "poisson", "rate": 20.0},
        "prompt_tokens": {"type": "constant", "value": 200},
        "output_tokens": {"type": "constant", "value": 40},
    },
    "backend": {"simulator": {"latency": {"type": "affine", "base_s": 0.005, "per_token_s": 2e-5}}},
    "output": {"decision_log": False},
}


def ran(folder: Path, name: str, **changes: Any) -> vajra.RunData:
    return vajra.run(vajra.load({**EXPERIMENT, "name": name, **changes}), folder=folder / name)


def test_each_kind_of_model_says_what_it_is(bundle: Path) -> None:
    analytic = step_times_of(RooflineConfig(model="Llama-3.1-8B", device="h100").build())
    assert (
        analytic.sentence == "analytic: roofline of Llama-3.1-8B on h100-sxm; never compared with a run of this engine"
    )
    given = step_times_of(AffineModel(base_s=0.1))
    assert given.sentence == "given: AffineModel, figures of the experiment's author"
    model = load_model("Llama-3.1-8B")
    measured = step_times_of(ProfileBundleModel(read_bundle(bundle), model))
    assert measured.kind == "measured"
    assert "NVIDIA RTX PRO 6000 inside vLLM 0.19.0" in measured.sentence
    errors = {"ttft_s": -0.021, "tpot_s": 0.004}
    fitted = Calibration("meta-llama/Llama-3.1-8B", "RTXPRO6000", 1, {}, {}, "100 of 300 requests of a run", errors)
    calibrated = step_times_of(ProfileBundleModel(read_bundle(bundle), model, BundleOptions(calibration=fitted)))
    assert calibrated.sentence.endswith("a run; error of means where it was checked: TTFT 2.1%, TPOT 0.4%")
    assert REAL.sentence == "real: computed by the engine"
    assert "; 7 times beyond what was measured" in StepTimes("measured", "x", num_fallback=7).sentence


def test_predictions_beyond_the_measurements_are_counted_once_for_each_model(bundle: Path) -> None:
    options = BundleOptions(reach=1.0, fallback=RooflineConfig(model="Llama-3.1-8B", device="h100").build())
    one, same, other = (ProfileBundleModel(read_bundle(bundle), load_model("Llama-3.1-8B"), options) for _ in range(3))
    for model, count in ((one, 2), (same, 2), (other, 3)):
        for _ in range(count):
            model.batch_time_s(BatchFeatures().with_chunk(10_000, 0))
    assert combined_step_times({"a": one, "b": one, "c": other}).num_fallback == 5
    assert combined_step_times({"a": one, "b": same}).num_fallback == 4
    assert combined_step_times({"a": one, "b": one}) == step_times_of(one)


def test_summary_table_and_report_say_it(tmp_path: Path) -> None:
    run = ran(tmp_path, "only")
    sentence = run.summary.value("step_times.sentence")
    assert sentence == "given: AffineModel, figures of the experiment's author"
    assert step_time_origins([run]) == [(sentence, [])]
    assert "Step times are given: AffineModel" in render_report([run])


@pytest.mark.parametrize(("error", "verdict"), [(0.9, "no more than"), (0.0001, "more than")])
def test_a_comparison_says_whether_it_shows_more_than_the_known_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float, verdict: str
) -> None:
    known = ModelDescription("calibrated", "made up", {"ttft_s": error, "tpot_s": error, "e2e_s": error})

    class Known(AffineModel):
        def describe(self) -> ModelDescription:
            return known

    monkeypatch.setattr("vajra_py.latency.config.AffineModel", Known)
    runs = [
        ran(tmp_path, f"batch-{size}", replica={"max_batch_size": size, "memory": {"num_blocks": 2000}})
        for size in (8, 10)
    ]
    sentences = judged_differences(runs, vajra.compare(runs))
    assert len(sentences) == 3
    assert any(f", {verdict} the step times' known error of" in sentence for sentence in sentences)


def test_nothing_is_judged_where_errors_are_unknown(tmp_path: Path) -> None:
    runs = [ran(tmp_path, "a"), ran(tmp_path, "b", replica={"max_batch_size": 4, "memory": {"num_blocks": 2000}})]
    assert judged_differences(runs, vajra.compare(runs)) == []
