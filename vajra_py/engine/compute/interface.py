"""Messages between the controller, which decides, and a worker, which computes.

The worker remembers what it was told (block tables, sampling parameters, the last sampled token, how far each row is),
so a step carries only what changed: a request in steady decode costs one small integer.

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
from typing import Protocol

from vajra_py.runtime.kv import BlockCopy

LOST_ROW = "its logits are not finite numbers, so that no token can be sampled"
"""Error of a row without finite logits."""
NOTHING_LEFT = "its allowed_token_ids, bad_words and min_tokens leave no token that can be sampled"
"""The same of a row that forbids tokens."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop parameters of a request. Values are validated at the API, not here.

    The order is vLLM's: allowed tokens, bad words and biases; then that of transformers' generation: penalties, temperature,
    top-k, top-p, min-p.

    Attributes:
        max_tokens: output tokens at most. The controller's business.
        temperature: logits are divided by it; 0 takes the largest logit (greedy).
        top_k: only the k largest logits, or all (None).
        top_p: the fewest tokens, largest first, whose probabilities reach this; in (0, 1].
        min_p: only tokens with at least this fraction of the largest probability; in [0, 1].
        presence_penalty: taken from the logit of every token that was put out already.
        frequency_penalty: the same, times how often.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it, negative ones multiplied.
        seed: of the request's own random stream; None lets the controller draw one.
        logprobs: how many of the most likely tokens to report with each token (0: the token alone), or None for none.
        prompt_logprobs: the same for the prompt's tokens from the second on; its request shares no cached prefix, since
            what is not computed has no logits.
        stop: strings that end the request. The controller's business.
        stop_token_ids: tokens that end the request, besides the model's own.
        min_tokens: no token that would end the request is sampled before this many output tokens.
        ignore_eos: the model's own end-of-sequence tokens do not end the request.
        allowed_token_ids: only these tokens; None: all.
        logit_bias: (token, what is added to its logit), each token once.
        bad_words: strings that the output is not to contain. They become `bad_words_token_ids` where there is a tokenizer
            (`vajra_py.engine.tokenizer.with_bad_words`), before a request is submitted.
        bad_words_token_ids: sequences of tokens that the output never completes, whatever the prompt ends with.
        include_stop_str_in_output: the stop string, or the text of the token, that ends the request is part of its text.
            The controller's business.
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
    """A request takes a slot.

    Attributes:
        slot: its name from now on.
        sampling: how its tokens are chosen.
        seed: of its random stream: `sampling.seed`, or one that the controller drew.
        prompt_token_ids: its prompt; read only when `needs_prompt(sampling)`, may be empty otherwise.
        output_token_ids: what it has put out already (a request that lost its slot and got another); read only when
            `needs_outputs(sampling)`.
        num_output_tokens: how many that are; always read (`min_tokens`, the place in the random stream).
    """

    slot: int
    sampling: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """A slot's block table in a KV-parallel group changed: from entry `start` on it is `block_ids` (entries before stay)."""

    slot: int
    start: int
    block_ids: Sequence[int]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to compute whose ids the worker does not know: part of a prompt, or of what is computed again.

    Attributes:
        slot: whose they are.
        token_ids: one or more.
        num_computed: position of the first of them: tokens of this request that are in KV memory already.
        samples: whether the last token's logits give a token (the chunk reaches the end of what is known).
        followers: the tokens that follow the chunk's first ones, as many as are to be scored: the k-th gets its
            log-probability from the logits of the k-th token. For requests with `prompt_logprobs`.
        groups: with KV parallelism, the groups that compute it: each holds `kv_group_tokens` earlier tokens of the
            request, the last one those behind them, this chunk's included.
    """

    slot: int
    token_ids: Sequence[int]
    num_computed: int
    samples: bool
    followers: Sequence[int] = ()
    groups: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's batch, as changes to what the worker knows.

    Attributes:
        chunks: rows whose tokens are given.
        decodes: slots that go on as they were: compute the token that was sampled last, at the next position, and sample.
        new: slots taken.
        freed: slots given back, before `new`.
        tables: block tables that grew or changed.
        copies: KV blocks to move between device and host before computing, in this order.
    """

    chunks: Sequence[Chunk] = ()
    decodes: Sequence[int] = ()
    new: Sequence[NewRow] = ()
    freed: Sequence[int] = ()
    tables: Sequence[TableUpdate] = ()
    copies: Sequence[BlockCopy] = ()


@dataclass(frozen=True, slots=True)
class Ahead:
    """Decodes to be started before it is decided which of them are wanted.

    Attributes:
        decodes: slots of requests that ask for no log-probabilities, and whose sampling does not depend on their outputs
            (`needs_outputs`).
        growing: those whose next token is the first of a block: it goes to a spare one, until the step that has the row
            tells the block's own place; at most `RunnerOptions.spare_blocks`.
    """

    decodes: Sequence[int]
    growing: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A step, and decodes that will probably follow, to be started before this one's tokens are known.

    Attributes:
        step: what is to be computed now.
        begun: those of its decodes that were given as `ahead` last; the other rows of that are dropped, and the rest of
            this step is computed behind them.
        ahead: what is to be begun behind it; or None.
    """

    step: StepInput
    begun: Sequence[int] = ()
    ahead: Ahead | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's own distribution (before penalties, temperature and truncation).

    Attributes:
        logprob: of the sampled token.
        rank: how many tokens are more likely, plus 1.
        top: (token id, log-probability) of the most likely ones, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of a step.

    Attributes:
        slots: rows that sampled: the step's `decodes` in order, then its sampling `chunks` in order.
        token_ids: their tokens.
        duration_s: from the step's start on the device to its sampled tokens on the host.
        logprobs: by slot, for the requests that asked.
        prompt_logprobs: by slot, of the `followers` of its chunk, and perhaps of those of earlier ones before them.
        faults: by slot, why a row could not be computed or gave no token. Its token id means nothing, nor does what it left in
            KV memory; the other rows are as ever.
    """

    slots: Sequence[int]
    token_ids: Sequence[int]
    duration_s: float
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)


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
        max_step_tokens: most tokens of one step (for the memory profile and buffers).
        max_graph_rows: largest batch of decodes that runs as a captured CUDA graph; 0: none does.
        spare_blocks: KV blocks besides those of requests, for what is begun ahead.
        num_threads: threads of CPU computation, or None to leave them as they are.
        tensor_parallel_size: ranks that share every layer.
        pipeline_stages: parts that the layers are divided into, one after another.
        kv_groups: KV-parallel groups, each of which holds the whole model and KV blocks of its own.
        kv_group_tokens: tokens of one request that one group holds; read with several groups.
        rank: this rank among the replica's, which are counted by group, in it by stage, in it by tensor-parallel rank.
        rendezvous: address at which ranks meet (`tcp://host:port` or `file:///path`), with more than one.
        self_check: compare with transformers' own attention while loading.
        fused: use this package's own forward pass where the model is of a kind that it knows (faster), else transformers'.
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
    """A step under way; on a CPU it is done already."""

    def result(self) -> StepOutput:
        """Wait for it. To be called once, in the order of submission."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A `PendingStep` that was computed when it was submitted."""

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
        """Make KV memory, and host memory to swap to. Once, before the first step.

        Raises:
            ExecutorError: it does not fit.
        """

    def submit(self, step: StepInput) -> PendingStep:
        """Start a step. On a GPU the next one may be submitted before the result of this one is taken.

        Raises:
            ExecutorError: the device failed or ran out of memory, or the step contradicts what went before.
        """

    def run(self, step: StepInput) -> StepOutput:
        """`submit(step).result()`."""

    def close(self) -> None:
        """Give back memory and leave the group of ranks. May be called twice."""


class ForeseeingRunner(ModelRunner, Protocol):
    """A runner that can begin a step before it is known to be wanted."""

    def run_ahead(self, work: Foreseen) -> StepOutput:
        """The output of `work.step`, with `work.ahead` behind it: submitted where a device computes it meanwhile. Raises like `submit`.

        With nothing of it `begun`, a step takes back what was begun ahead, and so does `submit`.
        """

    def begin_ahead(self) -> None:
        """Compute what is to be begun and was not submitted: for whoever has delivered the output and would only wait.

        Raises like `submit`. Without this call it is computed with the step that counts on it.
        """


def forbids_tokens(sampling: SamplingParams) -> bool:
    """Return whether sampling may be left without an allowed token."""
    return sampling.allowed_token_ids is not None or bool(sampling.bad_words_token_ids)


def needs_history(sampling: SamplingParams) -> bool:
    """Return whether penalties need counts of prompt and output tokens."""
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


def needs_prompt(sampling: SamplingParams) -> bool:
    """True where `NewRow` must carry the prompt."""
    return sampling.prompt_logprobs is not None or needs_history(sampling)


def needs_outputs(sampling: SamplingParams) -> bool:
    """Return whether earlier output tokens affect sampling, so that `NewRow` must carry them."""
    return needs_history(sampling) or any(len(word) > 1 for word in sampling.bad_words_token_ids)
