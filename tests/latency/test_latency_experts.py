"""Experts take the time of the part of them that a GPU has, and what was not measured for that part is said or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.latency.measured import as_mixture, whole_experts_us, write_run
from vajra_py.contract import BatchFeatures
from vajra_py.errors import ConfigError
from vajra_py.experiment.measured.calibration import figures_of
from vajra_py.experiment.measured.run import read_measured_run
from vajra_py.latency import Link, ProfileBundleConfig, ProfileBundleModel, load_model
from vajra_py.latency.operators.collectives import Collectives
from vajra_py.latency.step_times import step_times_of

MICRO = 1e-6
NUM_LAYERS = 48
"""Qwen3-30B-A3B's, all with experts."""
PROMPT = BatchFeatures().with_chunk(1024, 0)
"""Reaches all 128 experts, and is larger than any batch in a CUDA graph."""


def of(path: Path, **settings: object) -> ProfileBundleModel:
    return ProfileBundleConfig.model_validate(
        {"path": str(path), "host": "none", "context_variation": 0.0, **settings}
    ).build()


@pytest.fixture
def mixture(bundle: Path) -> Path:
    as_mixture(bundle)
    return bundle


def experts_us(model: ProfileBundleModel) -> float:
    """Microseconds of one layer's experts for the prompt."""
    return model.breakdown_s(PROMPT)["experts"] / MICRO / NUM_LAYERS


@pytest.mark.parametrize(
    "gpus", [{"tensor_parallel": 2}, {"data_parallel": 2}, {"tensor_parallel": 2, "data_parallel": 2}]
)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_gpu_takes_the_time_of_its_part_of_the_experts(
    mixture: Path, gpus: dict[str, int], expert_parallel: bool
) -> None:
    """Cut or spread, each of n GPUs reads 1/n of the weights and multiplies 1/n as often."""
    count = gpus.get("tensor_parallel", 1) * gpus.get("data_parallel", 1)
    model = of(mixture, expert_parallel=expert_parallel, **gpus)
    assert experts_us(of(mixture)) == pytest.approx(whole_experts_us(1024, 128), rel=1e-6)
    assert experts_us(model) == pytest.approx(whole_experts_us(1024 / count, 128 / count), rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_as_the_profiler_takes_them_give_the_times_between_and_beyond_them(mixture: Path, ranks: int) -> None:
    """Powers of two up to 2,048 tokens, and no more experts than the tokens draw; a prompt of 6,000 tokens is beyond them."""

    def true_us(tokens: float, activated: float) -> float:
        return 20.0 + 3.0 * activated + 0.4 * tokens

    grid = [(2**i, 2**j) for i in range(12) for j in range(3, 8) if 2**j <= 8 * 2**i]
    rows = "".join(f"{tokens},{activated},{true_us(tokens, activated)}\n" for tokens, activated in grid)
    (mixture / "tp1" / "moe.csv").write_text(f"tokens,activated_experts,time_us\n{rows}")
    model = of(mixture, data_parallel=ranks, expert_parallel=True, cuda_graphs=False)
    for tokens in (3, 40, 700, 1500, 6000):
        reached = 128 * (1 - (1 - 8 / 128) ** tokens) / ranks
        step = model.breakdown_s(BatchFeatures().with_chunk(tokens, 0))["experts"] / MICRO / NUM_LAYERS
        expected = true_us(max(1.0, tokens / ranks), reached)
        assert step == pytest.approx(expected, rel=0.01 if tokens > 3 else 0.2)


def test_experts_that_were_not_measured_in_the_split_are_said_to_be_estimated(mixture: Path) -> None:
    estimated = step_times_of(of(mixture, data_parallel=2)).sentence
    assert "experts were not measured in this split, 1/2 of what was is assumed" in estimated
    for spread in (of(mixture), of(mixture, data_parallel=2, expert_parallel=True)):
        assert "not measured in this split" not in step_times_of(spread).sentence
    with pytest.raises(ConfigError, match=r"tensor_parallel: experts of .* are 768 wide, which 5 does not divide"):
        of(mixture, data_parallel=5)


def test_times_of_split_experts_serve_deployments_that_split_them(mixture: Path) -> None:
    (mixture / "tp2" / "moe.csv").write_text(
        "tokens,activated_experts,time_us\n1,8,30\n2048,8,30\n1,128,430\n2048,128,430\n"
    )
    split = of(mixture, tensor_parallel=2)
    assert experts_us(split) == pytest.approx(430, rel=1e-6)
    assert "not measured in this split" not in split.source
    # Spread over the GPUs, each expert is whole; on twice as many GPUs, what was measured is cut once more.
    whole = of(mixture, tensor_parallel=2, expert_parallel=True)
    assert experts_us(whole) == pytest.approx(whole_experts_us(512, 64), rel=1e-6)
    again = of(mixture, tensor_parallel=2, data_parallel=2)
    assert experts_us(again) == pytest.approx(30 + 400 * 56 / 120, rel=1e-6)
    assert "1/2 of what was" in again.source
    (mixture / "tp1" / "moe.csv").unlink()
    with pytest.raises(ConfigError, match=r"tp1/moe.csv: is missing, and .* expert_parallel needs times of whole"):
        of(mixture, tensor_parallel=2, expert_parallel=True)


def test_ranks_with_fewer_experts_than_a_token_draws_take_less_than_the_first_row(mixture: Path) -> None:
    """One token draws 8 of 128 experts; a rank of 16 has one of them, by the line through 8 and 128 and no less than its part."""
    spread = of(mixture, data_parallel=16, expert_parallel=True)
    step = spread.breakdown_s(BatchFeatures(16, 16 * 100))["experts"] / MICRO / NUM_LAYERS
    drawn = 8 * (1 - (1 - 8 / 128) ** 16)
    assert step == pytest.approx(50 - (8 - drawn) * 750 / 120, rel=1e-6)
    (mixture / "tp1" / "moe.csv").write_text("tokens,activated_experts,time_us\n1,8,50\n1,128,5000\n")
    steep = of(mixture, data_parallel=16, expert_parallel=True)
    step = steep.breakdown_s(BatchFeatures(16, 16 * 100))["experts"] / MICRO / NUM_LAYERS
    assert step == pytest.approx(50 * drawn / 8, rel=1e-6)


def test_one_prompt_goes_to_all_ranks_once() -> None:
    """Gathered from the rank that has it, it passes each link once, however many ranks there are."""
    model = load_model("Qwen3-30B-A3B")
    state = 1024 * model.hidden_size * 2

    def exchanged(ranks: int, tokens: int, all_tokens: int) -> float:
        return Collectives(model, 1, ranks, Link(1e9, 0.0), None).layers_s(tokens, all_tokens)

    once = 2 * NUM_LAYERS * state / 1e9
    assert [exchanged(ranks, 1024, 1024) for ranks in (2, 4, 8)] == pytest.approx(3 * [once])
    assert [exchanged(ranks, 1024, 1024 * ranks) for ranks in (2, 4, 8)] == pytest.approx([once, 3 * once, 7 * once])


def test_a_prompt_on_one_of_many_ranks_is_exchanged_as_on_one_of_two(mixture: Path) -> None:
    two, eight = (of(mixture, data_parallel=ranks, expert_parallel=True) for ranks in (2, 8))
    assert eight.breakdown_s(PROMPT)["all_reduce"] == pytest.approx(two.breakdown_s(PROMPT)["all_reduce"])


def test_feed_forward_layers_are_counted_in_the_layers_without_experts(
    bundle: Path, edit: Callable[[Path, str, str], None]
) -> None:
    """DeepSeek-V2-Lite has one of 27; Qwen3-30B-A3B has none, so that such rows are of what its experts' times have already."""
    dense = bundle / "tp1" / "dense.csv"
    with_rows = dense.read_text()
    as_mixture(bundle)
    without = of(bundle).breakdown_s(PROMPT)["dense"]
    dense.write_text(with_rows)
    assert of(bundle).breakdown_s(PROMPT)["dense"] == pytest.approx(without)
    edit(bundle / "meta.yaml", "Qwen/Qwen3-30B-A3B-Instruct-2507", "deepseek-ai/DeepSeek-V2-Lite")
    layer_us = 10.0 + 0.05 * 1024
    assert of(bundle).breakdown_s(PROMPT)["dense"] == pytest.approx(MICRO * layer_us * (27 * 5 + 3 + 2))
    dense.write_text("\n".join(line for line in with_rows.splitlines() if not line.startswith("down_proj")))
    with pytest.raises(ConfigError, match=r"has no times of down_proj, and DeepSeek-V2-Lite has 1 layers without"):
        of(bundle)


def test_ranks_that_share_experts_have_more_memory_for_the_cache(mixture: Path) -> None:
    """Each of two has half of the experts, cut or spread: 58 GB of them in all, 96 KiB of cache for a token."""
    one, two = of(mixture).kv_blocks(16), of(mixture, data_parallel=2).kv_blocks(16)
    model = load_model("Qwen3-30B-A3B")
    saved = 2 * model.routed_weights // 2 // (16 * model.kv_bytes_per_token)
    assert abs(two / 2 - (one + saved)) <= 1
    assert of(mixture, data_parallel=2, expert_parallel=True).kv_blocks(16) == two


def test_the_roofline_does_not_stand_in_for_ranks_that_it_does_not_have(mixture: Path) -> None:
    of(mixture, fallback="roofline")
    with pytest.raises(ConfigError, match=r"fallback: the roofline has no data-parallel ranks"):
        of(mixture, fallback="roofline", data_parallel=2)


def test_experts_are_fitted_wherever_a_model_has_them(mixture: Path, tmp_path: Path) -> None:
    run = read_measured_run(write_run(tmp_path / "run"))
    latency = {"type": "profile_bundle", "path": str(mixture)}
    assert "experts" in [figure.name for figure in figures_of(run, latency)]
