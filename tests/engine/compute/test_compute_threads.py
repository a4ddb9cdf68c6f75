"""Models of one process that compute in threads of their own: none sees another's step, and loading harms no step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vajra_py.engine.compute import RunnerOptions

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

NUM_BLOCKS = 24
GPT2: dict[str, Any] = {
    "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2, "hidden_size": 48,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip


def jobs_of(compute_kit: Any, seed: int) -> list[Any]:
    """Requests whose steps have the same shapes whatever the seed: a mix-up of two steps would not show as an error."""
    rng = np.random.default_rng(seed)
    return [compute_kit.job(rng.integers(3, 90, 7).tolist(), 8) for _ in range(4)]


def tokens(compute_kit: Any, runner: Any, seed: int) -> list[list[int]]:
    jobs = jobs_of(compute_kit, seed)
    compute_kit.driver(runner, NUM_BLOCKS, 5).run(jobs)
    return [job.outputs for job in jobs]


@pytest.fixture
def handing_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Barrier]:
    """Every attention call of two threads waits for the other's: their steps run layer by layer beside each other."""
    from transformers import AttentionInterface

    from vajra_py.engine.compute.model import attention

    barrier = threading.Barrier(2)
    plain = attention._attend

    def meeting(*given: Any, **asked: Any) -> Any:
        if threading.current_thread().name.startswith("meets"):
            with suppress(threading.BrokenBarrierError):  # when the other one is done
                barrier.wait(20)
        return plain(*given, **asked)

    attention.register()
    registered = AttentionInterface()
    before = registered[attention.PLAIN]
    AttentionInterface.register(attention.PLAIN, meeting)
    yield barrier
    AttentionInterface.register(attention.PLAIN, before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_models_in_threads_compute_what_each_computes_alone(
    compute_kit: Any, tmp_path: Path, handing_over: threading.Barrier, family: str
) -> None:
    changes = {"llama": {}, "gpt2": GPT2, "deepseek_v3": DEEPSEEK}[family]
    folder = compute_kit.write_model(tmp_path / family, family, **changes)
    runners = [compute_kit.runner(folder, NUM_BLOCKS, fused=False) for _ in range(2)]
    expected = [tokens(compute_kit, runner, seed) for seed, runner in enumerate(runners)]
    assert expected[0] != expected[1]

    def work(index: int) -> list[list[int]]:
        try:
            return tokens(compute_kit, runners[index], index)
        finally:
            handing_over.abort()

    with ThreadPoolExecutor(2, "meets") as pool:
        found = list(pool.map(work, range(2)))
    assert found == expected


def test_a_step_waits_while_another_model_is_made(
    compute_kit: Any, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While transformers makes a model of another type, tensors of the whole process have that type by default."""
    from transformers import AutoModelForCausalLM

    from vajra_py.engine.compute.model.loading import load_model

    folder = small_models("llama")
    runner = compute_kit.runner(folder, NUM_BLOCKS)
    expected = tokens(compute_kit, runner, 0)
    loads, steps = threading.Event(), threading.Event()
    seen: list[Any] = []
    plain_make, plain_compute = AutoModelForCausalLM.from_pretrained, runner._compute

    def make(*given: Any, **named: Any) -> Any:
        torch.set_default_dtype(torch.bfloat16)  # as transformers does while it makes one
        try:
            loads.set()
            steps.wait(0.2)  # ends early where a step is admitted
            return plain_make(*given, **named)
        finally:
            torch.set_default_dtype(torch.float32)

    def compute(*given: Any) -> Any:
        seen.append(torch.get_default_dtype())
        steps.set()
        return plain_compute(*given)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", make)
    monkeypatch.setattr(runner, "_compute", compute)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(load_model, RunnerOptions(folder, dtype="bfloat16"))
        assert loads.wait(60)
        found = tokens(compute_kit, runner, 0)
        assert other.result().dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    assert found == expected


def test_models_made_at_once_have_the_weights_of_their_seeds(small_models: Callable[[str], str]) -> None:
    from vajra_py.engine.compute.model.loading import load_model

    def weights(seed: int) -> float:
        loaded = load_model(RunnerOptions(small_models("llama"), random_weights=True, seed=seed))
        return float(sum(parameter.double().sum() for parameter in loaded.model.parameters()))

    alone = [weights(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(weights, range(6))) == alone
