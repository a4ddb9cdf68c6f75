"""Passes that are captured as CUDA graphs must not read what the device computes: seen with stand-ins, nothing is launched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from vajra_kernels import attention, backend, ops  # noqa: E402
from vajra_kernels.launch import Launch  # noqa: E402
from vajra_py.engine.compute import RunnerOptions  # noqa: E402
from vajra_py.engine.compute.model import fused, fused_parts  # noqa: E402
from vajra_py.engine.compute.model.fused import KNOWN_TYPES  # noqa: E402
from vajra_py.engine.compute.sampling import sampler  # noqa: E402
from vajra_py.engine.compute.step.runner import TorchRunner  # noqa: E402

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "argwhere", "masked_select", "_unique2",
         "unique_dim", "bincount", "repeat_interleave"}  # fmt: skip
"""Operators that give the host a value of a device's tensor, or a shape that hangs on one."""


class Capturing(TorchDispatchMode):
    """Refuses what a stream that is captured refuses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name in ("index", "index_put", "index_put_") and any(map(is_mask, args[1]))):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return func(*args, **(kwargs or {}))


class Reading(TorchFunctionMode):
    """Refuses what reads a tensor of the host at once, where a device's would be waited for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "cpu", "numpy"):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


def is_mask(index: Any) -> bool:
    return index is not None and index.dtype == torch.bool


def capture(run: Callable[[], None]) -> Callable[[], None]:
    with Capturing(), Reading():
        run()
    return run


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(launch: Launch) -> None:
        for name in ("out_ptr", "query_ptr", "lse_ptr"):
            if name in launch.arguments:
                launch.arguments[name].zero_()

    monkeypatch.setattr(Launch, "run", zeros)
    monkeypatch.setattr(fused_parts, "can_pack", lambda weight: False)
    for module in (backend, fused, attention, ops, sampler):
        monkeypatch.setattr(module, "uses_triton", lambda device: True)


@pytest.mark.parametrize("family", [*sorted(KNOWN_TYPES), "gpt_oss", "gpt2"])
def test_decodes_of_every_family_can_be_captured(
    family: str, small_models: Callable[[str], str], as_on_a_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    options = RunnerOptions(
        small_models(family), dtype="bfloat16", block_size=4, max_requests=8, max_graph_rows=8, self_check=False
    )
    runner = TorchRunner.load(options, capture)
    with caplog.at_level(logging.INFO):
        runner.allocate(16)
    assert runner._graphs is not None, caplog.text


@pytest.mark.parametrize(
    "read", [lambda x: bool(x.max() >= 0), lambda x: x.tolist()[0], lambda x: x[x > 3], lambda x: 3 in x]
)
def test_a_pass_that_reads_a_value_is_seen(
    small_models: Callable[[str], str], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], Any]
) -> None:
    def reads(forward: Any, token_ids: Any, *rest: Any) -> Any:
        read(token_ids)
        return plain(forward, token_ids, *rest)

    plain = fused.FusedForward.__call__
    monkeypatch.setattr(fused.FusedForward, "__call__", reads)
    runner = TorchRunner.load(RunnerOptions(small_models("llama"), block_size=4, self_check=False), capture)
    runner.allocate(16)
    assert runner._graphs is None
