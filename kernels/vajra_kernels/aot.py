"""Compile launches ahead of time and report registers, spills, shared memory and the instructions used.

Compilation does not need the GPU: it uses the same ``Launch`` values that would run, with the specialisation that the
just-in-time compiler would choose.

Invariants:
    - Launches are compiled in a process without TRITON_INTERPRET (the interpreter's functions cannot be compiled).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vajra_kernels.launch import Launch

_POINTER_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class CompiledFigures:
    """Static properties of one compiled kernel.

    Attributes:
        registers: registers per thread.
        stack_bytes: stack per thread; above 0 means spills or indexed local arrays.
        shared_bytes: shared memory per program, static and dynamic.
        num_wgmma: number of ``wgmma.mma_async`` instructions in the PTX (Hopper's warp-group matrix products).
        num_mma: number of ``mma.sync`` instructions in the PTX.
        num_async_copies: number of ``cp.async`` instructions of 16 bytes in the PTX.
        max_pending_copies: the largest N of ``cp.async.wait_group N``; above 0 means that K/V copies of a later tile
            are in flight while a tile is multiplied.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    num_wgmma: int
    num_mma: int
    num_async_copies: int
    max_pending_copies: int


def compile_launch(launch: Launch, capability: tuple[int, int]) -> CompiledFigures:
    """Compile a launch for a compute capability, and read its properties from PTX and machine code."""
    compiled = triton.compile(
        ASTSource(fn=launch.kernel, **_signature(launch)),
        target=GPUTarget("cuda", capability[0] * 10 + capability[1], 32),
        options=launch.options,
    )
    ptx: str = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    return CompiledFigures(
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=int(compiled.metadata.shared),
        num_wgmma=ptx.count("wgmma.mma_async"),
        num_mma=ptx.count("mma.sync"),
        num_async_copies=len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10", ptx)),
        max_pending_copies=max(waits, default=0),
    )


def specialization(launch: Launch) -> str:
    """Return a key that identifies the machine code of a launch on one device."""
    tile = launch.tile
    return f"{launch.kernel.__name__} {tile.num_warps} {tile.num_stages} {_signature(launch)}"


def _signature(launch: Launch) -> Mapping[str, Any]:
    """Return the arguments of ``ASTSource`` that the just-in-time launcher would derive from the launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments.get(name)
        if name in launch.constants:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _POINTER_NAMES[value.dtype]
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            assert isinstance(value, int)
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return {"signature": signature, "constexprs": constants, "attrs": attributes}


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return REG, STACK, LOCAL and SHARED of the kernel in ``cubin``, read with the cuobjdump shipped with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", str(path)], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}
