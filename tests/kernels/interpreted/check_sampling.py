"""The sampling kernel in Triton's interpreter, against sorting in float64."""

from __future__ import annotations

import pytest
import torch

from vajra_kernels.checks import sampling_inputs, sampling_mismatches
from vajra_kernels.operands import Column
from vajra_kernels.sampling import sample_tokens

# Overflow gives infinity, on a GPU without a warning.
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [37, 1024, 2500])
def test_tokens_are_those_of_sorting(dtype: torch.dtype, vocab_size: int, generator: torch.Generator) -> None:
    logits, parameters, seen = sampling_inputs(vocab_size, dtype, generator)
    tokens = sample_tokens(logits, parameters, seen)
    assert sampling_mismatches(tokens, logits, parameters, seen) == []


def parameters_of(num_rows: int, **columns: float) -> torch.Tensor:
    """Parameters of rows at temperature 1 without truncation, except for these columns; each with its own random number."""
    made = torch.zeros((num_rows, len(Column)), dtype=torch.float64)
    made[:, Column.TOP_K] = 10**6
    made[:, [Column.TEMPERATURE, Column.TOP_P, Column.REPETITION]] = 1.0
    made[:, Column.HISTORY] = -1.0
    made[:, Column.NUMBER] = (torch.arange(num_rows) + 0.5) / num_rows
    for name, value in columns.items():
        made[:, Column[name]] = value
    return made


NOTHING_SEEN = torch.zeros((1, 1), dtype=torch.int32)


def test_ties_are_kept_together_and_the_first_is_the_likeliest() -> None:
    logits = torch.zeros((6, 1500))
    logits[:, [3, 1030, 1400]] = 2.0
    for columns in ({"TOP_K": 1}, {"TOP_P": 1e-6}, {"MIN_P": 1.0}):
        found = sample_tokens(logits, parameters_of(6, **columns), NOTHING_SEEN)
        assert set(found.tolist()) == {3, 1030, 1400}, columns
    assert sample_tokens(logits, parameters_of(6, TEMPERATURE=0.0), NOTHING_SEEN).tolist() == [3] * 6


def test_numbers_at_the_ends_of_the_interval_give_tokens_that_are_kept() -> None:
    logits = torch.randn((2, 1100), generator=torch.Generator().manual_seed(0))
    logits[:, [0, 1099]] = float("-inf")
    parameters = parameters_of(2)
    parameters[:, Column.NUMBER] = torch.tensor([0.0, 1.0 - 2.0**-53])
    assert sample_tokens(logits, parameters, NOTHING_SEEN).tolist() == [1, 1098]


@pytest.mark.parametrize("temperature", [2.0**-126, 1e-20, 1e20, 3.4e38])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = torch.randn((4, 300), generator=torch.Generator().manual_seed(0)) * 1e4
    tokens = sample_tokens(logits, parameters_of(4, TEMPERATURE=temperature), NOTHING_SEEN)
    wanted = [37, 112, 187, 262] if temperature > 1 else logits.argmax(-1).tolist()
    assert tokens.tolist() == wanted


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_numbers_give_no_token(poison: float) -> None:
    logits = torch.randn((3, 1100), generator=torch.Generator().manual_seed(0))
    logits[1, 1070 if poison != float("-inf") else slice(None)] = poison
    for temperature in (0.0, 1.0):
        tokens = sample_tokens(logits, parameters_of(3, TEMPERATURE=temperature, TOP_P=0.9), NOTHING_SEEN).tolist()
        assert tokens[1] == -1
        assert min(tokens[0], tokens[2]) >= 0


def test_an_extreme_penalty_leaves_finite_logits() -> None:
    logits = torch.tensor([[50.0, 40.0, float("-inf"), 0.0], [-50.0, -40.0, -1.0, 0.0]])
    seen = torch.tensor([[1, 2, 2, 0]], dtype=torch.int32)
    parameters = parameters_of(2, TEMPERATURE=0.0, HISTORY=0.0, PRESENCE=2.0)
    parameters[:, Column.REPETITION] = torch.tensor([2.0**-126, 3e38])
    # The first two overflow to the largest number, in whose scale the other penalty is nothing.
    assert sample_tokens(logits, parameters, seen).tolist() == [0, 3]
