"""Strict views that expose only the members that the contract's Protocols declare.

Reading any other attribute, or writing any attribute, is recorded as a violation and raises. Each request
has a single view, so that identity works as in the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from vajra_py.contract import (
    BatchBuilder,
    DecodeStop,
    Layer,
    LocalReplicaView,
    Move,
    PoolView,
    PriorityKey,
    ProgramView,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    ReplicasetView,
    RequestView,
)
from vajra_py.contract.policies import traits_of
from vajra_py.plugins.shapes import ADMISSION_METHODS, hooks_beside, hooks_of

LOADLESS = frozenset({"replica_id", "is_up"})
"""Attributes that a replicaset scheduler with the trait `reads_load=False` may read."""


def interpose(policy: Any, replacements: Mapping[str, Callable[..., Any]]) -> Any:
    """Return an object with those members of `policy` that the mechanism reads or calls.

    Methods named in `replacements` are replaced by the functions given there.
    """
    members: dict[str, Any] = {}
    for name in hooks_beside(ADMISSION_METHODS).union(*map(hooks_of, Layer)):
        member = getattr(policy, name, None)
        if callable(member):
            members[name] = staticmethod(replacements.get(name, member))
        elif member is not None:
            members[name] = member
    return type(type(policy).__name__, (), members)()


def public_names(protocol: type) -> frozenset[str]:
    """Return the public names of a Protocol of the contract."""
    return frozenset(name for name in dir(protocol) if not name.startswith("_"))


class StrictViews:
    """Factory of strict views that records violations."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._requests: dict[RequestView, StrictRequest] = {}
        self._programs: dict[ProgramView, StrictProgram] = {}

    def request(self, request: RequestView) -> RequestView:
        """Return the strict view of a request; there is only one per request."""
        view = self._requests.get(request)
        if view is None:
            view = self._requests[request] = StrictRequest(self, request)
        return cast(RequestView, view)

    def program(self, program: ProgramView) -> ProgramView:
        """Return the strict view of a program; there is only one per program."""
        view = self._programs.get(program)
        if view is None:
            view = self._programs[program] = StrictProgram(self, program)
        return cast(ProgramView, view)

    def requests(self, requests: Iterable[RequestView]) -> list[RequestView]:
        """Return strict views of several requests."""
        return [self.request(request) for request in requests]

    def real(self, view: object) -> RequestView:
        """Return the request behind a strict view.

        Other values are returned unchanged, so that the mechanism checks them.
        """
        return cast(RequestView, view._target) if isinstance(view, StrictRequest) else cast(RequestView, view)

    def violation(self, message: str) -> AttributeError:
        """Record a violation, and return the error to raise."""
        self.violations.append(message)
        return AttributeError(message)

    def policy(self, policy: Any) -> Any:
        """Return the policy with strict views in every method that gets requests or replicas."""
        loadless = not traits_of(policy).reads_load

        def assign(request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Any:
            names = LOADLESS if loadless else None
            views = [StrictReplicaView(self, replica, names) for replica in replicas]
            return policy.assign(self.request(request), views, now)

        def admit(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> Any:
            return policy.admit(self.request(request), [StrictReplicasetView(self, one) for one in replicasets], now)

        def place_after_prompt(request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Any:
            views = [StrictReplicaView(self, replica) for replica in replicas]
            return policy.place_after_prompt(self.request(request), views, now)

        def moves(replicas: Sequence[ReplicaLoadView], now: float) -> Any:
            found = policy.moves([StrictReplicaView(self, replica) for replica in replicas], now)
            return [replace(one, request=self.real(one.request)) if isinstance(one, Move) else one for one in found]

        def pull(replica: ReplicaLoadView, queued: QueueView, now: float) -> Any:
            return policy.pull(StrictReplicaView(self, replica), StrictQueue(self, queued), now)

        def schedule(replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
            policy.schedule(StrictReplicaState(self, replica), StrictBatch(self, batch), now)

        def batched(name: str) -> Callable[[Sequence[RequestView], float], None]:
            return lambda requests, now: getattr(policy, name)(self.requests(requests), now)

        def one(name: str) -> Callable[[RequestView, ReplicaId, float], None]:
            return lambda request, replica_id, now: getattr(policy, name)(self.request(request), replica_id, now)

        return interpose(
            policy,
            {
                "key": lambda request, now: policy.key(self.request(request), now),
                "falls_at": lambda request, now: policy.falls_at(self.request(request), now),
                "line": lambda request: policy.line(self.request(request)),
                "group": lambda request: policy.group(self.request(request)),
                "slack_s": lambda request, now: policy.slack_s(self.request(request), now),
                "slack_fraction": lambda request, now: policy.slack_fraction(self.request(request), now),
                "admit": admit,
                "assign": assign,
                "pull": pull,
                "place_after_prompt": place_after_prompt,
                "moves": moves,
                "schedule": schedule,
                "refuses": lambda request, replica, now: policy.refuses(
                    self.request(request), StrictReplicaView(self, replica), now
                ),
                "on_arrivals": batched("on_arrivals"),
                "on_admission": one("on_admission"),
                "on_preemption": one("on_preemption"),
                "on_moved": lambda request, *facts: policy.on_moved(self.request(request), *facts),
                "on_step_end": lambda step: policy.on_step_end(replace(step, requests=self.requests(step.requests))),
                "on_step_run": lambda run: policy.on_step_run(replace(run, requests=self.requests(run.requests))),
                "on_departures": batched("on_departures"),
                "on_program_end": lambda program, now: policy.on_program_end(self.program(program), now),
            },
        )


class _View:
    """View that exposes only those members of a target that are public names of a Protocol."""

    __slots__ = ("_names", "_target", "_views")
    _what = ""
    _public: frozenset[str] = frozenset()

    def __init__(self, views: StrictViews, target: object, names: frozenset[str] | None = None) -> None:
        object.__setattr__(self, "_views", views)
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_names", self._public if names is None else names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._check(name)
        return getattr(self._target, name)

    def _check(self, name: str) -> None:
        if name not in self._names:
            raise self._views.violation(f"reads {self._what}.{name}, which policies must not read")

    def __setattr__(self, name: str, value: object) -> None:
        raise self._views.violation(f"writes {self._what}.{name}; views are read-only")


class StrictRequest(_View):
    """Strict `RequestView`."""

    __slots__ = ()
    _what = "request"
    _public = public_names(RequestView)

    @property
    def program(self) -> ProgramView | None:
        """See `RequestView.program`."""
        program: ProgramView | None = self._target.program
        return None if program is None else self._views.program(program)


class StrictProgram(_View):
    """Strict `ProgramView`."""

    __slots__ = ()
    _what = "program"
    _public = public_names(ProgramView)

    def siblings(self, request: RequestView) -> Sequence[str]:
        """See `ProgramView.siblings`."""
        found: Sequence[str] = self._target.siblings(self._views.real(request))
        return found


class StrictReplicaView(_View):
    """Strict `ReplicaLoadView`."""

    __slots__ = ()
    _what = "replica view"
    _public = public_names(ReplicaLoadView)

    def prefix_hit_tokens(self, request: RequestView) -> int:
        """See `ReplicaLoadView.prefix_hit_tokens`."""
        self._check("prefix_hit_tokens")
        hit: int = self._target.prefix_hit_tokens(self._views.real(request))
        return hit

    def tier_hit_tokens(self, request: RequestView) -> Mapping[str, int]:
        """See `ReplicaLoadView.tier_hit_tokens`."""
        self._check("tier_hit_tokens")
        hits: Mapping[str, int] = self._target.tier_hit_tokens(self._views.real(request))
        return hits


class StrictPoolView(_View):
    """Strict `PoolView`."""

    __slots__ = ()
    _what = "pool"
    _public = public_names(PoolView)

    @property
    def replicas(self) -> list[StrictReplicaView]:
        """See `PoolView.replicas`."""
        return [StrictReplicaView(self._views, one) for one in self._target.replicas]


class StrictReplicasetView(_View):
    """Strict `ReplicasetView`."""

    __slots__ = ()
    _what = "replicaset"
    _public = public_names(ReplicasetView)

    @property
    def pools(self) -> list[StrictPoolView]:
        """See `ReplicasetView.pools`."""
        return [StrictPoolView(self._views, one) for one in self._target.pools]

    @property
    def replicas(self) -> list[StrictReplicaView]:
        """See `ReplicasetView.replicas`."""
        return [StrictReplicaView(self._views, one) for one in self._target.replicas]


class StrictQueue:
    """Strict `QueueView`."""

    __slots__ = ("_queued", "_views")

    def __init__(self, views: StrictViews, queued: QueueView) -> None:
        self._views = views
        self._queued = queued

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[RequestView]:
        return map(self._views.request, self._queued)


class StrictReplicaState(_View):
    """Strict `LocalReplicaView`."""

    __slots__ = ()
    _what = "replica"
    _public = public_names(LocalReplicaView)

    def running(self) -> Sequence[RequestView]:
        """See `LocalReplicaView.running`."""
        return cast(Sequence[RequestView], self._views.requests(self._target.running()))

    def decodes(self) -> Sequence[RequestView]:
        """See `LocalReplicaView.decodes`."""
        return cast(Sequence[RequestView], self._views.requests(self._target.decodes()))

    def partial_prefills(self) -> Sequence[RequestView]:
        """See `LocalReplicaView.partial_prefills`."""
        return cast(Sequence[RequestView], self._views.requests(self._target.partial_prefills()))

    def waiting(self) -> Iterator[RequestView]:
        """See `LocalReplicaView.waiting`."""
        return map(self._views.request, self._target.waiting())

    def urgency(self, request: RequestView) -> PriorityKey:
        """See `LocalReplicaView.urgency`."""
        return cast(PriorityKey, self._target.urgency(self._views.real(request)))

    def slack_s(self, request: RequestView) -> float | None:
        """See `LocalReplicaView.slack_s`."""
        return cast(float | None, self._target.slack_s(self._views.real(request)))

    def slack_fraction(self, request: RequestView) -> float | None:
        """See `LocalReplicaView.slack_fraction`."""
        return cast(float | None, self._target.slack_fraction(self._views.real(request)))


class StrictBatch(_View):
    """Strict `BatchBuilder`."""

    __slots__ = ()
    _what = "batch"
    _public = public_names(BatchBuilder)

    def __contains__(self, request: object) -> bool:
        return self._views.real(request) in self._target

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return self._verb(found) if callable(found) else found

    def _verb(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the builder: it gets real requests, and a returned request becomes a strict view."""
        views = self._views

        def called(*given: Any, **named: Any) -> Any:
            answer = verb(*map(views.real, given), **{name: views.real(one) for name, one in named.items()})
            return (
                DecodeStop(views.request(answer.request), answer.refusal) if isinstance(answer, DecodeStop) else answer
            )

        return called
