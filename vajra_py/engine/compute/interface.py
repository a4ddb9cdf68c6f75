"""Messages between the controller, which decides, and a worker, which computes.

The worker keeps state (block tables, sampling parameters, last sampled token and progress of each row),
so a step carries changes only: a request in steady decode costs one small integer.

Invariants:
    - Everything here is plain data without tensors: it can be pickled to another process and recorded.
    - A `slot` is a small integer that names a request inside the worker, in [0, `RunnerOptions.max_requests`), from the step
      that lists it in `new` until the step that lists it in `freed`. A slot freed in a step may be reused in the same step.
    - Within a step the worker acts in this order: `freed`, `new`, `tables`, `copies` (in their own order), compute, sample.
    - A sampled token depends on the request alone (its tokens, its parameters, its seed), not on what else was in the batch,
      up to the last bits of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vajra_py.runtime.kv import BlockCopy

LOST_ROW = "its logits are not finite numbers, so that no token can be sampled"
"""Error of a row without finite logits."""
NOTHING_LEFT = "its allowed_token_ids, bad_words and min_tokens leave no token that can be sampled"
"""Error of a row whose constraints leave no token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop parameters of a request. Values are validated at the API, not here.

    The order is vLLM's: allowed tokens, bad words, biases; then transformers': penalties, temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: largest number of output tokens. Applied by the controller.
        temperature: logits are divided by it; 0 takes the largest logit (greedy).
        top_k: only the k largest logits, or all (None).
        top_p: the fewest tokens, largest first, whose probabilities reach this; in (0, 1].
        min_p: only tokens with at least this fraction of the largest probability; in [0, 1].
        presence_penalty: subtracted from the logit of every token in the output.
        frequency_penalty: the same, times the token's count.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it, negative ones multiplied.
        seed: of the request's own random stream; None lets the controller draw one.
        logprobs: number of most likely tokens to report with each token (0: the token alone), or None for no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens from the second on; its request uses no cached prefix, since
            cached tokens have no logits.
        stop: strings that end the request. Applied by the controller.
        stop_token_ids: tokens that end the request, besides the model's own.
        min_tokens: no token that would end the request is sampled before this many output tokens.
        ignore_eos: the model's own end-of-sequence tokens do not end the request.
        allowed_token_ids: only these tokens; None: all.
        logit_bias: (token, value added to its logit), each token once.
        bad_words: strings that the output must not contain. They become `bad_words_token_ids` where there is a tokenizer
            (`vajra_py.engine.tokenizer.with_bad_words`), before a request is submitted.
        bad_words_token_ids: token sequences that the output never completes, even after a prompt that ends with their start.
        include_stop_str_in_output: the stop string, or the text of the token, that ends the request is part of its text.
            Applied by the controller.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class NewRow:
    """Assignment of a slot to a request.

    Attributes:
        slot: its name from now on.
        sampling: its sampling parameters.
        seed: of its random stream: `sampling.seed`, or one that the controller drew.
        prompt_token_ids: its prompt; read only when `needs_prompt(sampling)`, may be empty otherwise.
        output_token_ids: its output so far (of a request that lost its slot and got another); read only when
            `needs_outputs(sampling)`.
        num_output_tokens: their number; always read (`min_tokens`, the place in the random stream).
        adapter: its LoRA adapter, which is in a slot whenever a step computes it; empty: the base model.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    num_output_tokens: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """A slot's block table in a KV-parallel group changed: from entry `start` on it is `block_ids` (entries before stay)."""

    slot: int
    start: int
    block_ids: Sequence[int]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to compute whose ids the worker does not have: part of a prompt, or tokens to recompute.

    Attributes:
        slot: of their request.
        token_ids: one or more.
        num_computed: position of the first of them: tokens of this request that are in KV memory already.
        samples: True if a token is sampled from the last token's logits (the chunk reaches the last known token).
        followers: the tokens to score that follow the chunk's first ones: the k-th gets its
            log-probability from the logits of the k-th token. For requests with `prompt_logprobs`.
        groups: with KV parallelism, the groups that compute it: each holds `kv_group_tokens` earlier tokens of the
            request, the last one those behind them, this chunk's included.
        num_drafts: number of the last tokens that are drafts: a token is sampled from the logits of each of them too, and of the
            token before them. For requests whose sampling depends neither on their output nor on penalties.
        num_outputs: output tokens of the request so far, where drafts may have been rejected since the last step; None: as many
            as were sampled.
    """

    slot: int
    token_ids: Sequence[int]
    num_computed: int
    samples: bool
    followers: Sequence[int] = ()
    groups: Sequence[int] = ()
    num_drafts: int = 0
    num_outputs: int | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled from it."""
        return 1 + self.num_drafts if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's batch, as changes to the worker's state.

    Attributes:
        chunks: rows whose tokens are given.
        decodes: slots in steady decode: compute the last sampled token at the next position, and sample.
        new: slots taken.
        freed: slots released, before `new`.
        tables: block tables that grew or changed.
        copies: KV blocks to move between device and host before computing, in this order.
    """

    chunks: Sequence[Chunk] = ()
    decodes: Sequence[int] = ()
    new: Sequence[NewRow] = ()
    freed: Sequence[int] = ()
    tables: Sequence[TableUpdate] = ()
    copies: Sequence[BlockCopy] = ()


class LoadAdapter(NamedTuple):
    """Copy of an adapter into a slot, in order with steps: earlier ones may use the slot's old content, later ones its new content.

    Attributes:
        number: of the load among those of its replica.
    """

    number: int
    name: str
    slot: int


@dataclass(frozen=True, slots=True)
class LookaheadDecodes:
    """Decodes to start before the scheduler has decided which of them are needed.

    Attributes:
        decodes: slots of requests without log-probabilities and whose sampling does not depend on their outputs
            (`needs_outputs`).
        growing: those whose next token starts a new block: it is written to a spare one, until the step with the row
            supplies the block id; at most `RunnerOptions.spare_blocks`.
    """

    decodes: Sequence[int]
    growing: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LookaheadStep:
    """A step, and decodes that will probably follow, to start before this one's tokens are available.

    Attributes:
        step: to compute now.
        begun: those of its decodes that the previous `ahead` has started; its other rows are dropped, and the rest of
            this step is computed after them.
        ahead: decodes to start after it, or None.
    """

    step: StepInput
    begun: Sequence[int] = ()
    ahead: LookaheadDecodes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's own distribution (before penalties, temperature and truncation).

    Attributes:
        logprob: of the sampled token.
        rank: number of more likely tokens, plus 1.
        top: (token id, log-probability) of the most likely ones, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of a step.

    Attributes:
        slots: rows that sampled: the step's `decodes` in order, then its sampling `chunks` in order. In a step with drafts chunks
            have any order, and one with drafts is there once for each token, in order.
        token_ids: their tokens.
        duration_s: from the step's start on the device to its sampled tokens on the host.
        logprobs: by slot, for the requests with `logprobs`.
        prompt_logprobs: by slot, of the `followers` of its chunk, and perhaps of those of earlier ones before them.
        faults: by slot, the reason that a row could not be computed or sampled. Its token id and KV are invalid; the other
            rows are not affected.
    """

    slots: Sequence[int]
    token_ids: Sequence[int]
    duration_s: float
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)


class AdapterSource(NamedTuple):
    """A LoRA adapter: its name, and the folder that `peft` wrote."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Model, device and sizes that a runner is loaded with.

    Attributes:
        model: directory of a Hugging Face model.
        random_weights: make weights from the directory's config.json and `seed` instead of reading them.
        seed: of random weights.
        device: "cpu", "cuda" or "cuda:N".
        dtype: "auto" (the checkpoint's; float32 on the CPU), "float32", "float16" or "bfloat16".
        block_size: tokens of a KV block.
        max_model_len: longest sequence, or None for the model's own.
        max_requests: slots.
        max_step_tokens: largest number of tokens of one step (for the memory profile and buffers).
        max_drafts: most drafts of a row in a step (for the memory profile).
        max_graph_rows: largest batch of decodes that runs as a captured CUDA graph; 0: none does.
        spare_blocks: additional KV blocks, for decodes that are started ahead.
        num_threads: threads of CPU computation, or None to leave them as they are.
        tensor_parallel_size: ranks that share every layer.
        pipeline_stages: parts that the layers are divided into, one after another.
        kv_groups: KV-parallel groups, each of which holds the whole model and KV blocks of its own.
        kv_group_tokens: tokens of one request that one group holds; read with several groups.
        rank: this rank among the replica's, which are counted by group, in it by stage, in it by tensor-parallel rank.
        rendezvous: address at which ranks meet (`tcp://host:port` or `file:///path`), with more than one.
        self_check: compare with transformers' own attention while loading.
        fused: use this package's own (faster) forward pass for model types that it supports, else transformers'.
        adapters: LoRA adapters that requests may have; their weights are kept in host memory.
        max_loras: slots for adapters, each as large as the largest needs.
    """

    model: str
    random_weights: bool = False
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_requests: int = 256
    max_step_tokens: int = 2048
    max_drafts: int = 0
    max_graph_rows: int = 256
    spare_blocks: int = 0
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_stages: int = 1
    kv_groups: int = 1
    kv_group_tokens: int = 0
    rank: int = 0
    rendezvous: str | None = None
    self_check: bool = True
    fused: bool = True
    adapters: tuple[AdapterSource, ...] = ()
    max_loras: int = 0

    @property
    def num_ranks(self) -> int:
        """Processes that compute one replica."""
        return self.tensor_parallel_size * self.pipeline_stages * self.kv_groups

    @property
    def tensor_rank(self) -> int:
        """Place of this rank among those that share its layers."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // self.tensor_parallel_size % self.pipeline_stages

    @property
    def kv_group(self) -> int:
        """KV-parallel group of this rank."""
        return self.rank // (self.tensor_parallel_size * self.pipeline_stages)

    def rank_of(self, kv_group: int, stage: int, tensor_rank: int) -> int:
        """The rank at this place."""
        return (kv_group * self.pipeline_stages + stage) * self.tensor_parallel_size + tensor_rank


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and types of a loaded model on this rank.

    Attributes:
        model_type: transformers' name of the architecture.
        num_parameters: of the whole model.
        weight_bytes: on this rank.
        num_layers: attention layers.
        num_query_heads: on this rank, of the first layer.
        num_kv_heads: likewise.
        head_dim: of keys, likewise.
        kv_bytes_per_token: K and V of all layers, on this rank.
        block_size: tokens of a KV block.
        max_model_len: longest sequence.
        vocab_size: rows of the output layer.
        eos_token_ids: the model's own end-of-sequence tokens.
        dtype: name of the computing type.
        device: name of the device.
        forward: "fused" (this package's forward pass) or "transformers".
    """

    model_type: str
    num_parameters: int
    weight_bytes: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_token: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    forward: str


class PendingStep(Protocol):
    """A submitted step; on a CPU it is complete already."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output. Called once, in the order of submission."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A `PendingStep` that was computed at submission."""

    output: StepOutput

    def result(self) -> StepOutput:
        """See `PendingStep`."""
        return self.output


class ModelRunner(Protocol):
    """One device's model. Not thread-safe."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """Number of KV blocks that fit beside a step of `max_step_tokens`.

        `memory_fraction` in (0, 1] is the share of the device's (on a CPU: of the free) memory that weights, a step's
        buffers and KV memory take together.

        Raises:
            ConfigError: not one sequence of `max_model_len` fits.
        """

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate KV memory, and host memory to swap to. Called once, before the first step.

        Raises:
            ExecutorError: it does not fit.
        """

    def submit(self, step: StepInput) -> PendingStep:
        """Start a step. On a GPU the next one may be submitted before the result of this one is taken.

        Raises:
            ExecutorError: the device failed or ran out of memory, or the step contradicts earlier ones.
        """

    def run(self, step: StepInput) -> StepOutput:
        """Return `submit(step).result()`."""

    def close(self) -> None:
        """Release memory and leave the group of ranks. May be called twice."""


class LookaheadRunner(ModelRunner, Protocol):
    """A runner that can start a step before the scheduler has decided on it."""

    def run_ahead(self, work: LookaheadStep) -> StepOutput:
        """Return the output of `work.step`; `work.ahead` is submitted after it if a device computes asynchronously. Raises like `submit`.

        A step without `begun` rows undoes the decodes that were started ahead, and so does `submit`.
        """

    def begin_ahead(self) -> None:
        """Compute the decodes to start ahead that were not submitted; for a caller that is idle after delivering the output.

        Raises like `submit`. Without this call they are computed with the step that has them as `begun`.
        """


class KvRunner(ModelRunner, Protocol):
    """A runner whose KV can be copied to and from another one of the same model."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block on this rank, over all its layers."""

    def export_kv(self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Copy KV blocks into a buffer of `kv_block_bytes` each, after all steps submitted before. Raises `ExecutorError`."""

    def import_kv(
        self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8], copies: Sequence[BlockCopy] = ()
    ) -> None:
        """Copy the buffer that another runner's `export_kv` has filled into KV blocks, before all later steps.

        `copies`: KV blocks to move between device and host before. Raises `ExecutorError`.
        """

    def mark(self) -> object:
        """Return a mark on the device behind everything submitted so far; None where nothing is under way when a call returns."""

    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        """Copy KV blocks between device and host, in this order. Raises `ExecutorError`.

        `after`: a mark. With it, any thread may call: the copies are made after what is before the mark and beside steps submitted
        since, which use other blocks, and are complete on return. Copies of one direction are made by one thread at a time.
        """


class AdapterRunner(ModelRunner, Protocol):
    """A runner with slots for LoRA adapters."""

    def load_adapter(self, name: str, slot: int) -> None:
        """Copy an adapter's weights into a slot, after all steps submitted before; none of them uses the slot's old content. Raises `ExecutorError`."""
