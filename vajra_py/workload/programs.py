"""Draw programs: graphs of LLM calls that run in sequence or in parallel, with tool calls in between.

A graph is drawn for each program; a call is sent some time after the last of its parents has ended. With `context:
grow`, the prompt of a call consists of the prompt of its first parent, the answers of all its parents, and new text
(such as the output of a tool), so that the program's earlier answers are prefix hits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64, I64, StringColumn, objects
from vajra_py.workload.arrivals import ArrivalProcess, arrival_times
from vajra_py.workload.columns import Columns, follow_columns
from vajra_py.workload.content import NO_NODE, ContentBuilder, ContentColumn, SegmentSpace
from vajra_py.workload.distributions import Constant, Distribution, Positive, correlated_normals, sample, to_tokens
from vajra_py.workload.sessions import SystemPrompts, system_prompts
from vajra_py.workload.stated import FactColumn
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload

__all__ = ["Chain", "ContextRule", "Dag", "ForkJoin", "ProgramCalls", "Tree", "programs_workload"]

ContextRule: TypeAlias = Literal["grow", "none"]
Parents: TypeAlias = list[tuple[int, ...]]
"""Parents of each call of one program, by position; parents come before their children."""
_SYSTEM, _TEXT, _OUTPUT = 0, 1, 2


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    share: Positive = Field(1.0, description="Share of the programs, relative to the other shapes'.")


class Chain(_Shape):
    """Calls in sequence, as in the loop of an agent."""

    type: Literal["chain"]
    calls: Distribution = Field(description="Calls of a program, at least 1.")


class ForkJoin(_Shape):
    """Rounds of a planning call, parallel worker calls, and a call that joins them and plans the next round."""

    type: Literal["fork_join"]
    rounds: Distribution = Field(Constant(value=1), description="Rounds of a program, at least 1.")
    width: Distribution = Field(description="Calls side by side in a round, at least 1.")


class Tree(_Shape):
    """A tree of calls, as in a tree-of-thoughts search."""

    type: Literal["tree"]
    depth: Distribution = Field(description="Levels below the first call, at least 1.")
    branching: Distribution = Field(description="Children of a call that is not at the last level, at least 1.")


class Dag(_Shape):
    """A random acyclic graph: the parents of each call are drawn among the calls before it."""

    type: Literal["dag"]
    calls: Distribution = Field(description="Calls of a program, at least 1.")
    parents: Distribution = Field(description="Parents of a call, at least 1; fewer where fewer come before it.")


Shape: TypeAlias = Annotated[Chain | ForkJoin | Tree | Dag, Field(discriminator="type")]
Declared: TypeAlias = Literal["parents", "end", "size", "next_call"]


class ProgramCalls(BaseModel):
    """Settings from which the graphs and calls of programs are drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    shapes: tuple[Shape, ...] = Field(min_length=1, description="Kinds of graphs, one drawn for each program.")
    max_calls: int = Field(
        1000,
        ge=1,
        le=1_000_000,
        description="Maximum number of calls of a program: a graph that is drawn larger ends there.",
    )
    task_tokens: Distribution = Field(
        description="New text of a program's first call in tokens, after the system prompt."
    )
    call_tokens: Distribution = Field(
        description="New text of each later call in tokens, such as what a tool gave back."
    )
    output_tokens: Distribution = Field(description="Output length in tokens.")
    correlation: float = Field(
        0.0, ge=-1, le=1, description="Correlation of new text and output in the Gaussian copula."
    )
    delay_s: Distribution = Field(
        Constant(value=0.0),
        description="Seconds from the end of a call's last parent until it is sent, while a tool runs or a user thinks.",
    )
    context: Literal["grow", "fresh"] = Field(
        "grow",
        description="grow: a prompt begins with that of its first parent; fresh: with the system prompt. Both go on with the parents' answers.",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="Maximum prompt length, tokens: a longer prompt is replaced by its new text alone; null: no bound.",
    )
    system_prompts: SystemPrompts | None = Field(None, description="The system prompts, one drawn for each program.")
    declares: tuple[Declared, ...] = Field(
        ("parents", "end"),
        description=(
            "Facts that clients state. parents: the calls that a call depends on; end: which call is the last, or the"
            " number of calls if several are; size: the number of calls; next_call: the duration of the tool after a call."
        ),
    )


@dataclass(slots=True)
class CallGraph:
    """Calls of several programs, program after program.

    Each list has one entry per call; `parents` holds indices into the lists.
    """

    programs: list[int]
    parents: Parents
    stages: list[str]

    @classmethod
    def empty(cls) -> CallGraph:
        """Return a graph without calls."""
        return cls([], [], [])

    def add(self, program: int, parents: Parents, stages: Sequence[str]) -> None:
        """Add the calls of one more program."""
        first = len(self.programs)
        self.programs += [program] * len(parents)
        self.parents += [tuple(first + one for one in each) for each in parents]
        self.stages += stages


def programs_workload(
    calls: ProgramCalls,
    arrivals: ArrivalProcess,
    rng_for: RngFor,
    *,
    num_programs: int | None = None,
    duration_s: float | None = None,
) -> Workload:
    """Draw programs that start according to an arrival process, whose rate is in programs per second.

    Programs start until `num_programs` have started or `duration_s` seconds have passed. Streams: `arrivals`,
    `arrival_rates`, `shapes`, `graphs`, `lengths`, `think_times`, `system_prompts`.

    Raises:
        WorkloadError: neither `num_programs` nor `duration_s` is given for an endless process, or `max_context_tokens`
            leaves no room for new text after a system prompt.
    """
    starts = arrival_times(
        arrivals, rng_for("arrivals"), rng_for("arrival_rates"), num_requests=num_programs, duration_s=duration_s
    )
    graph = _drawn_graph(calls, rng_for, len(starts))
    size = len(graph.programs)
    z_text, z_output = correlated_normals(rng_for("lengths"), size, calls.correlation)
    is_first = np.array([not parents for parents in graph.parents], dtype=np.bool_)
    text = np.where(is_first, to_tokens(calls.task_tokens, z_text), to_tokens(calls.call_tokens, z_text))
    output = to_tokens(calls.output_tokens, z_output)
    delay_s = np.where(is_first, 0.0, sample(calls.delay_s, rng_for("think_times"), size))
    arrived_at, rank = nominal_arrivals(graph, starts, delay_s)
    prompts, content = _prompts(calls, graph, (text, output, rank), rng_for)
    names = StringColumn.numbered("program-", np.array(graph.programs, dtype=np.int64))
    stated = stated_of(graph, names) | _declared(calls.declares, graph, delay_s)
    columns = Columns(
        arrived_at=arrived_at,
        num_prompt_tokens=prompts,
        num_output_tokens=output,
        request_id=StringColumn.numbered("", rank),
        content=content,
        **follow_columns(graph.parents),
        think_time_s=delay_s,
    ).stating(stated)
    facts: dict[str, Any] = {"kind": "programs", "num_programs": len(starts), "num_calls": size}
    return Workload(columns, "programs", facts)


def nominal_arrivals(graph: CallGraph, starts: F64, delay_s: F64) -> tuple[F64, I64]:
    """Return two arrays with an entry per call: its nominal arrival time in seconds, and its position in time order.

    Nominally, answers take no time: a call arrives at its program's start plus the longest path of delays to the call.
    """
    arrived_at: list[float] = []
    begins = starts.tolist()
    for program, parents, delay in zip(graph.programs, graph.parents, delay_s.tolist(), strict=True):
        arrived_at.append(delay + (max(arrived_at[one] for one in parents) if parents else begins[program]))
    times = np.array(arrived_at, dtype=np.float64)
    rank = np.empty(len(times), dtype=np.int64)
    rank[np.argsort(times, kind="stable")] = np.arange(len(times), dtype=np.int64)
    return times, rank


def stated_of(graph: CallGraph, programs: StringColumn) -> dict[str, FactColumn]:
    """Return the facts that every call states: its program (which is also its session) and its stage."""
    stated: dict[str, FactColumn] = {"session_id": programs, "program_id": programs}
    return stated | ({"stage": StringColumn.of(graph.stages)} if any(graph.stages) else {})


def _declared(declares: Sequence[Declared], graph: CallGraph, delay_s: F64) -> dict[str, FactColumn]:
    """Return the columns of the facts in `declares`.

    If parents are not declared, `parent_calls` is empty for every call. If they are, the column is left out: this
    means that every call states its parents.
    """
    size = len(graph.programs)
    children: list[list[int]] = [[] for _ in range(size)]
    for row, parents in enumerate(graph.parents):
        for parent in parents:
            children[parent].append(row)
    programs = np.array(graph.programs, dtype=np.int64)
    counts = np.bincount(programs)
    is_sink = np.array([not each for each in children], dtype=np.bool_)
    num_sinks = np.bincount(programs[is_sink], minlength=len(counts))
    has_last = num_sinks[programs] == 1
    stated: dict[str, FactColumn] = {} if "parents" in declares else {"parent_calls": objects([()] * size)}
    states_size = np.ones(size, dtype=np.bool_) if "size" in declares else np.zeros(size, dtype=np.bool_)
    if "end" in declares:
        stated["is_last_call"] = (is_sink & has_last).astype(np.int64)
        states_size |= ~has_last
    if states_size.any():
        stated["num_program_calls"] = np.where(states_size, counts[programs], np.iinfo(np.int64).min)
    if "next_call" in declares:
        soonest = [min((delay_s[child] for child in each), default=np.nan) for each in children]
        stated["next_call_after_s"] = np.array(soonest, dtype=np.float64)
    return stated


# Graphs


def _drawn_graph(calls: ProgramCalls, rng_for: RngFor, num_programs: int) -> CallGraph:
    shapes = calls.shapes
    bounds = np.cumsum([shape.share for shape in shapes])
    chosen = np.searchsorted(bounds / bounds[-1], rng_for("shapes").random(num_programs), side="right")
    rng = rng_for("graphs")
    graph = CallGraph.empty()
    for program, index in enumerate(np.minimum(chosen, len(shapes) - 1).tolist()):
        shape = shapes[index]
        draw = _DRAWS[type(shape)]
        parents, stages = draw(shape, rng, calls.max_calls)
        graph.add(program, parents, stages)
    return graph


def _count(distribution: Distribution, rng: np.random.Generator, size: int = 1) -> list[int]:
    tokens: list[int] = to_tokens(distribution, rng.standard_normal(size)).tolist()
    return tokens


def _chain(shape: Chain, rng: np.random.Generator, most: int) -> tuple[Parents, list[str]]:
    number = min(_count(shape.calls, rng)[0], most)
    return [() if index == 0 else (index - 1,) for index in range(number)], ["step"] * number


def _fork_join(shape: ForkJoin, rng: np.random.Generator, most: int) -> tuple[Parents, list[str]]:
    parents: Parents = [()]
    stages = ["plan"]
    for width in _count(shape.width, rng, min(_count(shape.rounds, rng)[0], most)):
        width = min(width, most - len(parents) - 1)
        if width < 1:
            break
        first, plan = len(parents), len(parents) - 1
        parents += [(plan,)] * width
        parents.append(tuple(range(first, first + width)))
        stages += ["work"] * width + ["join"]
    return parents, stages


def _tree(shape: Tree, rng: np.random.Generator, most: int) -> tuple[Parents, list[str]]:
    parents: Parents = [()]
    level = [0]
    for _ in range(_count(shape.depth, rng)[0]):
        below: list[int] = []
        for node, branches in zip(level, _count(shape.branching, rng, len(level)), strict=True):
            branches = min(branches, most - len(parents))
            below += range(len(parents), len(parents) + branches)
            parents += [(node,)] * branches
        if not below:
            break
        level = below
    return parents, ["root"] + ["branch"] * (len(parents) - 1)


def _dag(shape: Dag, rng: np.random.Generator, most: int) -> tuple[Parents, list[str]]:
    number = min(_count(shape.calls, rng)[0], most)
    wanted = _count(shape.parents, rng, number)
    parents: Parents = [()]
    for index in range(1, number):
        drawn = rng.choice(index, size=min(wanted[index], index), replace=False)
        parents.append(tuple(sorted(drawn.tolist())))
    return parents, ["call"] * number


_DRAWS: dict[type, Callable[[Any, np.random.Generator, int], tuple[Parents, list[str]]]] = {
    Chain: _chain,
    ForkJoin: _fork_join,
    Tree: _tree,
    Dag: _dag,
}


# Prompts


def _prompts(
    calls: ProgramCalls, graph: CallGraph, drawn: tuple[I64, I64, I64], rng_for: RngFor
) -> tuple[I64, ContentColumn]:
    """Return lengths (tokens) and contents of the prompts.

    `drawn` holds for each call the number of tokens of new text, the number of output tokens, and the number in the
    call's id.
    """
    number_of = max(graph.programs, default=-1) + 1
    systems, system_lengths = system_prompts(calls.system_prompts, rng_for, number_of)
    system_of, system_tokens = systems.tolist(), system_lengths.tolist()
    texts, outputs, numbers = (column.tolist() for column in drawn)
    builder = ContentBuilder((SegmentSpace("number", "system"), SegmentSpace("number", "text"), SegmentSpace("output")))
    add, bound = builder.add, calls.max_context_tokens
    nodes: list[int] = []
    lengths: list[int] = []
    for row, (program, parents) in enumerate(zip(graph.programs, graph.parents, strict=True)):
        answered = sum(outputs[one] for one in parents)
        length = texts[row] + answered
        grows = calls.context == "grow" and bool(parents)
        system = system_of[program]
        length += lengths[parents[0]] if grows else system_tokens[system]
        is_fresh = bound is not None and length > bound
        if is_fresh:
            length = system_tokens[system] + texts[row]
            if bound is not None and length > bound:
                texts[row] = max(1, bound - system_tokens[system])
                length = system_tokens[system] + texts[row]
        if grows and not is_fresh:
            node = nodes[parents[0]]
        else:
            node = add(NO_NODE, _SYSTEM, system, system_tokens[system]) if system_tokens[system] else NO_NODE
        for one in () if is_fresh else parents:
            node = add(node, _OUTPUT, numbers[one], outputs[one])
        nodes.append(add(node, _TEXT, numbers[row], texts[row]))
        lengths.append(length)
    too_long = bound is not None and any(length > bound for length in lengths)
    if too_long:
        message = f"max_context_tokens leaves no room for new text after the system prompt ({bound})"
        raise WorkloadError("programs", None, message, f"More than {max(system_tokens)} tokens")
    column = ContentColumn(builder.store(), np.array(nodes, dtype=np.int64))
    return np.array(lengths, dtype=np.int64), column
