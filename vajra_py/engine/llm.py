"""Synchronous generation for a list of prompts.

    llm = LLM("models/tiny")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        output.text

Requests are scheduled by the policies in `config`, which takes the keys of a system (scheduling, preset, replica,
num_replicas, …) as a mapping or a YAML file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vajra_py.config import SystemConfig, system_from_mapping
from vajra_py.config.places import plain
from vajra_py.config.yaml_file import read_mapping
from vajra_py.contract import Layer
from vajra_py.contract.facts import StatedFacts
from vajra_py.contract.observer import PolicySwap
from vajra_py.engine.client import EngineClient
from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.config import MODEL_BACKENDS
from vajra_py.engine.outputs import Submission
from vajra_py.engine.requests import Prompt, RequestMaker, RequestOutput, is_integer_kind, may_be_listed, output_of
from vajra_py.errors import ConfigError, Problem, VajraError, did_you_mean
from vajra_py.plugins import load_registry
from vajra_py.runtime.serving.policy_swap import Swapped

DEFAULT_SCHEDULING: Mapping[str, Any] = {
    "request_prioritizer": "fcfs",
    "replicaset_scheduler": "round_robin",
    "replica_scheduler": "fixed_chunk",
}
DEFAULT_REPLICASET = "default"
"""Name of the replicaset if there is only one."""
CPU_MEMORY_FRACTION = 0.25
"""Fraction of a host's free memory for weights, buffers of a step and KV blocks; the rest is left for other uses."""


def system_keys(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return the keys of a system, from a mapping or a YAML file. Raises `ConfigError`."""
    what: object = config  # typed as `object`, since a caller may pass any type despite the annotation
    if what is not None and not isinstance(what, str | Path | Mapping):
        message = f"is neither a mapping nor a file ({type(what).__name__})"
        raise ConfigError(Problem("config", message, "A mapping of a system's keys, or the path of its YAML file"))
    return dict(plain(read_mapping(config)) if isinstance(config, str | Path) else config or {})


def llm_config(
    model: str | Path, config: Mapping[str, Any] | str | Path | None = None, overrides: Sequence[str] = ()
) -> SystemConfig:
    """Return the system of an LLM: `config` (a system or an experiment) with `model` and defaults filled in.

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


class LLM(EngineClient):
    """A model that generates the outputs of a list of prompts together, scheduled by the policies of its configuration.

    Not thread-safe. `replaced` overrides fields of `EngineServices`, for tests and tools.
    """

    def __init__(
        self, model: str | Path, config: Mapping[str, Any] | str | Path | None = None, **replaced: Any
    ) -> None:
        super().__init__(llm_config(model, config), load_registry(), **replaced)
        self.engine = engine = self.load()
        self._requests = RequestMaker(engine, self.tokenizer)
        self.start(serves=False)
        self.accept()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release memory and processes; may be called twice."""
        self.refuse()
        if self.engine is not None:
            self.engine.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        facts: StatedFacts | Sequence[StatedFacts] | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs in the order of the prompts.

        With `n` above 1, the n outputs of each prompt follow one another.

        `params` and `facts` (such as `StatedFacts(adapter="french")`) are one value for all prompts, or one for each
        prompt. With `n` above 1, the outputs of a prompt have consecutive seeds if `params` states a seed.

        Raises `ConfigError` for an error in any prompt or its parameters, before the first prompt is computed. Raises
        `PolicyError` if a policy breaks the contract; the LLM is then closed. If a request fails for another reason,
        such as a failed replica, its output states the reason.
        """
        return self._run(list(self._made(_listed(prompts), params, n, facts)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        facts: StatedFacts | None = None,
    ) -> list[RequestOutput]:
        """Format a conversation by the model's chat template, and return `n` answers. Raises like `generate`."""
        return self.generate([self._requests.chat(messages)], params, n=n, facts=facts)

    def swap_policy(
        self,
        layer: Layer | str,
        policy: str,
        params: Mapping[str, Any] | None = None,
        *,
        replicaset: str = DEFAULT_REPLICASET,
    ) -> PolicySwap:
        """Swap a policy for all further generation; return the old and the new policy.

        Raises `ConfigError`, or the error that the new policy raises when it is built or first called; the old policy
        then stays.
        """
        assert self.engine is not None
        assert self.loop is not None
        change = self.engine.check_change(replicaset, layer_of(layer), policy, params or {})
        answers: list[Swapped | VajraError] = []
        self.request_swap(change, answers.append)
        self.loop.run()  # no request is served, so the loop applies the change and returns
        if isinstance(answers[0], VajraError):
            raise answers[0]
        return answers[0].swap

    def _made(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        facts: StatedFacts | Sequence[StatedFacts] | None = None,
    ) -> Iterator[Submission]:
        if not is_integer_kind(type(n)) or n < 1:
            raise ConfigError(Problem("n", f"is out of range ({n!r})", "Allowed: 1 or more"))
        one_for_all = SamplingParams() if params is None else params
        each = list(one_for_all) if isinstance(one_for_all, Sequence) else [one_for_all] * len(prompts)
        if len(each) != len(prompts):
            message = f"are not one for each prompt ({len(each)} for {len(prompts)})"
            raise ConfigError(Problem("sampling parameters", message, "Allowed: one for all, or one for each"))
        stated = list(facts) if isinstance(facts, Sequence) else [facts] * len(prompts)
        if len(stated) != len(prompts):
            message = f"are not one for each prompt ({len(stated)} for {len(prompts)})"
            raise ConfigError(Problem("facts", message, "Allowed: one for all, or one for each"))
        problems: dict[str, Problem] = {}
        made: list[Submission] = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            for turn in range(n):
                try:
                    made.append(self._requests.make(prompt, one, f"prompts[{index}]", stated[index], turn))
                except ConfigError as error:
                    problems |= {str(problem): problem for problem in error.problems}
        if problems:
            raise ConfigError(problems.values())
        yield from made

    def _run(self, submissions: Sequence[Submission]) -> list[RequestOutput]:
        assert self.loop is not None
        done: dict[str, RequestOutput] = {}
        self.on_ended = lambda submission, request, reason: done.update(
            {request.request_id: output_of(submission, request, reason)}
        )
        self.submit(submissions)
        try:
            self.loop.run()
        except BaseException:  # requests of an interrupted run cannot be continued
            self.close()
            raise
        return [done[submission.facts.request_id] for submission in submissions]


def layer_of(layer: Layer | str) -> Layer:
    """Return the layer with this name in settings. Raises `ConfigError`."""
    given: object = layer  # typed as `object`, since a caller may pass any type despite the annotation
    if isinstance(given, Layer):
        return given
    names = {one.value: one for one in Layer}
    if not isinstance(given, str) or given not in names:
        raise ConfigError(Problem("layer", f"there is no such layer ({given!r})", did_you_mean(str(given), names)))
    return names[given]


def _listed(prompts: Prompt | Iterable[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list. A single prompt, and any object that cannot be a list of prompts, becomes a list of
    one.
    """
    if not may_be_listed(prompts):
        return [prompts]  # type: ignore[list-item]
    # A prompt that can be iterated over only once becomes a list, since it is read again for each output.
    each: list[Any] = [list(one) if isinstance(one, Iterator) else one for one in prompts]
    return [each] if each and is_integer_kind(type(each[0])) else each
