"""Synchronous generation: a list of prompts at once, or one request streamed.

    llm = LLM("models/tiny")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        output.text

The policies that schedule it are those of a system: `config` takes its keys (scheduling, preset, replica, num_replicas, …)
from a mapping or a YAML file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from vajra_py.config import SystemConfig, system_from_mapping
from vajra_py.config.places import plain
from vajra_py.config.yaml_file import read_mapping
from vajra_py.contract import Layer
from vajra_py.contract.observer import EndReason, PolicySwap
from vajra_py.engine.build import Engine
from vajra_py.engine.compute import SamplingParams, TokenLogprobs
from vajra_py.engine.config import MODEL_BACKENDS, ModelBackendConfig
from vajra_py.engine.outputs import OutputBuffer, Submission
from vajra_py.engine.params import check_backend, check_prompt, check_sampling
from vajra_py.engine.prompts import request_seed
from vajra_py.engine.services import engine_services
from vajra_py.engine.tokenizer import HubTokenizer, Tokenizer, has_tokenizer, text_stream, with_bad_words
from vajra_py.errors import ConfigError, ExecutorError, Problem, VajraError, did_you_mean
from vajra_py.plugins import load_registry
from vajra_py.runtime.requests.request import Request, RequestFacts
from vajra_py.runtime.serving.policy_swap import Swapped

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

DEFAULT_SCHEDULING: Mapping[str, Any] = {
    "request_prioritizer": "fcfs",
    "replicaset_scheduler": "round_robin",
    "replica_scheduler": "fixed_chunk",
}
DEFAULT_REPLICASET = "default"
"""The name of a lone replicaset."""
_CLOSED = "LLM: it is closed. Make another one."
CPU_MEMORY_FRACTION = 0.25
"""Of a host's free memory: it has other uses than KV blocks."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock; None: they did not."""

    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    ended_at: float | None
    num_cached_tokens: int
    num_preemptions: int

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @classmethod
    def of(cls, request: Request) -> Self:
        """Those of a request so far."""
        return cls(
            request.arrived_at,
            request.admitted_at,
            request.first_token_at,
            request.ended_at,
            request.num_cached_tokens,
            request.num_preemptions,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request gave.

    Attributes:
        request_id: the engine's name for it.
        prompt_token_ids: its prompt.
        token_ids: what was generated, the token that ended it included.
        text: the same as text, without special tokens and without the stop string that ended it; empty without a tokenizer.
        finish_reason: "stop", "length", "aborted", "rejected", "failed" or "expired".
        detail: why, for the last four.
        stopped_by: the stop string or token that ended it.
        logprobs: of each token, when asked for.
        prompt_logprobs: of each token of the prompt, when asked for; None for the first, which nothing goes before.
        metrics: when it happened.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    text: str
    finish_reason: str
    detail: str
    stopped_by: str | int | None
    logprobs: Sequence[TokenLogprobs] | None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    metrics: RequestMetrics


def output_of(submission: Submission, request: Request, reason: EndReason) -> RequestOutput:
    """The output of a request that has ended."""
    collected = submission.collected
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=submission.prompt_token_ids,
        token_ids=collected.token_ids,
        text=collected.text,
        finish_reason=reason.value,
        detail=request.detail,
        stopped_by=collected.stopped_by,
        logprobs=None if collected.sampling.logprobs is None else collected.logprobs,
        prompt_logprobs=None if collected.sampling.prompt_logprobs is None else [None, *collected.prompt_logprobs],
        metrics=RequestMetrics.of(request),
    )


def system_keys(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """The keys of a system, from a mapping or a YAML file. Raises `ConfigError`."""
    what: object = config  # a caller may give anything
    if what is not None and not isinstance(what, str | Path | Mapping):
        message = f"is neither a mapping nor a file ({type(what).__name__})"
        raise ConfigError(Problem("config", message, "A mapping of a system's keys, or the path of its YAML file"))
    return dict(plain(read_mapping(config)) if isinstance(config, str | Path) else config or {})


def llm_config(
    model: str | Path, config: Mapping[str, Any] | str | Path | None = None, overrides: Sequence[str] = ()
) -> SystemConfig:
    """The system that an LLM is: `config` with the model in it, and defaults where it says nothing. Of an experiment, its system.

    Raises `ConfigError`.
    """
    given = system_keys(config)
    backend = given.pop("backend", None) or {}
    kind = next(iter(backend), "engine")
    if len(backend) > 1 or kind not in MODEL_BACKENDS:
        allowed = f"Allowed: {', '.join(MODEL_BACKENDS)}"
        raise ConfigError(Problem("backend", f"an LLM computes with a model (got {', '.join(backend)})", allowed))
    engine = {**(backend.get(kind) or {}), "model": str(model)}
    if engine.get("replicasets"):
        problem = Problem("backend.engine.replicasets", "an LLM is one model", "Several are served: `vajra serve FILE`")
        raise ConfigError(problem)
    for key in ("workload", "replications", "capacity"):
        given.pop(key, None)
    mapping = {"version": 1, "name": "llm", **given, "backend": {kind: engine}}
    if "preset" not in mapping and "replicasets" not in mapping:
        mapping.setdefault("scheduling", DEFAULT_SCHEDULING)
    if engine.get("device", "cpu") == "cpu" and "replicasets" not in mapping:
        replica = {**(mapping.get("replica") or {})}
        replica["memory"] = {"memory_fraction": CPU_MEMORY_FRACTION, **(replica.get("memory") or {})}
        mapping["replica"] = replica
    return system_from_mapping(mapping, overrides)


class RequestMaker:
    """Makes submissions of prompts, and says what is wrong with them before anything is computed."""

    def __init__(self, config: SystemConfig, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._seed = config.seed
        self._backend = config.backend.kind
        self._facts = engine.facts
        self._limits = engine.prompt_limits()
        self._tokenizer = tokenizer
        self._numbers = count()

    def make(self, prompt: Prompt, params: SamplingParams, where: str = "prompt") -> Submission:
        """One request. Raises `ConfigError`."""
        check_sampling(params, "sampling", self._limits.vocab_size)
        if params.bad_words:
            params = with_bad_words(params, self._tokenizer)
            check_sampling(params, "sampling", self._limits.vocab_size)
        check_backend(params, self._backend)
        if params.stop and self._tokenizer is None:
            raise ConfigError(Problem("sampling.stop", "needs a tokenizer, and the model has none"))
        tokens = self._tokens(prompt, where)
        check_prompt(tokens, self._limits, where)
        name = f"request-{next(self._numbers)}"
        eos = () if params.ignore_eos else self._facts.eos_token_ids
        stream = None if self._tokenizer is None else text_stream(self._tokenizer)
        return Submission(
            facts=RequestFacts(
                name, len(tokens), min(params.max_tokens, self._limits.max_request_tokens - len(tokens))
            ),
            prompt_token_ids=tokens,
            seed=request_seed(self._seed, name) if params.seed is None else params.seed,
            collected=OutputBuffer(params, frozenset((*eos, *params.stop_token_ids)), stream),
            shares=params.prompt_logprobs is None,
        )

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a conversation. Raises `ConfigError`."""
        if self._tokenizer is None:
            raise ConfigError(Problem("messages", "need a tokenizer, and the model has none", "Give token ids"))
        return self._tokenizer.encode(self._tokenizer.render_chat(messages), is_rendered=True)

    def _tokens(self, prompt: Prompt, where: str) -> Sequence[int]:
        if not isinstance(prompt, str):
            given: object = prompt
            if not isinstance(given, Iterable) or not all(map(_is_kind_of_token, set(map(type, given)))):
                raise ConfigError(Problem(where, "is neither text nor token ids", "Allowed: str, or a list of int"))
            return list(map(int, prompt))
        if self._tokenizer is None:
            raise ConfigError(Problem(where, "is text, and the model has no tokenizer", "Give token ids"))
        if not prompt:
            raise ConfigError(Problem(where, "is empty", "Allowed: one character or more"))
        return self._tokenizer.encode(prompt)


def load_tokenizer(model: str | Path) -> Tokenizer | None:
    """The tokenizer of a model's directory; None when it has none."""
    return HubTokenizer(model) if has_tokenizer(model) else None


class LLM:
    """A model that computes the prompts of a list together, scheduled by the policies of its configuration.

    Not to be used from several threads. `replaced` sets parts of the engine otherwise, for tests and tools.
    """

    def __init__(
        self, model: str | Path, config: Mapping[str, Any] | str | Path | None = None, **replaced: Any
    ) -> None:
        self.config = llm_config(model, config)
        settings: ModelBackendConfig = self.config.backend.settings
        services = engine_services(self.config, load_registry(), {}, **replaced)
        self._engine: Engine | None = Engine.load(self.config, services)
        self.tokenizer = load_tokenizer(settings.model)
        self._requests = RequestMaker(self.config, self._engine, self.tokenizer)
        self._loop = self._engine.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give memory and processes back; may be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """The outputs in the order of the prompts; with `n` above 1, n of each prompt after one another.

        `params` go for all prompts, or one for each. With `n` above 1 the outputs of a prompt have seeds that follow one
        another. Raises `ConfigError` for anything wrong with any prompt or its parameters, before the first is computed;
        `PolicyError` when a policy breaks the contract, after which the LLM is closed. A request that ends otherwise
        (its replica failed) has the reason in its output.
        """
        return self._run(list(self._made(_listed(prompts), params, n)))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *, n: int = 1
    ) -> list[RequestOutput]:
        """Answers to a conversation, by the model's chat template. Raises like `generate`."""
        return self.generate([self._requests.chat(messages)], params, n=n)

    def swap_policy(
        self,
        layer: Layer | str,
        policy: str,
        params: Mapping[str, Any] | None = None,
        *,
        replicaset: str = DEFAULT_REPLICASET,
    ) -> PolicySwap:
        """Put another policy in force for what is generated from now on; what was and what is.

        Raises `ConfigError` (and what the policy raises when it is tried); then nothing has changed.
        """
        if self._engine is None:
            raise ExecutorError(_CLOSED)
        change = self._engine.check_change(replicaset, layer_of(layer), policy, params or {})
        answers: list[Swapped | VajraError] = []
        self._loop.swap_policy(change, answers.append)
        self._loop.run()  # nothing is being served: it does this and returns
        if isinstance(answers[0], VajraError):
            raise answers[0]
        return answers[0].swap

    def _made(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, n: int
    ) -> Iterator[Submission]:
        if n < 1:
            raise ConfigError(Problem("n", f"is out of range ({n})", "Allowed: 1 or more"))
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            message = f"are not one for each prompt ({len(each)} for {len(prompts)})"
            raise ConfigError(Problem("sampling parameters", message, "Allowed: one for all, or one for each"))
        problems: dict[str, Problem] = {}
        made: list[Submission] = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            for turn in range(n):
                seeded = one if one.seed is None else replace(one, seed=one.seed + turn)
                try:
                    made.append(self._requests.make(prompt, seeded, f"prompts[{index}]"))
                except ConfigError as error:
                    problems |= {str(problem): problem for problem in error.problems}
        if problems:
            raise ConfigError(problems.values())
        yield from made

    def _run(self, submissions: Sequence[Submission]) -> list[RequestOutput]:
        if self._engine is None:
            raise ExecutorError(_CLOSED)
        done: dict[str, RequestOutput] = {}
        loop = self._loop
        loop.on_ended = lambda submission, request, reason: done.update(
            {request.request_id: output_of(submission, request, reason)}
        )
        for submission in submissions:
            loop.submit(submission)
        try:
            loop.run()
        except BaseException:  # what is half done cannot be taken up again
            self.close()
            raise
        return [done[submission.facts.request_id] for submission in submissions]


def layer_of(layer: Layer | str) -> Layer:
    """A layer by its name in settings. Raises `ConfigError`."""
    names = {one.value: one for one in Layer}
    if isinstance(layer, Layer):
        return layer
    if layer not in names:
        raise ConfigError(Problem("layer", f"there is no such layer ({layer!r})", did_you_mean(str(layer), names)))
    return names[layer]


def _is_kind_of_token(kind: type) -> bool:
    return issubclass(kind, Integral) and not issubclass(kind, bool)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Several prompts: one that is given alone becomes a list of one."""
    given: object = prompts
    if (
        not isinstance(given, Iterable)
        or isinstance(given, str)
        or (len(prompts) and _is_kind_of_token(type(prompts[0])))
    ):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
