"""Log of the external inputs of a run, with the ticks at which the controller accepted them.

One JSON line each, in the order in which they were handled. With the durations of the steps (the decision log has them) and
the tokens that came out, it is all that a run's decisions depend on besides its settings. Complete up to the last flush.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

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
_LAST = ("metadata", "tbt_slo_s")  # in the order of the first logs of this version; readers go by names
_ONLY_WHERE_STATED = {fact.name: fact.default for fact in FACTS if fact.is_only_where_stated}
"""Facts of programs, which a row has only where they are stated."""
_FACTS = (
    *("request_id", "num_prompt_tokens", "max_tokens"),
    *(fact.name for fact in FACTS if fact.name not in _LAST),
    *_LAST,
)


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """Request to put another policy in force in one layer of one replicaset."""

    replicaset: str
    layer: Layer
    choice: PolicyChoice


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that was accepted.

    Attributes:
        tick: time of its acceptance.
        arrived_at: time at which its client sent it, seconds.
        facts: facts stated by the client.
        content: segments that identify its prompt in the prefix cache, if it is known by segments.
        prompt_token_ids: its prompt, if it is known by tokens. A request with neither shares no blocks.
        num_output_tokens: its output length, if it was known beforehand.
        salt: only requests with equal salts share prefixes; None: as in the settings.
        reads_cache: True if it may reuse KV blocks of the prefix cache; its own are cached for others in either case.
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
        """Return the request as a workload holds it; an unknown output length is the longest that it may have."""
        return RequestSpec(
            arrived_at=self.arrived_at,
            num_output_tokens=self.num_output_tokens or self.facts.max_tokens or 1,
            content=None if self.content is None else PromptContent(self.content),
            prompt_token_ids=self.prompt_token_ids,
            **{name: getattr(self.facts, name) for name in _FACTS},
        )


@dataclass(frozen=True, slots=True)
class Abort:
    """The abort of a request by its client."""

    tick: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Expiry:
    """The expiry of a request that waited longer than it allows."""

    tick: int
    request_id: str


@dataclass(frozen=True, slots=True)
class ProgramIdle:
    """The end of a program of which no call came for so long."""

    tick: int
    program_id: str


@dataclass(frozen=True, slots=True)
class Readmission:
    """The admission policy was called again for a request that it had deferred until then."""

    tick: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The loss of a replica.

    Attributes:
        max_reruns: how often its requests might be computed again elsewhere; None: they ended.
        guilty: requests that it computed by themselves when it was lost, for which that counts; None: all that it held.
    """

    tick: int
    replicaset: str
    replica_id: int
    detail: str
    max_reruns: int | None = None
    guilty: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """The return of a lost replica."""

    tick: int
    replicaset: str
    replica_id: int


@dataclass(frozen=True, slots=True)
class Abandonment:
    """The end of the requests that waited for a replica while none was up."""

    tick: int
    replicaset: str
    detail: str


@dataclass(frozen=True, slots=True)
class Swap:
    """The replacement of a policy by another; `layer` as in settings."""

    tick: int
    replicaset: str
    layer: str
    policy: str
    params: Mapping[str, Any]

    def change(self) -> PolicyChange:
        """Return the change of policy that this records."""
        return PolicyChange(
            self.replicaset, Layer(self.layer), PolicyChoice(policy=self.policy, params=dict(self.params))
        )


@dataclass(frozen=True, slots=True)
class PolicyViolation:
    """A violation of the contract by a policy, which put its replicaset out of service: an outcome, which a replay reaches by itself."""

    tick: int
    replicaset: str
    detail: str


@dataclass(frozen=True, slots=True)
class Gate:
    """A change of the work that the executing side allows a replica.

    Attributes:
        admits: whether waiting requests may get KV blocks.
        forms: whether steps are formed.
        bars_preempted: whether a request that a step preempts waits for a later step, because a token of it is still computed.
    """

    tick: int
    replicaset: str
    replica_id: int
    admits: bool = True
    forms: bool = True
    bars_preempted: bool = False


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The emptying of a replica's KV memory: its running requests wait again, the latest admitted first; the cache is empty."""

    tick: int
    replicaset: str
    replica_id: int


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall of a replicaset's policies: they scheduled nothing although requests waited, for longer than the limit."""

    tick: int
    replicaset: str


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A policy was woken.

    Attributes:
        replicaset: the policy's; empty for one of the whole system.
        slot: its place, as in settings.
        index: the policy's position in its layer: of a replica scheduler the replica.
        key: its wake-up's; None: its replica was to form a step (`BatchBuilder.idle_until`).
    """

    tick: int
    replicaset: str
    slot: str
    index: int
    key: str | None


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """A scaler had a replica started, or it came up, or was to drain or go down: what a replay does without calling it.

    Attributes:
        state: value of its `ReplicaState` from here on. A draining replica goes down by itself when it has nothing left.
    """

    tick: int
    replicaset: str
    replica_id: int
    state: str


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """KV of a request has arrived at the replica that goes on with it, or a part of it.

    Attributes:
        number: of the transfer among those of its replicaset, from 0.
    """

    tick: int
    replicaset: str
    number: int
    request_id: str


@dataclass(frozen=True, slots=True)
class AdapterEnd:
    """An adapter is in its slot.

    Attributes:
        number: of the load among those of its replica, from 0.
    """

    tick: int
    replicaset: str
    replica_id: int
    number: int


@dataclass(frozen=True, slots=True)
class TierEnd:
    """KV has arrived in a lower memory tier of a replica, or on its device.

    Attributes:
        number: of the copy among those of its replicaset, from 0.
    """

    tick: int
    replicaset: str
    number: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Requests whose target was full looked at it again (`hand_off.when_full: retry`)."""

    tick: int
    replicaset: str


@dataclass(frozen=True, slots=True)
class Answer:
    """News of a request at a server that a router sent it to.

    Attributes:
        replica_id: the server.
        num_tokens: output tokens so far.
        end: empty: it goes on; else the reason that it ended, "again" if it is to be placed anew, or "prompt" if its prompt is computed.
    """

    tick: int
    request_id: str
    replica_id: int
    num_tokens: int
    end: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """Figures that a server gave of itself: requests running and waiting, and the part of its KV memory in use."""

    tick: int
    replicaset: str
    replica_id: int
    num_running: int
    num_waiting: int
    kv_fraction: float


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Change of the content of a server's prefix cache, according to its KV events.

    Attributes:
        stored, removed: hashes of blocks (`TokenBlockHashes`), hexadecimal; `removed` goes first.
        begins: True if it replaces all content known before.
        ends: no more reports come; `stored` and `removed` are empty.
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


@dataclass(frozen=True, slots=True)
class StageEnd:
    """The end of a step's first pipeline stage, after which the next step could enter it."""

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
    "breach": PolicyViolation,  # for recordings of earlier versions
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
        """Write one more line."""
        if isinstance(entry, Arrival):
            self.write(_arrival_row(entry))
        else:
            kind = next(name for name, one in _KINDS.items() if isinstance(entry, one))
            self.write({"kind": kind, **{one.name: getattr(entry, one.name) for one in fields(entry)}})


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
    """Read the log of a run. Raises `RunError` when it is missing, broken, or of another version."""
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
    """Return the facts of a row; JSON has lists for tuples."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return RequestFacts(**given)


def _segment(name: Any) -> SegmentId:
    return tuple(name) if isinstance(name, list) else name


@dataclass(slots=True)
class RecordedOutput:
    """Output of one request."""

    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    """Reason of its end; empty: it did not end."""
    detail: str = ""
    failed_at: int | None = None
    """Number of its tokens that were computed when it failed by itself; None: it did not fail."""
    proposals: dict[int, int] = field(default_factory=dict)
    """Number of output tokens to the drafts that there were for those behind them."""
    accepted: dict[int, int] = field(default_factory=dict)
    """Number of output tokens to the drafts that were accepted then."""
