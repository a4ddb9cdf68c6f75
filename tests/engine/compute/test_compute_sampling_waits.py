"""Sampling on a device: one launch, and nothing that waits for it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from vajra_py.engine.compute import NewRow, SamplingParams

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from vajra_kernels.launch import Launch  # noqa: E402
from vajra_py.engine.compute.sampling import logprobs  # noqa: E402
from vajra_py.engine.compute.sampling.sampler import Sampler  # noqa: E402

VOCAB = 50
ROWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(top_k=5, top_p=0.5, min_p=0.1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(frequency_penalty=0.5, presence_penalty=0.1, logprobs=3),
    SamplingParams(min_tokens=9, stop_token_ids=(4, 7), logprobs=0, prompt_logprobs=2),
]


class Device:
    """Tensors without values in the place of a GPU's: whoever asks for a value, or for a shape that hangs on one, fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launch] = []
        self.read: list[Any] = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(logprobs, "to_host", lambda tensor: self.read.append(tensor) or tensor)
        monkeypatch.setattr(Launch, "run", lambda launch: self.launches.append(launch))

    def logits(self, num_rows: int) -> Any:
        return torch.empty((num_rows, VOCAB), dtype=torch.bfloat16, device="meta")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def sampler_of(rows: list[SamplingParams]) -> Sampler:
    made = Sampler(len(rows), VOCAB, (1,), torch.device("meta"))
    for slot, params in enumerate(rows):
        made.add(NewRow(slot, params, slot, prompt_token_ids=[3, 4], output_token_ids=[5], num_output_tokens=1))
    return made


def test_a_step_of_every_parameter_is_one_launch_that_nobody_waits_for(device: Device) -> None:
    sampler = sampler_of(ROWS)
    for step in range(1, 4):
        tokens, found = sampler.sample(device.logits(len(ROWS)), np.arange(len(ROWS)))
        assert tokens.device.type == "meta"
        assert [launch.kernel.__name__ for launch in device.launches] == ["sample_kernel"] * step
    assert found is not None
    assert found[0] == [4, 5]
    sampler.score(device.logits(3), [1, 2, 3], 5)
    # What is read later comes in four tensors, each step's and the prompt's.
    assert [tuple(one.shape) for one in device.read] == [(2,), (2,), (2, 3), (2, 3)] * 3 + [(3,), (3,), (3, 2), (3, 2)]


def test_greedy_rows_need_no_launch(device: Device) -> None:
    sampler_of(ROWS[:1]).sample(device.logits(1), np.arange(1))
    assert device.launches == []


def test_the_kernel_gets_what_the_requests_asked_for(device: Device) -> None:
    """The same numbers as torch's own path, which the other tests of sampling hold to their definitions."""
    from vajra_kernels.operands import Column

    sampler = sampler_of(ROWS)
    parameters = sampler._parameters
    assert parameters[:, Column.TEMPERATURE].tolist() == [0.0, 0.8, 1.0, 0.0, 1.0, 1.0]
    assert parameters[:, Column.TOP_K].tolist() == [50, 50, 5, 50, 50, 50]
    assert parameters[2, [Column.TOP_P, Column.MIN_P]].tolist() == [0.5, 0.1]
    assert parameters[4, [Column.FREQUENCY, Column.PRESENCE, Column.REPETITION]].tolist() == [0.5, 0.1, 1.0]
    histories = parameters[:, Column.HISTORY].tolist()
    assert histories == [-1, -1, -1, 0, 1, -1]
    sampler.sample(device.logits(6), np.arange(6))
    assert device.launches[0].arguments["seen_ptr"].shape == (2, VOCAB)
    for slot in (3, 4):
        sampler.remove(slot)
    assert sampler._histories.add([1], []) in (0, 1), "rows that came back are used again"
    assert sampler._histories.seen.shape[0] == 2


@pytest.mark.parametrize(
    ("waits", "error", "message"),
    [
        (lambda x: x.max().item(), RuntimeError, "item() cannot be called on meta tensors"),
        (lambda x: bool((x > 0).any()), RuntimeError, "item() cannot be called on meta tensors"),
        (lambda x: x[x > 0], NotImplementedError, "torch.nonzero()"),
        (lambda x: x.tolist(), NotImplementedError, "Cannot copy out of meta tensor"),
        (lambda x: x.cpu(), NotImplementedError, "Cannot copy out of meta tensor"),
    ],
    ids=["item", "bool", "mask", "tolist", "cpu"],
)
def test_the_stand_in_sees_what_waits(device: Device, waits: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        waits(device.logits(2))
