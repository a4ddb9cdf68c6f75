"""Log of the external inputs of a run, with the ticks at which the controller accepted them.

One JSON line per input, in the order in which they were handled. Together with the settings, the steps' durations (in
the decision log) and the generated tokens, these inputs determine all decisions of a run. The log is complete up to the
last flush.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from msgspec import Struct, field, structs

from vajra_py.config import PolicyChoice
from vajra_py.contract import Layer
from vajra_py.contract.facts import FACTS
from vajra_py.errors import Problem, RunError
from vajra_py.runtime.records.decision_log import open_binary
from vajra_py.runtime.records.json_lines import JsonLinesFile, read_rows
from vajra_py.runtime.requests.draft_inputs import Verification
from vajra_py.runtime.requests.kv_inputs import KvAnswer, KvEnd, KvLook, KvNews
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.workload import PromptContent, RequestSpec, SegmentId

INPUTS_FILE = "inputs.jsonl.gz"
INPUTS_VERSION = 2
_READABLE = (1, INPUTS_VERSION)
# These facts come last, as in logs of earlier releases, so that equal runs give equal bytes across releases.
_LAST = ("metadata", "tbt_slo_s")
_ONLY_WHERE_STATED = {fact.name: fact.default for fact in FACTS if fact.is_only_where_stated}
"""Defaults of facts that a row has only if the client stated them, such as facts of programs."""
_FACTS = (
    *("request_id", "num_prompt_tokens", "max_tokens"),
    *(fact.name for fact in FACTS if fact.name not in _LAST),
    *_LAST,
)


class PolicyChange(Struct, frozen=True):
    """Request to replace the policy in one layer of one replicaset."""

    replicaset: str
    layer: Layer
    choice: PolicyChoice


class Arrival(Struct, frozen=True):
    """A request that was accepted.

    Attributes:
        tick: time of its acceptance.
        arrived_at: time at which its client sent it, seconds.
        facts: facts stated by the client.
        content: segments that identify its prompt in the prefix cache, if the prompt is given as segments.
        prompt_token_ids: its prompt, if it is given as tokens. A request with neither shares no blocks.
        num_output_tokens: its output length, if it was known beforehand.
        salt: salt of the prompt's hashes, since only requests with equal salts share prefixes; None: as in the
            settings.
        reads_cache: True if it may reuse KV blocks of the prefix cache; its own blocks are cached for other requests in
            either case.
    """

    tick: int
    arrived_at: float
    facts: RequestFacts
    content: tuple[tuple[SegmentId, int], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    num_output_tokens: int | None = None
    salt: str | None = None
    reads_cache: bool = True

    def spec(self) -> RequestSpec:
        """Return the request as an entry of a workload; an unknown output length becomes the longest allowed one."""
        return RequestSpec(
            arrived_at=self.arrived_at,
            num_output_tokens=self.num_output_tokens or self.facts.max_tokens or 1,
            content=None if self.content is None else PromptContent(self.content),
            prompt_token_ids=self.prompt_token_ids,
            **{name: getattr(self.facts, name) for name in _FACTS},
        )


class Abort(Struct, frozen=True):
    """The abort of a request by its client."""

    tick: int
    request_id: str


class Expiry(Struct, frozen=True):
    """The expiry of a request that waited longer than its client allowed."""

    tick: int
    request_id: str


class ProgramIdle(Struct, frozen=True):
    """The end of a program of which no call was alive, and none arrived, for `programs.idle_s` seconds."""

    tick: int
    program_id: str


class Readmission(Struct, frozen=True):
    """A new call of the admission policy for a request that the policy had deferred until this tick."""

    tick: int
    request_id: str


class Failure(Struct, frozen=True):
    """The loss of a replica.

    Attributes:
        max_reruns: maximum number of times that a request is recomputed after losses; None: the requests of the lost
            replica end.
        guilty: ids of the requests for which the loss counts, because the replica was computing only them; None: all
            requests that it held.
    """

    tick: int
    replicaset: str
    replica_id: int
    detail: str
    max_reruns: int | None = None
    guilty: Sequence[str] | None = None


class Restart(Struct, frozen=True):
    """The return of a lost replica."""

    tick: int
    replicaset: str
    replica_id: int


class Abandonment(Struct, frozen=True):
    """The end of all requests that waited for a replica while no replica was up."""

    tick: int
    replicaset: str
    detail: str


class Swap(Struct, frozen=True):
    """The replacement of a policy by another; `layer` as in settings."""

    tick: int
    replicaset: str
    layer: str
    policy: str
    params: Mapping[str, Any]

    def change(self) -> PolicyChange:
        """Return the change of policy that this entry records."""
        return PolicyChange(
            self.replicaset, Layer(self.layer), PolicyChoice(policy=self.policy, params=dict(self.params))
        )


class PolicyViolation(Struct, frozen=True):
    """A policy's violation of the contract, which took its replicaset out of service; a replay reproduces it without
    this entry.
    """

    tick: int
    replicaset: str
    detail: str


class Gate(Struct, frozen=True):
    """A change of the work that the executing side allows a replica to do.

    Attributes:
        admits: True if waiting requests may get KV blocks.
        forms: True if steps are formed.
        bars_preempted: True if a step must not admit a request that the same step preempts, because one of the
            request's tokens is still being computed.
    """

    tick: int
    replicaset: str
    replica_id: int
    admits: bool = True
    forms: bool = True
    bars_preempted: bool = False


class CacheReset(Struct, frozen=True):
    """The emptying of a replica's KV memory: its running requests wait again (the one admitted last is preempted
    first), and its cache is empty.
    """

    tick: int
    replicaset: str
    replica_id: int


class Stall(Struct, frozen=True):
    """A check for a stall of a replicaset's policies: if requests wait and no step runs, the policy to blame has broken
    the contract (see `Controller.stall`).
    """

    tick: int
    replicaset: str


class WakeUp(Struct, frozen=True):
    """The wake-up of a policy.

    Attributes:
        replicaset: name of the policy's replicaset; empty for a policy of the whole system.
        slot: key of the policy under `scheduling:`.
        index: the policy's position in its layer; for a replica scheduler, the replica's id.
        key: key of the wake-up; None: the policy's replica was to form a step (`BatchBuilder.idle_until`).
    """

    tick: int
    replicaset: str
    slot: str
    index: int
    key: str | None


class ReplicaChange(Struct, frozen=True):
    """Change of a replica's state by a scaler: start, up, drain or down. A replay applies the change without calling
    the scaler.

    Attributes:
        state: value of the replica's new `ReplicaState`. A draining replica that is empty goes down without an entry.
    """

    tick: int
    replicaset: str
    replica_id: int
    state: str


class TransferEnd(Struct, frozen=True):
    """The arrival of a request's KV, or of a part of it, at the replica that continues it.

    Attributes:
        number: number of the transfer among those of its replicaset, from 0.
    """

    tick: int
    replicaset: str
    number: int
    request_id: str


class AdapterEnd(Struct, frozen=True):
    """The end of an adapter's load into its slot.

    Attributes:
        number: number of the load among those of its replica, from 0.
    """

    tick: int
    replicaset: str
    replica_id: int
    number: int


class TierEnd(Struct, frozen=True):
    """The arrival of KV in a lower memory tier of a replica, or on its device.

    Attributes:
        number: number of the copy among those of its replicaset, from 0.
    """

    tick: int
    replicaset: str
    number: int


class Retry(Struct, frozen=True):
    """Another attempt to hand off requests whose target was full (`hand_off.when_full: retry`)."""

    tick: int
    replicaset: str


class Answer(Struct, frozen=True):
    """Progress of a request, reported by the server to which a router sent the request.

    Attributes:
        replica_id: id of the server.
        num_tokens: number of output tokens so far.
        end: empty while the request continues; else the reason of its end, "again" if it is to be placed again, or
            "prompt" if it is done at its prefill server and continues at its decode server.
    """

    tick: int
    request_id: str
    replica_id: int
    num_tokens: int
    end: str = ""
    detail: str = ""


class ServerReport(Struct, frozen=True):
    """Figures reported by a server: numbers of running and waiting requests, and the used fraction of its KV memory."""

    tick: int
    replicaset: str
    replica_id: int
    num_running: int
    num_waiting: int
    kv_fraction: float


class CacheReport(Struct, frozen=True):
    """Change of the content of a server's prefix cache, according to its KV events.

    Attributes:
        stored, removed: hashes of blocks (`TokenBlockHashes`), hexadecimal; `removed` is applied first.
        begins: True if the report replaces all content known before.
        ends: True if no more reports come; `stored` and `removed` are then empty.
    """

    tick: int
    replicaset: str
    replica_id: int
    stored: Sequence[str] = ()
    removed: Sequence[str] = ()
    begins: bool = False
    ends: bool = False


Control: TypeAlias = Gate | CacheReset | Stall | KvLook | KvNews | Verification
"""An action of the executing side on a replica or on its policies."""


class StageEnd(Struct, frozen=True):
    """The end of a step's first pipeline stage, after which the next step could enter this stage."""

    tick: int
    replicaset: str
    replica_id: int
    step: int


_Unrequested: TypeAlias = (
    Failure
    | Restart
    | Abandonment
    | Swap
    | PolicyViolation
    | StageEnd
    | WakeUp
    | ReplicaChange
    | TransferEnd
    | AdapterEnd
    | TierEnd
    | Retry
    | Answer
    | ServerReport
    | CacheReport
    | KvAnswer
    | KvEnd
    | Control
)
Input: TypeAlias = Arrival | Abort | Expiry | Readmission | ProgramIdle | _Unrequested
_KINDS: Mapping[str, type[Abort | Expiry | Readmission | ProgramIdle | _Unrequested]] = {
    "abort": Abort,
    "expiry": Expiry,
    "readmission": Readmission,
    "program_idle": ProgramIdle,
    "failure": Failure,
    "restart": Restart,
    "abandonment": Abandonment,
    "policy": Swap,
    "violation": PolicyViolation,
    "breach": PolicyViolation,  # the name of "violation" in earlier recordings
    "stage": StageEnd,
    "wake": WakeUp,
    "replica": ReplicaChange,
    "transfer": TransferEnd,
    "adapter": AdapterEnd,
    "tier": TierEnd,
    "retry": Retry,
    "answer": Answer,
    "report": ServerReport,
    "kv": CacheReport,
    "gate": Gate,
    "cache_reset": CacheReset,
    "stall": Stall,
    "kv_answer": KvAnswer,
    "kv_end": KvEnd,
    "kv_look": KvLook,
    "kv_news": KvNews,
    "verification": Verification,
}


class InputLog(JsonLinesFile):
    """Writer of `inputs.jsonl.gz` during a run."""

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        super().__init__(path, open_file)
        self.write({"version": INPUTS_VERSION})

    def note(self, entry: Input) -> None:
        """Write the line of one input."""
        if isinstance(entry, Arrival):
            self.write(_arrival_row(entry))
        else:
            kind = next(name for name, one in _KINDS.items() if isinstance(entry, one))
            self.write({"kind": kind, **structs.asdict(entry)})


def _arrival_row(entry: Arrival) -> dict[str, Any]:
    facts = {name: getattr(entry.facts, name) for name in _FACTS} | {"metadata": dict(entry.facts.metadata)}
    for name, default in _ONLY_WHERE_STATED.items():
        if facts[name] == default:
            del facts[name]
    row: dict[str, Any] = {"kind": "arrival", "tick": entry.tick, "arrived_at": entry.arrived_at, "facts": facts}
    if entry.content is not None:
        row["content"] = entry.content
    if entry.prompt_token_ids is not None:
        row["prompt_token_ids"] = list(entry.prompt_token_ids)
    if entry.num_output_tokens is not None:
        row["num_output_tokens"] = entry.num_output_tokens
    if entry.salt is not None:
        row["salt"] = entry.salt
    if not entry.reads_cache:
        row["reads_cache"] = False
    return row


def read_inputs(path: Path) -> list[Input]:
    """Read the log of a run. Raises `RunError` if it is missing, broken, or of another version."""
    try:
        rows = list(read_rows(path))
        header = rows[0] if rows else {}
        if header.get("version") not in _READABLE:
            message = f"is of another version ({header.get('version')!r})"
            raise RunError(str(Problem(str(path), message, f"Allowed: {', '.join(map(str, _READABLE))}")))
        return [_input_of(row) for row in rows[1:]]
    except FileNotFoundError:
        message, advice = "is missing", "Runs of the engine write it; a simulation is repeated by running it again"
        raise RunError(str(Problem(str(path), message, advice))) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise RunError(str(Problem(str(path), f"cannot be read ({error})"))) from error


def _input_of(row: dict[str, Any]) -> Input:
    kind = row.pop("kind")
    if kind != "arrival":
        return _KINDS[kind](**row)
    content, prompt = row.get("content"), row.get("prompt_token_ids")
    return Arrival(
        row["tick"],
        row["arrived_at"],
        _facts_of(row["facts"]),
        None if content is None else tuple((_segment(name), length) for name, length in content),
        None if prompt is None else tuple(prompt),
        row.get("num_output_tokens"),
        row.get("salt"),
        row.get("reads_cache", True),
    )


def _facts_of(row: Mapping[str, Any]) -> RequestFacts:
    """Return the facts of a row; lists of JSON become tuples."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return RequestFacts(**given)


def _segment(name: Any) -> SegmentId:
    return tuple(name) if isinstance(name, list) else name


class RecordedOutput(Struct):
    """Recorded output of one request."""

    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    """Reason of the request's end; empty if it did not end."""
    detail: str = ""
    failed_at: int | None = None
    """Number of computed tokens at the time when the request itself failed; None if it did not fail."""
    proposals: dict[int, int] = field(default_factory=dict)
    """Number of drafts proposed for the next tokens, by the number of output tokens before them."""
    accepted: dict[int, int] = field(default_factory=dict)
    """Number of drafts accepted in each step, by the number of output tokens before them."""
