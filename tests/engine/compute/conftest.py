"""A worker's controller in miniature: random legal schedules over real KV blocks, with preemptions, swaps and shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vajra_py.engine.compute import (
    Chunk,
    ModelRunner,
    NewRow,
    RunnerOptions,
    SamplingParams,
    StepInput,
    TableUpdate,
    TokenLogprobs,
    load_runner,
)
from vajra_py.runtime.kv import BlockCopy, CopyDirection

if TYPE_CHECKING:
    import torch

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Job:
    """One request of a schedule."""

    prompt: list[int]
    num_outputs: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    adapter: str = ""
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    follows: bool = False
    """The worker's last token of this slot is the next one to compute."""

    @property
    def known(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.num_outputs


@dataclass
class Draft:
    """A step that is being formed."""

    chunks: list[tuple[Job, Chunk]] = field(default_factory=list)
    decodes: list[Job] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    members: list[Job] = field(default_factory=list)
    victims: list[Job] = field(default_factory=list)


class Driver:
    """Runs jobs on a runner in a random order of chunks and decodes; counts events."""

    def __init__(
        self, runner: ModelRunner, num_blocks: int, seed: int, num_host_blocks: int = 0, max_chunk: int = 9
    ) -> None:
        self.runner = runner
        self.block_size = runner.facts.block_size
        self.rng = np.random.default_rng(seed)
        self.free = [int(block) for block in self.rng.permutation(num_blocks)]
        self.references = [0] * num_blocks
        self.free_host = list(range(num_host_blocks))
        self.free_slots = list(range(3, 35))
        self.freed: list[int] = []
        self.max_chunk = max_chunk
        self.counts = {"recompute": 0, "swap": 0, "shared": 0}

    def run(self, jobs: Sequence[Job], together: int = 4) -> None:
        waiting, active = list(jobs), []
        while waiting or active:
            while waiting and len(active) < together:
                active.append(waiting.pop(0))
            self._step(active, jobs)
            for job in [one for one in active if one.done]:
                self._release(job)
                active.remove(job)
        assert sorted(self.free) == list(range(len(self.references))), "blocks were lost"
        self.runner.run(StepInput([Chunk(0, [3], 0, False)], freed=self.freed, tables=[TableUpdate(0, 0, [0])]))
        self.freed = []

    def _step(self, active: list[Job], jobs: Sequence[Job]) -> None:
        draft = Draft(freed=self.freed)
        self.freed = draft.freed
        for place in self.rng.permutation(len(active)).tolist():
            job = active[place]
            if job not in draft.victims and (not draft.members or self.rng.random() > 0.3):
                self._add(job, draft, active, jobs)
        assert draft.members, "the schedule stands still"
        step = StepInput(
            chunks=[chunk for _, chunk in draft.chunks],
            decodes=[slot_of(job) for job in draft.decodes],
            new=draft.new,
            freed=draft.freed,
            tables=draft.tables,
            copies=draft.copies,
        )
        output = self.runner.run(step)
        self.freed = []
        sampled = [*draft.decodes, *(job for job, chunk in draft.chunks if chunk.samples)]
        assert list(output.slots) == [slot_of(job) for job in sampled]
        for job, token in zip(sampled, output.token_ids, strict=True):
            job.outputs.append(token)
            job.follows = True
            if job.sampling.logprobs is not None:
                job.logprobs.append(output.logprobs[slot_of(job)])

    def _add(self, job: Job, draft: Draft, active: list[Job], jobs: Sequence[Job]) -> None:
        start = len(job.blocks)
        if job.slot is None:
            job.slot = self.free_slots.pop(0)
            told = job.prompt, list(job.outputs), len(job.outputs)
            draft.new.append(NewRow(job.slot, job.sampling, job.seed, *told, adapter=job.adapter))
            self._share(job, jobs)
            start = 0
        if job.host_blocks:
            if len(self.free) < len(job.host_blocks) + 1:
                if not draft.members and not self._make_room(job, draft, active, len(job.host_blocks) + 1):
                    return
                if len(self.free) < len(job.host_blocks) + 1:
                    return
            job.blocks = [self._take_block() for _ in job.host_blocks]
            pairs = zip(job.host_blocks, job.blocks, strict=True)
            draft.copies += [BlockCopy(source, target, CopyDirection.TO_DEVICE) for source, target in pairs]
            self.free_host += job.host_blocks
            job.host_blocks = []
            start = 0
        left = len(job.known) - job.num_computed
        count = int(self.rng.integers(1, min(left, self.max_chunk) + 1))
        fits = self._grow(job, job.num_computed + count, draft, active)
        if start != len(job.blocks):
            draft.tables.append(TableUpdate(job.slot, start, job.blocks[start:]))
        if not fits:
            return
        samples = count == left
        if samples and count == 1 and job.follows and self.rng.random() < 0.8:
            draft.decodes.append(job)
        else:
            tokens = job.known[job.num_computed : job.num_computed + count]
            draft.chunks.append((job, Chunk(job.slot, tokens, job.num_computed, samples)))
        job.num_computed += count
        job.follows = False
        draft.members.append(job)

    def _share(self, job: Job, jobs: Sequence[Job]) -> None:
        """Take over full blocks of another job that has the same beginning."""
        for other in jobs:
            if other is job or not other.blocks or other.adapter != job.adapter:
                continue
            same, limit = 0, min(other.num_computed, len(job.known) - 1)
            while same < limit and other.known[same] == job.known[same]:
                same += 1
            full = same // self.block_size
            if full:
                job.blocks = other.blocks[:full]
                for block in job.blocks:
                    self.references[block] += 1
                job.num_computed = full * self.block_size
                self.counts["shared"] += 1
                return

    def _take_block(self) -> int:
        block = self.free.pop()
        self.references[block] = 1
        return block

    def _grow(self, job: Job, num_tokens: int, draft: Draft, active: list[Job]) -> bool:
        missing = -(-num_tokens // self.block_size) - len(job.blocks)
        if missing > len(self.free) and not self._make_room(job, draft, active, missing):
            return False
        job.blocks += [self._take_block() for _ in range(missing)]
        return True

    def _make_room(self, job: Job, draft: Draft, active: list[Job], num_blocks: int) -> bool:
        while len(self.free) < num_blocks:
            others = [one for one in active if one is not job and one not in draft.members and one.blocks]
            if not others:
                return False
            victim = others[int(self.rng.integers(len(others)))]
            # Changes of this step must not undo its own assignments.
            draft.victims.append(victim)
            draft.tables = [update for update in draft.tables if update.slot != victim.slot]
            fresh = any(row.slot == victim.slot for row in draft.new)
            swapped_in = {copy.target for copy in draft.copies if copy.direction is CopyDirection.TO_DEVICE}
            shared = any(self.references[block] > 1 or block in swapped_in for block in victim.blocks)
            if len(self.free_host) >= len(victim.blocks) and not shared and not fresh and self.rng.random() < 0.7:
                victim.host_blocks = [self.free_host.pop() for _ in victim.blocks]
                pairs = zip(victim.blocks, victim.host_blocks, strict=True)
                draft.copies += [BlockCopy(source, target, CopyDirection.TO_HOST) for source, target in pairs]
                self._drop(victim)
                self.counts["swap"] += 1
            else:
                draft.new = [row for row in draft.new if row.slot != victim.slot]
                self._release(victim, was_told=not fresh)
                victim.num_computed = 0
                victim.follows = False
                self.counts["recompute"] += 1
        return True

    def _drop(self, job: Job) -> None:
        for block in job.blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
        job.blocks = []

    def _release(self, job: Job, was_told: bool = True) -> None:
        slot, job.slot = slot_of(job), None
        self._drop(job)
        if was_told:
            self.freed.append(slot)
        self.free_slots.append(slot)


def slot_of(job: Job) -> int:
    assert job.slot is not None
    return job.slot


@dataclass(frozen=True)
class ComputeKit:
    """Shared helpers of the tests of `engine.compute`."""

    job: type[Job] = Job
    driver: type[Driver] = Driver
    greedy: SamplingParams = GREEDY

    def runner(self, directory: Any, num_blocks: int = 64, num_host_blocks: int = 0, **options: Any) -> ModelRunner:
        made = load_runner(RunnerOptions(str(directory), **{"block_size": 4, "max_requests": 40, **options}))
        made.allocate(num_blocks, num_host_blocks)
        return made

    def expected_logits(self, directory: Any, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [n, vocab] of transformers' own forward pass over a whole sequence."""
        import torch

        model = reference_model(str(directory))
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits

    def reference(self, directory: Any) -> Any:
        """Transformers' own model."""
        return reference_model(str(directory))

    def write_model(self, directory: Any, family: str, **changes: Any) -> str:
        return write_small_model(directory, family, **changes)


_references: dict[str, Any] = {}


def reference_model(directory: str) -> Any:
    if directory not in _references:
        from transformers import AutoModelForCausalLM

        from vajra_py.engine.compute.model.loading import quiet

        with quiet():
            model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        _references[directory] = model.eval()
    return _references[directory]


@pytest.fixture(scope="session")
def compute_kit() -> ComputeKit:
    return ComputeKit()


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directory of a very small model of a family, float32, of random weights, made once."""
    made: dict[str, str] = {}

    def get(family: str) -> str:
        if family not in made:
            made[family] = write_small_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


SMALL_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
SMALL_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "mistral": {"sliding_window": 12},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 12, "partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
}


def write_small_model(directory: Any, family: str, **changes: Any) -> str:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vajra_py.engine.compute.model.loading import quiet

    config = AutoConfig.for_model(family, **{**SMALL_SHAPE, **SMALL_FAMILIES.get(family, {}), **changes})
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Norms and biases start at 1 and 0: give them values, so that mixing them up shows.
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, 0.0 if "gemma" in family or name.endswith("bias") else 1.0, 0.2)
        model.save_pretrained(directory)
    return str(directory)
