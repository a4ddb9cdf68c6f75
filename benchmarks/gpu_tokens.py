"""Tokens of the whole engine on this GPU against transformers' own logits, for `gpu_check`.

Each case runs requests of every kind of sampling under little memory, so that some are swapped out, with captured graphs and
look-ahead or without. Every token is then chosen again on the host from the logits that transformers' model gives for the same
prompt and the tokens before, so that one that differs does not make others differ.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from gpu_engine import Watch

if TYPE_CHECKING:
    from vajra_py import SamplingParams
    from vajra_py.engine import RequestOutput

FUSED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")
MODULES = ("gpt_oss",)
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
"""Models whose experts torch computes one by one in float32, reading back from the device which: that cannot be captured."""
NUM_REQUESTS, NUM_OUTPUTS = 24, 24
NUM_BLOCKS = 20
"""KV blocks of 16 tokens; eight requests of up to 84 tokens would need 48."""
TOLERANCES = {"float32": 0.003, "bfloat16": 0.4}
"""Share of tokens that may differ: one of all, where additions in another order decide. With 8 bits a sixth differs on a CPU,
of mixtures of experts a quarter; of wrong tokens nearly all would."""
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "sliding_window": 32,
    "use_sliding_window": True,
    "query_pre_attn_scalar": 64,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model of one family, and how it is computed."""

    family: str
    dtype: str = "float32"
    graphs: bool = True
    look_ahead: bool = True
    tier: bool = False
    """Instead of swapping, content goes to a tier on the host and comes back beside steps."""
    drafts: bool = False
    """Requests have drafts by n-gram lookup."""

    @property
    def label(self) -> str:
        """Its name among the checks."""
        chosen = (
            ("graphs", self.graphs),
            ("look-ahead", self.look_ahead),
            ("tier", self.tier),
            ("drafts", self.drafts),
        )
        how = [word for word, on in chosen if on]
        return f"tokens {self.family} {self.dtype} {' and '.join(how) or 'plain'}"

    @property
    def captures(self) -> bool:
        """True if its decodes must be replayed from graphs."""
        return self.graphs and not self.drafts and (self.dtype != "float32" or self.family not in MIXTURES)


def cases() -> Iterator[Case]:
    """One family in every way, and every family captured: in float32 for its tokens, in bfloat16 as it is used."""
    for graphs, look_ahead in ((False, False), (False, True), (True, False)):
        yield Case("llama", "float32", graphs, look_ahead)
    for graphs in (False, True):
        yield Case("llama", "float32", graphs, look_ahead=graphs, tier=True)
        yield Case("llama", "float32", graphs, look_ahead=False, drafts=True)
    for family in (*FUSED, *MODULES):
        for dtype in TOLERANCES:
            yield Case(family, dtype)


def check_tokens(case: Case, device: str) -> tuple[float, float, str]:
    """(share of tokens that differ, what is tolerated, the log's lines on graphs)."""
    with tempfile.TemporaryDirectory() as folder, notes() as said:
        _write_checkpoint(folder, case.family)
        outputs, counts = _outputs(folder, case, device)
        log = "; ".join(line for line in said if "graph" in line)
        for what in (
            *(["stored blocks", "loaded blocks"] if case.tier else ["swapped blocks"]),
            *(["accepted drafts"] if case.drafts else []),
            *(["replays"] if case.captures else []),
            *(["rows ahead"] if case.look_ahead else []),
        ):
            if not counts[what]:
                raise RuntimeError(
                    f"there were no {what}, so that nothing was checked ({dict(counts)}). The log: {log or said}"
                )
        different = _different(folder, case, outputs, device)
    num_tokens = sum(len(output.token_ids) for output, _ in outputs)
    return different / num_tokens, TOLERANCES[case.dtype], f"{log}; {dict(counts)}"


class _Kept(logging.Handler):
    """Keeps log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.messages.append(record.getMessage())


@contextmanager
def notes() -> Iterator[list[str]]:
    """Collect the engine's log messages within the context."""
    handler, logger = _Kept(), logging.getLogger("vajra_py.engine")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _write_checkpoint(folder: str, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SHAPE)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _kinds() -> list[SamplingParams]:
    from vajra_py import SamplingParams

    return [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.2, top_p=0.8),
        SamplingParams(temperature=0.8, top_k=20, min_p=0.02),
        SamplingParams(temperature=0.0, min_tokens=NUM_OUTPUTS // 2, stop_token_ids=tuple(range(3, 40))),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    ]


def _outputs(folder: str, case: Case, device: str) -> tuple[list[tuple[RequestOutput, SamplingParams]], Counter[str]]:
    """Every request's output with its parameters, and how often happened what a case is to show."""
    from vajra_py import LLM

    stream, watch = random.Random(0), Watch()
    kinds = _kinds()[: 1 if case.drafts else None]  # of many greedy tokens some come again
    longest, num_outputs = (40, 2 * NUM_OUTPUTS) if case.drafts else (60, NUM_OUTPUTS)
    vocab_size = SHAPE["vocab_size"]
    prompts = [
        [stream.randrange(3, vocab_size) for _ in range(stream.randint(1, longest))] for _ in range(NUM_REQUESTS)
    ]
    # Requests with penalties are never started ahead, so they come last.
    params = [
        replace(kinds[index * len(kinds) // NUM_REQUESTS], seed=index, max_tokens=num_outputs, ignore_eos=True)
        for index in range(NUM_REQUESTS)
    ]
    memory: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": NUM_BLOCKS,
        "reservation": "incremental",
        "watermark_fraction": 0.0,
    }
    if case.tier:  # every prompt comes twice, when what it left on the device has been evicted
        prompts = [prompts[index % (NUM_REQUESTS // 2)] for index in range(NUM_REQUESTS)]
        memory["tiers"] = [{"name": "host", "num_blocks": 200, "bandwidth_gb_s": 10.0, "write": "write_through"}]
    else:
        memory["host_blocks"] = 64
    chunks = {"chunk_size": 64, "preemption": "recompute" if case.tier else "swap"}
    config: dict[str, Any] = {
        "replica": {
            "draft": {"num_tokens": 3 if case.drafts else 0},
            "max_batch_size": 8,
            "max_model_len": 96,
            "memory": memory,
        },
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "fixed_chunk", "params": chunks},
        },
        "backend": {
            "engine": {
                "device": device,
                "dtype": case.dtype,
                "cuda_graphs": case.graphs,
                "look_ahead": case.look_ahead,
                "ngram": {"min_tokens": 1, "max_tokens": 3},
            }
        },
    }
    with LLM(folder, config, load=watch.load) as llm:
        outputs = llm.generate(prompts, params)
        assert watch.runner is not None
        counts = watch.counts | Counter({"replays": watch.runner.num_replays})
    failed = [f"{output.finish_reason}: {output.detail}" for output in outputs if output.detail]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed ({failed[0]})")
    return list(zip(outputs, params, strict=True)), counts


@torch.inference_mode()
def _different(folder: str, case: Case, outputs: Sequence[tuple[RequestOutput, SamplingParams]], device: str) -> int:
    """Return the number of tokens that differ from the host sampler's choice from transformers' logits."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    from vajra_py.engine.compute import NewRow
    from vajra_py.engine.compute.sampling.sampler import Sampler

    dtype = getattr(torch, case.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(device).eval()
    row, different = np.array([0]), 0
    for output, params in outputs:
        prompt, tokens = list(output.prompt_token_ids), list(output.token_ids)
        logits = model(input_ids=torch.tensor([prompt + tokens], device=device), use_cache=False).logits[0].cpu()
        assert params.seed is not None
        for count, token in enumerate(tokens):
            sampler = Sampler(1, logits.shape[1], (SHAPE["eos_token_id"],), torch.device("cpu"))
            sampler.add(NewRow(0, params, params.seed, prompt, tokens[:count], count))
            place = len(prompt) - 1 + count
            chosen, _ = sampler.sample(logits[place : place + 1], row)
            different += int(chosen[0]) != token
    return different
