"""Messages between the controller, which decides, and a worker, which computes.

The worker keeps state (block tables, sampling parameters, last sampled token and progress of each slot), so a step
carries changes only: a request in steady decode costs one small integer.

Invariants:
    - All messages are plain data without tensors: they can be pickled to another process and recorded.
    - A `slot` is an integer in [0, `RunnerOptions.max_requests`). It names a request inside the worker, from the step
      that lists the slot in `new` until the step that lists it in `freed`. A slot freed in a step may be reused in the
      same step.
    - Within a step the worker acts in this order: `freed`, `new`, `tables`, `copies` (in list order), compute, sample.
    - A sampled token depends on the request alone (its tokens, its parameters, its seed), not on other requests in the
      batch, except that these may change the last bits of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vajra_py.runtime.kv import BlockCopy

LOST_ROW = "its logits are not finite numbers, so that no token can be sampled"
"""Fault of a row without finite logits."""
NOTHING_LEFT = "its allowed_token_ids, bad_words and min_tokens leave no token that can be sampled"
"""Fault of a row whose constraints leave no token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop parameters of a request. Values are validated at the API, not here.

    Allowed tokens, bad words and biases are applied first, in vLLM's order. Penalties, temperature, top-k, top-p and
    min-p follow, in transformers' order.

    Attributes:
        max_tokens: maximum number of output tokens. Enforced by the controller.
        temperature: logits are divided by it; 0 takes the largest logit (greedy).
        top_k: sample from the k largest logits only; None: from all.
        top_p: sample from the smallest set of most likely tokens whose probabilities add up to this; in (0, 1].
        min_p: sample only tokens with at least this fraction of the largest probability; in [0, 1].
        presence_penalty: subtracted from the logit of every token in the output.
        frequency_penalty: subtracted from a token's logit once for each time it is in the output.
        repetition_penalty: divides positive logits of tokens in the prompt or output, and multiplies negative ones.
        seed: seed of the request's own random stream; None: the controller draws one.
        logprobs: number of most likely tokens to report per token (0: only the sampled one); None: no report.
        prompt_logprobs: number of most likely tokens to report per prompt token, from the second on; None: no report.
            With a number, the request uses no cached prefix, since cached tokens have no logits.
        stop: strings that end the request. Enforced by the controller.
        stop_token_ids: tokens that end the request, besides the model's own.
        min_tokens: number of output tokens that must precede a token that ends the request.
        ignore_eos: True if the model's own end-of-sequence tokens do not end the request.
        allowed_token_ids: the only tokens that may be sampled; None: all.
        logit_bias: (token, value added to its logit), each token once.
        bad_words: strings that the output must not contain. `vajra_py.engine.tokenizer.with_bad_words` converts them to
            `bad_words_token_ids` before the request is submitted.
        bad_words_token_ids: sequences that the output must not contain; a match that begins in the prompt is allowed.
        include_stop_str_in_output: True if the request's text includes the stop string, or the text of the stop token,
            that ended it. Enforced by the controller.
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
        slot: slot of the request from now on.
        sampling: the request's sampling parameters.
        seed: seed of its random stream: `sampling.seed`, or a seed that the controller drew.
        prompt_token_ids: the request's prompt; can be empty unless `needs_prompt(sampling)`.
        output_token_ids: output so far if the request had a slot before; can be empty unless `needs_outputs(sampling)`.
        num_output_tokens: number of output tokens so far; always needed (for `min_tokens` and the random stream).
        adapter: LoRA adapter, which must be loaded whenever the request is computed; empty: the base model.
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
    """New entries of a slot's block table in one KV-parallel group: `block_ids` replace those from index `start` on."""

    slot: int
    start: int
    block_ids: Sequence[int]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens whose ids the step supplies: part of a prompt, tokens to recompute, or the newest token and its drafts.

    Attributes:
        slot: slot of the request.
        token_ids: the tokens, at least one.
        num_computed: position of the first token; this many earlier tokens of the request are in KV memory already.
        samples: True if a token is sampled from the last token's logits; the chunk then ends with the last known token.
        followers: tokens to score (for `prompt_logprobs`): the k-th by the logits of the chunk's k-th token.
        groups: with KV parallelism, the groups that compute the chunk. All but the last hold `kv_group_tokens` earlier
            tokens of the request each; the last one holds the tokens after those, including this chunk's.
        num_drafts: number of drafts at the end of `token_ids`. A token is sampled from the logits of each draft and of
            the token before the first draft. Only for requests without penalties, constraints on tokens, `min_tokens`
            and `logprobs`.
        num_outputs: number of output tokens so far, needed after steps with drafts, since the worker does not count
            accepted drafts; None: the worker's own count is right.
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
        """Number of tokens that are sampled from the chunk."""
        return 1 + self.num_drafts if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's batch, as changes to the worker's state.

    Attributes:
        chunks: rows whose tokens the step supplies.
        decodes: slots in steady decode: compute the last sampled token at the next position, and sample the next one.
        new: slots that are assigned to requests.
        freed: slots that are released, before `new`.
        tables: block tables that grew or changed.
        copies: KV blocks to copy between device and host before computing, in this order.
    """

    chunks: Sequence[Chunk] = ()
    decodes: Sequence[int] = ()
    new: Sequence[NewRow] = ()
    freed: Sequence[int] = ()
    tables: Sequence[TableUpdate] = ()
    copies: Sequence[BlockCopy] = ()


class LoadAdapter(NamedTuple):
    """Message to copy an adapter into a slot; earlier steps use the slot's old content, later steps its new content.

    Attributes:
        number: sequence number of the load among those of its replica.
        name: name of the adapter.
        slot: adapter slot to load it into.
    """

    number: int
    name: str
    slot: int


@dataclass(frozen=True, slots=True)
class LookaheadDecodes:
    """Decodes to start before the scheduler has decided which of them are needed.

    Attributes:
        decodes: slots of the requests to decode. Their sampling must not depend on their outputs (`needs_outputs`), and
            they must have no log-probabilities.
        growing: slots whose next token starts a new KV block; at most `RunnerOptions.spare_blocks`. The token's KV is
            in a spare block until the step that lists the slot in `begun` supplies the request's own block.
    """

    decodes: Sequence[int]
    growing: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LookaheadStep:
    """A step, with probable decodes of the next step, which may start before this step's tokens are available.

    Attributes:
        step: step to compute now.
        begun: slots of the decodes of this step that were started early, as `ahead` of the previous message. The other
            decodes in that `ahead` are dropped. The rest of this step is computed after the decodes in `begun`.
        ahead: decodes to start after the step, or None.
    """

    step: StepInput
    begun: Sequence[int] = ()
    ahead: LookaheadDecodes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's own distribution (before penalties, temperature and truncation).

    Attributes:
        logprob: log-probability of the token.
        rank: number of more likely tokens, plus 1.
        top: (token id, log-probability) of the most likely tokens, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of a step.

    Attributes:
        slots: slots of the sampled rows: the step's `decodes` in order, then its sampling `chunks` in order. In a step
            with drafts, chunks are in any order, and the slot of a chunk with drafts is repeated for each sampled
            token, in order.
        token_ids: sampled token of each entry of `slots`.
        duration_s: seconds from the step's start on the device until its sampled tokens are on the host.
        logprobs: log-probabilities of the sampled token by slot, for requests with `logprobs`.
        prompt_logprobs: by slot, log-probabilities of the `followers` of the slot's chunk, possibly preceded by those
            of earlier chunks.
        faults: by slot, the reason why a row could not be computed or sampled. Its token id and KV are invalid; other
            rows are not affected.
    """

    slots: Sequence[int]
    token_ids: Sequence[int]
    duration_s: float
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)


class AdapterSource(NamedTuple):
    """A LoRA adapter: its name, and its folder in the format of `peft`."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Model, device and sizes that a runner is loaded with.

    Attributes:
        model: directory of a Hugging Face model.
        random_weights: True to generate weights from the directory's config.json and `seed` instead of reading them.
        seed: seed of random weights.
        device: "cpu", "cuda" or "cuda:N".
        dtype: "auto" (the checkpoint's; float32 on the CPU), "float32", "float16" or "bfloat16".
        block_size: tokens per KV block.
        max_model_len: length of the longest sequence in tokens; None: the model's own limit.
        max_requests: number of slots.
        max_step_tokens: largest number of tokens in one step (for the memory profile and buffers).
        max_drafts: largest number of drafts per row in a step (for the memory profile).
        max_graph_rows: largest batch of decodes that runs as a captured CUDA graph; 0: no graphs.
        spare_blocks: number of additional KV blocks, for decodes that are started ahead.
        num_threads: number of threads for CPU computation; None: leave torch's setting unchanged.
        tensor_parallel_size: number of ranks that share every layer.
        pipeline_stages: number of pipeline stages that the layers are divided into.
        kv_groups: number of KV-parallel groups; each holds the whole model and its own KV blocks.
        kv_group_tokens: largest number of tokens of one request that a group holds; ignored if there is one group.
        rank: index of this rank in its replica, numbered by KV group, then by stage, then by tensor-parallel rank.
        rendezvous: address where the ranks meet (`tcp://host:port` or `file:///path`); required with more than one
            rank.
        self_check: True to compare the model with transformers' own attention while loading.
        fused: True to use this package's own, faster forward pass for the model types it supports.
        adapters: LoRA adapters that requests may use; their weights are kept in host memory.
        max_loras: number of adapter slots, each large enough for the largest adapter.
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
        """Number of processes that compute one replica."""
        return self.tensor_parallel_size * self.pipeline_stages * self.kv_groups

    @property
    def tensor_rank(self) -> int:
        """Index of this rank among the ranks that share its layers."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.rank // self.tensor_parallel_size % self.pipeline_stages

    @property
    def kv_group(self) -> int:
        """Index of this rank's KV-parallel group."""
        return self.rank // (self.tensor_parallel_size * self.pipeline_stages)

    def rank_of(self, kv_group: int, stage: int, tensor_rank: int) -> int:
        """Return the rank with these indices."""
        return (kv_group * self.pipeline_stages + stage) * self.tensor_parallel_size + tensor_rank


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and types of a loaded model on this rank.

    Attributes:
        model_type: transformers' name of the architecture.
        num_parameters: number of parameters of the whole model.
        weight_bytes: bytes of weights on this rank.
        num_layers: number of attention layers on this rank.
        num_query_heads: query heads of the first layer on this rank.
        num_kv_heads: KV heads of the first layer on this rank.
        head_dim: width of a key head of the first layer.
        kv_bytes_per_token: bytes of K and V of one token, over all layers on this rank.
        block_size: tokens per KV block.
        max_model_len: length of the longest sequence in tokens.
        vocab_size: number of rows of the output layer.
        eos_token_ids: the model's own end-of-sequence tokens.
        dtype: name of the dtype of the computation.
        device: "cpu", or the product name of the GPU.
        forward: "fused" (this package's forward pass) or "transformers".
        device_ids: globally unique names of the rank's devices; in the facts of a whole replica, of all ranks' devices.
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
    device_ids: tuple[str, ...] = ("cpu",)


class PendingStep(Protocol):
    """A submitted step; on a CPU it is complete on submission."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output. Must be called once, in the order of submission."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A `PendingStep` that was computed at submission."""

    output: StepOutput

    def result(self) -> StepOutput:
        """See `PendingStep`."""
        return self.output


class ModelRunner(Protocol):
    """A model on one device. Not thread-safe."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """Return the number of KV blocks that fit beside a step of `max_step_tokens`.

        `memory_fraction` in (0, 1] is the share of the device's memory (on a CPU: of the free memory) for weights, a
        step's buffers and KV memory together.

        Raises:
            ConfigError: not even one sequence of `max_model_len` fits.
        """

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate KV memory and host memory for swapped-out blocks. Called once, before the first step.

        Raises:
            ExecutorError: the memory does not fit.
        """

    def submit(self, step: StepInput) -> PendingStep:
        """Start a step. On a GPU the next step may be submitted before this step's result is read.

        Raises:
            ExecutorError: the device failed or ran out of memory, or the step is inconsistent with earlier ones.
        """

    def run(self, step: StepInput) -> StepOutput:
        """Return `submit(step).result()`."""

    def close(self) -> None:
        """Release memory and leave the group of ranks. May be called twice."""


class LookaheadRunner(ModelRunner, Protocol):
    """A runner that can start a step before the scheduler has decided on it."""

    def run_ahead(self, work: LookaheadStep) -> StepOutput:
        """Return the output of `work.step`.

        If the device computes asynchronously, `work.ahead` is submitted right after `work.step`. A step without `begun`
        rows undoes the decodes that were started ahead, and so does `submit`. Raises like `submit`.
        """

    def begin_ahead(self) -> None:
        """Submit the last `work.ahead` if `run_ahead` has not submitted it.

        Meant for a caller that is idle after delivering the output. Without this call, the decodes are computed with
        the step that lists them in `begun`. Raises like `submit`.
        """


class KvRunner(ModelRunner, Protocol):
    """A runner whose KV can be copied to and from another runner of the same model."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block on this rank, over all layers."""

    def export_kv(self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Copy KV blocks of `kv_block_bytes` each into a buffer, after all submitted steps. Raises `ExecutorError`."""

    def import_kv(
        self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8], copies: Sequence[BlockCopy] = ()
    ) -> None:
        """Copy a buffer, filled by another runner's `export_kv`, into KV blocks; all later steps see its content.

        `copies` are made first: copies of KV blocks between device and host. Raises `ExecutorError`.
        """

    def mark(self) -> object:
        """Return a mark for `move_kv` after all submitted work; None if each call returns when its work is complete."""

    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        """Copy KV blocks between device and host, in order. Raises `ExecutorError`.

        With a mark in `after`, any thread may call this. The copies start after the work before the mark, and are
        complete on return. Steps submitted after the mark run meanwhile and must use other blocks. In each direction,
        only one thread may copy at a time.
        """


class AdapterRunner(ModelRunner, Protocol):
    """A runner with slots for LoRA adapters."""

    def load_adapter(self, name: str, slot: int) -> None:
        """Copy an adapter's weights into a slot, after all submitted steps; no step in flight may use the slot.

        Raises `ExecutorError`.
        """
