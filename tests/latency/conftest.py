"""A small profile bundle whose times follow formulas, so that tests can compute a step's expected time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

LAYERS = (
    "qkv_proj",
    "rotary_emb",
    "o_proj",
    "gate_up_proj",
    "act_fn",
    "down_proj",
    "layernorm",
    "embedding",
    "final_layernorm",
)
TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048)
CHUNKS = (16, 256, 1024, 2048)
CONTEXTS = (0, 16, 1024, 8192)
DECODES = (1, 8, 64, 128)
DECODE_CONTEXTS = (16, 1024, 8192)


def dense_us(tokens: float) -> float:
    """Every layer of the bundle takes as long as every other."""
    return 10.0 + 0.05 * tokens


def attention_us(chunk: float, context: float, decodes: float, decode_context: float) -> float:
    """Linear in every axis, as the model interpolates."""
    return 5.0 + 0.02 * chunk + 1e-5 * chunk * context + 0.002 * decodes * decode_context


def head_us(sequences: float) -> float:
    """Each of the two operators of the head."""
    return 300.0 + sequences


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The folder of a bundle of Llama-3.1-8B with tp1 and tp2."""
    root = tmp_path / "profiles" / "RTXPRO6000" / "Llama-3.1-8B" / "bf16"
    for degree in (1, 2):
        write_degree(root / f"tp{degree}")
    meta = [
        "model: meta-llama/Llama-3.1-8B",
        "hardware: RTXPRO6000",
        "gpu: NVIDIA RTX PRO 6000",
        "vllm_version: 0.19.0",
    ]
    (root / "meta.yaml").write_text("\n".join([*meta, "variant: bf16", ""]))
    return root


def write_degree(folder: Path) -> None:
    """The CSV files of one tensor-parallel degree."""
    folder.mkdir(parents=True)
    write(folder / "dense.csv", "layer,tokens,time_us", ((name, n, dense_us(n)) for name, n in product(LAYERS, TOKENS)))
    heads = ((name, n, head_us(n)) for name, n in product(("lm_head", "sampler"), (1, 64, 256)))
    write(folder / "per_sequence.csv", "layer,sequences,time_us", heads)
    write(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention_rows())


def attention_rows() -> Iterator[tuple[float, ...]]:
    """Decodes alone, chunks alone, and both, with one hole in the grid."""
    for decodes, context in product(DECODES, DECODE_CONTEXTS):
        yield 0, 0, decodes, context, attention_us(0, 0, decodes, context)
    for chunk, context in product(CHUNKS, CONTEXTS):
        yield chunk, context, 0, 0, attention_us(chunk, context, 0, 0)
    for chunk, context, decodes, decode_context in product(CHUNKS, CONTEXTS, DECODES, DECODE_CONTEXTS):
        if (chunk, context, decode_context) != (256, 1024, 1024):
            yield chunk, context, decodes, decode_context, attention_us(chunk, context, decodes, decode_context)


def write(path: Path, header: str, rows: object) -> None:
    """A CSV file."""
    lines = [",".join(map(str, row)) for row in rows]  # type: ignore[attr-defined]
    path.write_text("\n".join([header, *lines, ""]))


@pytest.fixture
def edit() -> Callable[[Path, str, str], None]:
    """Replace a text in a file, once."""

    def replace(path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return replace
