"""SLO expressions: conditions on a run's metrics, such as `p99(ttft) <= 0.5 and attainment >= 0.95`.

Grammar: conditions `METRIC <= NUMBER` (or `>=`, `<`, `>`, the number on either side) joined by `and` and `or`, with
brackets. A metric is a statistic of a latency in seconds, such as `p99(ttft)`, or a scalar of the run, such as
`attainment`. A further argument restricts it to one SLO class, tenant or replicaset: `p99(ttft, chat)`,
`attainment("long-context")`. Python's parser reads an expression, but it is never evaluated as code.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from vajra_py.contract.facts import is_number
from vajra_py.errors import did_you_mean

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
LATENCIES: Mapping[str, str] = {"ttft": "ttft_s", "tbt": "tbt_s", "tpot": "tpot_s", "e2e": "e2e_s", "queue": "queue_s"}
"""Path of each latency in a group of the summary, by the latency's name in expressions."""
NUMBERS: Mapping[str, str] = {
    "attainment": "slo.overall.attainment_fraction",
    "ttft_attainment": "slo.ttft.attainment_fraction",
    "tpot_attainment": "slo.tpot.attainment_fraction",
    "tbt_attainment": "slo.tbt.attainment_fraction",
    "deadline_attainment": "slo.deadline.attainment_fraction",
    "goodput": "goodput.requests_per_s",
    "throughput": "throughput.requests_per_s",
    "preemptions": "preemptions.per_request",
}
"""Path of each scalar metric in a group of the summary, by the metric's name in expressions."""
GROUPS = ("by_slo_class", "by_tenant", "by_replicaset")
WORST = 3.0
"""Maximum absolute value of a slack: reached if a metric is off by a factor of twenty, or has no value."""

Value: TypeAlias = Callable[[str], "float | None"]
"""Function that returns the value at a dotted path of a run's summary; None if there is none."""


class SloMetric(Struct, frozen=True):
    """Metric of all requests, or of one group of them."""

    text: str
    path: str
    """Path inside a group of the summary."""
    group: str | None = None
    """Name of an SLO class, tenant or replicaset; None for all requests."""


class Condition(Struct, frozen=True):
    """A metric and its limit."""

    metric: SloMetric
    at_most: bool
    """True if the limit is an upper bound; otherwise it is a lower bound."""
    limit: float

    @property
    def text(self) -> str:
        """Condition in the notation of SLO expressions."""
        return f"{self.metric.text} {'<=' if self.at_most else '>='} {self.limit:g}"

    def slack(self, value: float | None) -> float:
        """Return the distance of a value from the limit, positive if the value meets the limit.

        The distance is the logarithm of the ratio of value and limit, so that 0.1 is about a tenth of the limit. If
        value or limit is not positive, the distance is their difference. A missing value has the lowest slack.
        """
        if value is None:
            return -WORST
        inner, outer = (value, self.limit) if self.at_most else (self.limit, value)
        found = outer - inner if inner <= 0 or outer <= 0 else math.log(outer / inner)
        return max(-WORST, min(WORST, found))

    def value_at(self, slack: float) -> float:
        """Return the value of the metric with which the condition has this slack."""
        inwards = -slack if self.at_most else slack
        return self.limit * math.exp(inwards) if self.limit > 0 else self.limit + inwards


class Junction(Struct, frozen=True):
    """Conjunction or disjunction of conditions."""

    kind: Literal["and", "or"]
    parts: tuple[Expression, ...]


Expression: TypeAlias = Condition | Junction


class Slo(Struct, frozen=True):
    """Parsed SLO expression."""

    text: str
    expression: Expression

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions, from left to right."""
        return tuple(_conditions(self.expression))

    def slacks(self, value: Callable[[SloMetric], float | None]) -> tuple[float, ...]:
        """Return the slack of each condition."""
        return tuple(one.slack(value(one.metric)) for one in self.conditions)

    def slack(self, value: Callable[[SloMetric], float | None]) -> float:
        """Return the slack of the whole expression: the minimum slack of conditions joined by `and`, and the maximum
        slack of conditions joined by `or`.

        It is at least zero if the SLO holds.
        """
        return self.combined(self.slacks(value))

    @property
    def has_alternatives(self) -> bool:
        """True if conditions are joined by `or` anywhere."""
        return _has_or(self.expression)

    def decided(self, values: Sequence[float]) -> tuple[float, int]:
        """Combine one value for each condition into a single value: the minimum for `and`, the maximum for `or`.

        Returns this value and the position of the condition from which it comes.
        """
        return _decided(self.expression, iter(enumerate(values)))

    def combined(self, values: Sequence[float]) -> float:
        """Combine one value for each condition into a single value: the minimum for `and`, the maximum for `or`. If the
        values are slacks, the result is at least zero if the SLO holds.
        """
        return self.decided(values)[0]


def parse_slo(text: str) -> Slo:
    """Parse an SLO expression. Raises `ValueError` with the problem and the allowed forms."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"is not an SLO expression ({text!r}). {_FORM}") from None
    return Slo(text.strip(), _expression(tree.body))


_FORM = "Such as: p99(ttft) <= 0.5 and attainment >= 0.95"
_OPERATORS: Mapping[type[ast.cmpop], bool] = {ast.LtE: True, ast.Lt: True, ast.GtE: False, ast.Gt: False}


def _expression(node: ast.expr) -> Expression:
    if isinstance(node, ast.BoolOp):
        kind: Literal["and", "or"] = "and" if isinstance(node.op, ast.And) else "or"
        return Junction(kind, tuple(_expression(value) for value in node.values))
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or type(node.ops[0]) not in _OPERATORS:
        allowed = "Allowed: conditions with <=, <, >= or >, joined by `and` and `or`"
        raise ValueError(f"is not a condition ({ast.unparse(node)}). {allowed}. {_FORM}")
    at_most = _OPERATORS[type(node.ops[0])]
    left, right = node.left, node.comparators[0]
    if _number(left) is not None:
        left, right, at_most = right, left, not at_most
    limit = _number(right)
    if limit is None:
        raise ValueError(
            f"does not compare with a number ({ast.unparse(node)}). A metric is compared with a number; {_FORM}"
        )
    return Condition(_metric(left), at_most, limit)


def _number(node: ast.expr) -> float | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if is_number(value) else None


def _metric(node: ast.expr) -> SloMetric:
    text = ast.unparse(node)
    if isinstance(node, ast.Name):
        return SloMetric(text, _known(node.id, NUMBERS))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
        raise ValueError(f"is not a metric ({text}). {_FORM}")
    names = [_word(argument) for argument in node.args]
    if node.func.id in NUMBERS and len(names) == 1:
        return SloMetric(text, NUMBERS[node.func.id], names[0])
    if len(names) not in (1, 2) or node.func.id in NUMBERS:
        raise ValueError(f"has the wrong number of arguments ({text}). Allowed: a latency, and the name of a group")
    statistic = node.func.id
    if statistic not in STATISTICS:
        raise ValueError(
            f"is not a statistic ({statistic}). {did_you_mean(statistic, [*STATISTICS, *NUMBERS])}".rstrip(".")
        )
    return SloMetric(text, f"{_known(names[0], LATENCIES)}.{statistic}", names[1] if len(names) == 2 else None)


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(f"is not a name ({ast.unparse(node)}). Allowed: a word, or a text in quotes")


def _known(name: str, allowed: Mapping[str, str]) -> str:
    if name not in allowed:
        names = [*NUMBERS, *(f"p99({latency})" for latency in LATENCIES)] if allowed is NUMBERS else list(allowed)
        raise ValueError(f"is not a metric ({name}). {did_you_mean(name, names)}".rstrip("."))
    return allowed[name]


def _conditions(expression: Expression) -> list[Condition]:
    if isinstance(expression, Condition):
        return [expression]
    return [condition for part in expression.parts for condition in _conditions(part)]


def _has_or(expression: Expression) -> bool:
    if isinstance(expression, Condition):
        return False
    return expression.kind == "or" or any(_has_or(part) for part in expression.parts)


def _decided(expression: Expression, values: Iterator[tuple[int, float]]) -> tuple[float, int]:
    if isinstance(expression, Condition):
        position, value = next(values)
        return value, position
    found = [_decided(part, values) for part in expression.parts]
    return (min if expression.kind == "and" else max)(found, key=lambda one: one[0])
