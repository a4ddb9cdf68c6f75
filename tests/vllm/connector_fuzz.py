"""Random sessions of a vLLM with a connector: its own scheduler and this one get the same input and the same answers.

As `tests/vllm/fuzz.py`, with what a connector is asked and told, and with content that it loads in the KV slots of the model of the workers.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.outputs import ModelRunnerOutput

from tests.vllm import fuzz
from tests.vllm.fuzz import Play, RequestScript, Session
from tests.vllm.scripted_connector import Script, ScriptedWorker
from tests.vllm.worker_model import WorkerFault
from vajra_py.experiment.runs.replay import replay
from vajra_py.vllm import Scheduler
from vajra_py.vllm.support import installed_version


@dataclass(frozen=True)
class ConnectedSession(Session):
    """A session whose requests have scripts of a connector."""

    on_failure: str = "fail"
    connector: str = "ScriptedConnector"


def session_of(seed: int, *, is_async: bool = False, kind: str = "plain") -> ConnectedSession:
    """Return a random session of a kind of `fuzz.SESSIONS`, with a connector."""
    rng = random.Random(f"connector {seed}")
    base = fuzz.SESSIONS[kind](seed, is_async=is_async)
    options = base.options | {
        # Loads beside steps begin on steps that hold prompts, and where prompts are not cut: docs/evidence/vllm.md.
        "prefill_schedule_interval": 1,
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": True,
        "max_num_scheduled_tokens": None,
    }
    failing = rng.random() < 0.35
    scripts = [replace(one, transfer=_transfer(rng, one, failing), grammar=_good(one)) for one in base.scripts]
    given = {name: getattr(base, name) for name in base.__dataclass_fields__}
    on_failure = rng.choice(("fail", "recompute"))
    connector = rng.choice(("ScriptedConnector", "GroupedConnector"))
    if base.windows != (None,):
        # With several block tables, failed blocks are not reported, and vLLM accepts no other report.
        scripts = [replace(one, transfer=_without_bad_blocks(one.transfer or {})) for one in scripts]
        connector = "GroupedConnector"
    if any(
        base.windows
    ):  # vLLM computes the last of loaded tokens without what its window has of them: docs/evidence/vllm.md
        scripts = [replace(one, transfer=_without_last(one)) for one in scripts]
    if base.num_drafts and on_failure == "recompute":
        # In vLLM, a request that recomputes tokens after a failed load has drafts before it decodes:
        # docs/evidence/vllm.md.
        scripts = [replace(one, transfer=_loading_all(one.transfer or {})) for one in scripts]
    given |= {"options": options, "scripts": scripts, "has_kv_events": False}
    transfers = [one.transfer or {} for one in scripts]
    if any("bad_block" in one and not one["load_turns"] for one in transfers):
        given["second_runner"] = False  # it does not return to earlier tokens of a known request
    # Which requests share a block that is not loaded, and how vLLM handles it, depends on the step.
    if is_async and failing:
        given["without_ends"] = frozenset(one.name for one in scripts)
    given["is_exact"] = False  # blocks that a step in flight may write are free earlier here: docs/evidence/vllm.md
    given["events"] = [one for one in base.events if not one.kind.startswith("reset")]
    return ConnectedSession(
        **given,
        on_failure=on_failure,
        connector=connector,
    )


def _good(script: RequestScript) -> tuple[int, str, int | None] | None:
    """Return a grammar that can be compiled, since requests end in another turn otherwise: docs/evidence/vllm.md."""
    return None if script.grammar is None or script.grammar[1] == "error" else script.grammar


def _transfer(rng: random.Random, script: RequestScript, failing: bool) -> dict[str, Any]:
    # vLLM queries the connector again for one token that was loaded asynchronously.
    if rng.random() < 0.2 or len(script.prompt) < 2:
        return {}
    num_tokens = len(script.prompt)
    remote = rng.choice((0, num_tokens, num_tokens // 2, rng.randint(0, num_tokens)))
    made = {
        "remote": remote,
        "load_turns": rng.choice((0, 0, 1, 1, 2, 5, 12)),
        "once": rng.random() < 0.7,
        "unknown_until": script.arrives + rng.randint(1, 9) if rng.random() < 0.15 else 0,
        "send_turns": rng.choice((None, 0, 1, 4, 20)),
    }
    if failing and rng.random() < 0.4:
        made["fails" if made["load_turns"] and rng.random() < 0.4 else "bad_block"] = rng.choice((0, 0, 1, 3))
        made["once"] = True
        if "fails" in made:
            made["fails"] = True
    return made


def _without_bad_blocks(transfer: dict[str, Any]) -> dict[str, Any]:
    """Return the script of a request whose loads bring every block, or none."""
    return {name: value for name, value in transfer.items() if name != "bad_block"}


def _without_last(script: RequestScript) -> dict[str, Any]:
    """Return the script of a request of whose prompt at least the last token is computed."""
    transfer = script.transfer or {}
    return transfer and transfer | {"remote": min(transfer["remote"], len(script.prompt) - 1)}


def _loading_all(transfer: dict[str, Any]) -> dict[str, Any]:
    """Return the script of a request whose loads within a step bring every block."""
    return transfer if transfer.get("load_turns") else _without_bad_blocks(transfer)


@dataclass
class ConnectedPlay(Play):
    """A session with a connector, driven to its end."""

    hits: Counter[str] = field(default_factory=Counter)
    """Figures of the connector, in all."""
    params: dict[str, Any] = field(default_factory=dict)
    """`kv_transfer_params` that clients got."""
    cached: dict[str, Any] = field(default_factory=dict)
    written: dict[int, set[int]] = field(default_factory=dict)
    """Blocks that each message let a step write."""

    def __post_init__(self) -> None:
        super().__post_init__()
        slots = self.worker.slots
        self.loader = ScriptedWorker(slots.size, self.script_of, self._write)
        scripts = map(self.script_of, [one.name for one in self.session.scripts])
        if any(one.bad_block is not None and not one.load_turns for one in scripts):
            slots.read = lambda *given: None  # type: ignore[method-assign]  # what is void is computed from other content

    def script_of(self, name: str) -> Script:
        (found,) = [one for one in self.session.scripts if one.name == name]
        return Script(**found.transfer or {})

    def _write(self, name: str, tables: tuple[list[int], ...], start: int, end: int) -> None:
        self.worker.slots.write(name, self.worker.expected[name], tables, start, end)

    def _compile(self) -> None:
        self.scheduler.connector.turn = self.turn
        super()._compile()

    def execute(self, output: Any) -> ModelRunnerOutput:
        slots = self.worker.slots
        slots._written_by = {}
        for load in output.kv_connector_metadata.loads:
            self._check_load(load)
        bad = self.loader.begin(output.kv_connector_metadata)
        slots._written_by = {}
        result = super().execute(output)
        self.written[id(output)] = {block for block, _ in slots._written_by}
        is_attempt = output.preempted_req_ids and not output.num_scheduled_tokens
        result.kv_connector_output = None if is_attempt and not self.is_async else self.loader.report(self.turn, bad)
        for name in self.loader.sent:
            self._check_sent(name)
        return result

    def _check_load(self, load: Any) -> None:
        """A load does not wait for a step that was told before and is not back."""
        places = slice(load.start // self.worker.slots.size, -(-load.end // self.worker.slots.size))
        for output, _ in self.queue:
            loaded = {block for table in load.tables for block in table[places] if block}
            if not self.written[id(output)].isdisjoint(loaded):
                raise WorkerFault(f"{load.name}: is loaded to blocks that a step in flight writes")

    def _check_sent(self, name: str) -> None:
        """Check that what is sent stays until it was sent."""
        tables, num_tokens = self.loader.sent[name]
        slots = self.worker.slots
        start = 0 if slots.windows == [None] else num_tokens  # windows have freed blocks that no later token reads
        slots.read(name, self.worker.expected[name], tables, start, num_tokens)

    def update(self, output: Any, result: Any) -> None:
        for client, each in self.scheduler.update_from_output(output, result).items():
            self.finished += sorted(each.finished_requests or ())
            if each.scheduler_stats is not None:
                self._count(each.scheduler_stats)
            for one in each.outputs:
                self.params[one.request_id] = one.kv_transfer_params
                if one.prefill_stats is not None:
                    self.cached[one.request_id] = one.prefill_stats
                self._hear(client, one)

    def _count(self, stats: Any) -> None:
        hits = stats.connector_prefix_cache_stats
        for name in ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits"):
            self.hits[name] += getattr(hits, name)
            self.hits[f"local {name}"] += getattr(stats.prefix_cache_stats, name)
        assert set(stats.num_kv_fetch_reqs_by_stage) == {"waiting_to_start", "in_progress", "completed_waiting"}


@contextmanager
def _connected(config: Any, session: ConnectedSession) -> Iterator[None]:
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=session.connector,
        kv_role="kv_both",
        kv_connector_module_path="tests.vllm.scripted_connector",
        kv_load_failure_policy=session.on_failure,
    )
    before = config.scheduler_config.disable_hybrid_kv_cache_manager
    config.scheduler_config.disable_hybrid_kv_cache_manager = session.connector == "ScriptedConnector"
    try:
        yield
    finally:
        config.kv_transfer_config = None
        config.scheduler_config.disable_hybrid_kv_cache_manager = before


def play(cls: type[Any], model: str, session: ConnectedSession) -> ConnectedPlay:
    with _connected(fuzz._config(model, session), session):
        made = fuzz.play(cls, model, session, ConnectedPlay)
    assert isinstance(made, ConnectedPlay)
    return made


class _Trimming(SyncScheduler):
    """VLLM's own, with 0.33's rule that no drafts behind the last token of who ends are computed: docs/evidence/vllm.md."""

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        count = len(new_token_ids)
        kept, stops = super()._update_request_with_output(request, new_token_ids, is_stale)
        request.num_computed_tokens -= count - len(kept)
        return kept, stops


def _own_class(session: Session) -> type[Any]:
    if session.is_async:
        return AsyncScheduler
    return _Trimming if session.num_drafts and installed_version() < "0.33" else SyncScheduler


def replayed(model: str, session: ConnectedSession, folder: Path) -> str | None:
    """Record a session in a folder; returns the first decision that the simulator takes otherwise."""
    config = fuzz._config(model, session)
    fuzz._MADE["zero"] = time.time()
    config.additional_config = {"vajra": {"save_run": str(folder)}}
    try:
        play(Scheduler, model, session)
    finally:
        config.additional_config = {}
    return replay(folder).difference


_OF_THE_FILE = {
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "watermark": 0.0,
    "max_num_active_seqs": None,
}
"""Options of vLLM's policy as they are by default, since an experiment file decides instead of them."""


def breaking(model: str, session: ConnectedSession, folder: Path, at_step: int) -> tuple[str | None, bool]:
    """Compare a session in which the policy breaks the contract at a step with vLLM's own; the difference, and True if it broke.

    `broken_policies` of `tests/vllm/plugins.py` has to be there. Both give every request its tokens and its end.
    """
    # The present requests and the failures depend on when requests run.
    by_time = {one.name for one in session.scripts if one.aborts or one.string_after}
    by_time |= {one.name for one in session.scripts if {"bad_block", "fails"} & (one.transfer or {}).keys()}
    if any(one.kind == "abort all" for one in session.events):
        by_time |= {one.name for one in session.scripts}
    by_time |= session.without_ends
    session = replace(session, options=session.options | _OF_THE_FILE, without_ends=frozenset(by_time))
    config = fuzz._config(model, session)
    fuzz._MADE["zero"] = time.time()
    try:
        own = play(_own_class(session), model, session)
    except WorkerFault:
        own = None
    file = folder / "experiment.yaml"
    scheduling = f"{{replica_scheduler: {{policy: breaks, params: {{at_step: {at_step}}}}}}}"
    backend = "{vllm: {fallback: vllm-v1}}"
    file.write_text(f"version: 1\npreset: vllm-v1\nscheduling: {scheduling}\nbackend: {backend}\n")
    config.additional_config = {"vajra": {"experiment": str(file)}}
    try:
        ours = play(Scheduler, model, session)
    finally:
        config.additional_config = {}
    found = None if own is None else fuzz.ends_difference(session, own, ours)
    return found or fuzz.end_check(session, ours), ours.scheduler._fallback is None


def _calls(calls: list[Any], *kinds: str) -> Counter[str]:
    """Return the calls of these kinds, without what is no decision.

    Questions count once a turn, as an attempt that only preempts is a turn's first in vLLM alone. Of who is aborted while a step is
    computed, blocks and tokens are those before or after its result.
    """
    found: Counter[str] = Counter()
    for one in calls:
        if one[0] == "finished" in kinds:
            found[repr(one[:3] if "ABORTED" in one[2] else one)] += 1
        elif one[0] in kinds or one[1] in kinds:
            found[repr(one)] = 1 if one[1] == "matched" else found[repr(one)] + 1
    return found


def difference(session: ConnectedSession, own: ConnectedPlay, ours: ConnectedPlay) -> str | None:
    """Return the first difference to vLLM's scheduler, in decisions or in what the connector and the clients see."""
    if not ours.scheduler.connector.is_shut_down:
        return "the connector is not shut down"
    found = fuzz.difference(session, own, ours)
    if found is not None and own.unwritten_after is not None:
        return fuzz.difference_to_written(session, own, ours)
    if session.is_async:
        return found or _late_difference(own, ours)
    theirs, mine = (each.scheduler.connector.calls for each in (own, ours))
    for kinds in (("matched", "allocated", "reported"), ("new", "finished"), ("read",)):
        left, right = _calls(theirs, *kinds), _calls(mine, *kinds)
        if found is None and left != right and not own.is_endless:
            found = f"calls {kinds}: vLLM's alone {list(left - right)[:2]}, here alone {list(right - left)[:2]}"
    if found is not None or own.is_endless:
        return found
    for what, left, right in (
        ("parameters", own.params, ours.params),
        ("prefill statistics", own.cached, ours.cached),
        ("hits", +own.hits, +ours.hits),
    ):
        if left != right:
            return f"{what}: vLLM {left}, here {right}"
    return None


def _late_difference(own: ConnectedPlay, ours: ConnectedPlay) -> str | None:
    """Return the first difference in what does not depend on when requests are admitted, which may be a step earlier."""
    for name, reason in own.reasons.items():
        if reason != ours.reasons.get(name) or not reason.startswith(("stop", "length")):
            continue
        ends = [_ends(each.scheduler.connector.calls, name) for each in (own, ours)]
        params = [(each.params[name] or {}).get("tokens") for each in (own, ours)]
        if ends[0] != ends[1] or params[0] != params[1]:
            return f"end of {name}: vLLM {ends[0]} {params[0]}, here {ends[1]} {params[1]}"
    return None


def _ends(calls: list[Any], name: str) -> list[Any]:
    """Return what the connector was told of a request's begin and end: status and number of tokens."""
    return [(one[0], *one[2:3], *one[5:6]) for one in calls if one[0] in ("new", "finished") and one[1] == name]


def _is_stuck(own: ConnectedPlay) -> bool:
    """Return whether vLLM admits no request although none runs and no load or send is under way: docs/evidence/vllm.md."""
    return own.is_endless and not (own.scheduler.running or own.loader.loads or own.loader.sends)


def _difference_until_stuck(session: ConnectedSession, own: ConnectedPlay, ours: ConnectedPlay) -> str | None:
    """Return the first difference in what vLLM did before it admitted no more."""
    if not session.is_async:
        count = len(fuzz._that_run(own))
        found = fuzz._steps_difference(fuzz._that_run(own), fuzz._that_run(ours)[:count])
        if found is not None:
            return found
    for name, reason in own.reasons.items():
        is_same = (reason, own.tokens[name]) == (ours.reasons[name], ours.tokens[name]) if name in own.tokens else True
        if reason.startswith(("stop", "length")) and name not in session.without_ends and not is_same:
            return f"end of {name}: vLLM {reason}, here {ours.reasons[name]}"
    return None


def compare(model: str, seed: int, *, is_async: bool = False, kind: str = "plain") -> tuple[str | None, Counter[str]]:
    """Return the difference in one random session, and counts of its contents."""
    return compare_in(model, session_of(seed, is_async=is_async, kind=kind))


def compare_in(model: str, session: ConnectedSession) -> tuple[str | None, Counter[str]]:
    """Return the difference in this session, and counts of its contents."""
    fuzz._config(model, session)
    fuzz._MADE["zero"] = time.time()
    counts: Counter[str] = Counter(sessions=1, requests=len(session.scripts))
    try:
        own = play(_own_class(session), model, session)
    except WorkerFault as error:
        counts["vllm_reads_stale" if "reads KV" in str(error) else "vllm_faults"] += 1
        own = None
    try:
        ours = play(Scheduler, model, session)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"here: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})", counts
    if own is None:
        return fuzz.end_check(session, ours), counts
    counts["steps"] += len(ours.steps)
    counts["preemptions"] += sum(len(one.preempted) for one in ours.steps)
    counts["endless"] += own.is_endless
    for call in ours.scheduler.connector.calls:
        counts["loads"] += call[1] == "allocated" and call[3] > 0
        counts["unknown"] += call[1] == "matched" and call[-1] is None
    counts["errors"] += sum("error" in reason.lower() for reason in ours.reasons.values())
    counts["aborts"] += sum(reason == "abort" for reason in ours.reasons.values())
    if own.is_endless or ours.is_endless:
        if own.is_endless is not ours.is_endless:
            if _is_stuck(own):
                counts["vllm_stuck"] += 1
                return _difference_until_stuck(session, own, ours) or fuzz.end_check(session, ours), counts
            if session.is_async and fuzz.has_equals(session):
                return None, counts  # chance decides whether they meet
            return f"vLLM {'never ends' if own.is_endless else 'ends'}, here it is otherwise", counts
        return difference(session, own, ours), counts
    return difference(session, own, ours) or fuzz.end_check(session, ours), counts
