"""Small changes of Python source, one expression or statement each, and those that are known to change nothing."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from dataclasses import dataclass, field

TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
REVERSED: dict[type[ast.AST], type[ast.AST]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}

EQUIVALENT: dict[str, str] = {
    "vajra_py/runtime/queues/tournament.py::SlopeGroup.add key < head_key -> (key <= head_key) #0": (
        "A rank that is equal to the head and comes after it reseats the same head; its matches are played again, alike."
    ),
    "vajra_py/runtime/step/builder.py::Builder._everything_fits num_blocks <= memory.free_blocks -> "
    "(num_blocks < memory.free_blocks) #0": (
        "Where all fits exactly, requests are gone through one by one instead of at once, with the same result."
    ),
    "vajra_py/runtime/step/builder.py::Builder.add_running self._add_pool() -> pass #0": (
        "Decodes are then gone through one by one instead of at once, with the same result."
    ),
    "policies/vajra_policies/class_shares.py::ClassShares.__init__ self.start() -> pass #0": (
        "Each step calls `start` before anything is read."
    ),
    "vajra_py/runtime/records/json_lines.py::JsonLinesFile.__init__ 0 -> 1 #0": (
        "Another constant for the time in the head of a gzip file, which nothing reads."
    ),
    "policies/vajra_policies/scaling/pair_budget.py::PairBudget.fit wanted[0] >= self.least[0] -> "
    "(wanted[0] > self.least[0]) #0": "The search that follows finds what is wanted too, at distance 0.",
    "vajra_py/runtime/requests/running_set.py::RunningSet.__init__ 0 -> 1 #2": "A counter whose values are compared with each other alone.",
    "vajra_py/runtime/kv/prefix_lookup.py::PrefixLookup.__init__ 1 -> 2 #3": "Any number below 0 is none of the pool's versions.",
    "vajra_py/runtime/kv/prefix_lookup.py::PrefixLookup.__init__ 0 -> 1 #1": "It is counted before it is read.",
    "vajra_py/runtime/kv/paged.py::PagedKvMemory._found lookup.num_cached < 0 -> (lookup.num_cached > 0) #0": (
        "More or fewer hashes are asked for at first, with the same result."
    ),
    "vajra_py/runtime/step/builder.py::Builder._num_drafts most > self._most_held - known -> "
    "(most >= self._most_held - known) #0": "Where both are equal, one takes the place of the other.",
    "vajra_py/runtime/step/plan_draft.py::PlanDraft.__init__ 0 -> 1 #6": "`_empty` sets it to 0 before it is read.",
    "vajra_py/runtime/queues/ranks.py::SortedRanks._mark 1 -> 2 #1": "Any other version ends a walk's read.",
    "vajra_py/runtime/kv/block_pool.py::BlockPool._note_removed len(self.removed) >= _REMOVED_LOG_BLOCKS -> (len(self.removed) > _REMOVED_LOG_BLOCKS) #0": "The log is begun anew one block later.",
    "vajra_py/runtime/kv/block_pool.py:: 1 -> 2 #0": "The log is begun anew later.",
    "vajra_py/runtime/step/fast_forward.py::Repeats.num_alike most <= free -> (most < free) #0": "Where both are equal, the steps are counted one by one, with the same result.",
    "vajra_py/runtime/step/fast_forward.py::Repeats.ignores_arrivals plan.num_requests >= self._running_set.limits.max_batch_size -> (plan.num_requests > self._running_set.limits.max_batch_size) #0": "Fewer steps are worked out at once, with the same result.",
    "vajra_py/runtime/movement/links.py::Network._leave 1 -> 2 #0": "Any other version makes events void.",
    "vajra_py/runtime/serving/transfers.py::Transfers.due scheduled_at <= now -> (scheduled_at >= now) #0": "One more event may come, at which nothing is due.",
    "policies/vajra_policies/scaling/pair_budget.py::PairBudget._between 0 -> 1 #2": (
        "The longer range is gone through instead of the shorter one, with the same result."
    ),
    "vajra_py/runtime/kv/retained_pool.py::RetainedBlockPool.retire self._num_private += 1 -> self._num_private -= 1 #0": (
        "Names of private content only have to differ."
    ),
    "vajra_py/runtime/kv/block_pool.py::BlockPool.pin 1 -> 2 #2": "Any later version makes counts of idle blocks void.",
    "vajra_py/runtime/serving/tier_moves.py::TierMoves.forget number >= 0 -> (number > 0) #0": (
        "The first transfer of all is never a load: what can be loaded was copied down before."
    ),
    "vajra_py/runtime/serving/overlap.py::Overlap.step_formed one.is_early and one.has_reserved -> "
    "(one.is_early or one.has_reserved) #0": (
        "A prompt that is computed without blocks set aside has no target, so nothing of it is sent either way."
    ),
    "vajra_py/runtime/serving/hand_off.py::HandOffs.clear self._asked_while_busy.clear() -> pass #0": (
        "Lines are empty then; later ones may be looked at once more after a step, with the same result."
    ),
    "vajra_py/runtime/support/clock.py:: 1 -> 2 #0": "Another tick that is later than any event.",
    "policies/vajra_policies/target_time.py::TargetTime.solo_chunk_size chunk < num_remaining_tokens -> "
    "(chunk > num_remaining_tokens) #0": "It notes where the next search begins, not what it finds.",
    "policies/vajra_policies/programs/tool_gaps.py::ToolGaps.ttl_s 0 -> 1 #0": "A mean of 0 s is not slow either.",
    "policies/vajra_policies/routers/thunderagent_programs.py::ProgramTable.pause 1 -> 2 #0": (
        "A counter whose values are compared with each other alone."
    ),
    "vajra_py/runtime/serving/load.py::LiveLoads.__init__ True -> False #0": (
        "Figures are then read through the views, with the same result."
    ),
    "vajra_py/runtime/movement/links.py::Network._flow 1 -> 2 #0": "Any other version makes events void.",
    "vajra_py/runtime/step/builder.py::Builder._from_tiers to_hold < done + num_tokens -> "
    "(to_hold <= done + num_tokens) #0": "Where both are equal, one takes the place of the other.",
    "vajra_py/runtime/kv/paged.py::PagedKvMemory._withdraw entry.num_cached > num_kept -> "
    "(entry.num_cached >= num_kept) #0": "Where both are equal, no block is withdrawn.",
    "vajra_py/runtime/requests/adapters.py::Adapters.clear self._awaiting.clear() -> pass #0": (
        "It is read for adapters in slots alone, and set anew when one gets its slot."
    ),
    "vajra_py/runtime/kv/retained_pool.py::RetainedBlockPool.retire 1 -> 2 #1": (
        "Names of private content only have to differ."
    ),
    "vajra_py/runtime/requests/any_adapters.py::AnyAdapters.acquire 1 -> 2 #0": "Numbers of loads only have to differ.",
    "vajra_py/runtime/step/fast_forward.py::Repeats.surely_fit not running_set.has_spare_blocks -> "
    "(running_set.has_spare_blocks) #0": (
        "Repetitions are counted again, or go on: what runs has no spare blocks then, and there are blocks for all it may need."
    ),
    "policies/vajra_policies/systems/vllm_v1.py::VllmV1._make_room False -> True #0": (
        "No request that runs can be refused there: what a step computes is attached by those alone whom it admits, later."
    ),
    "policies/vajra_policies/slo/prompt_plans.py::most_in_time state < following[num] -> (state <= following[num]) #0": (
        "They are never equal: one contains the prompt before, the other does not."
    ),
    "policies/vajra_policies/retention/kvflow.py::Kvflow.on_used 2 * len(self._alive) + 8 -> (2 * len(self._alive) - 8) #0": (
        "Agents of programs that have ended are left out earlier; they count for nothing either way."
    ),
    "policies/vajra_policies/retention/arc.py::AdaptiveReplacement.learn once.move_to_end(one) -> pass #0": (
        "In a run, what is learnt is entered next and leaves the list; only in replays of vLLM's manager a store may be refused between."
    ),
    "policies/vajra_policies/retention/arc.py::AdaptiveReplacement.learn again.move_to_end(one) -> pass #0": (
        "As for the first list."
    ),
}
"""Survivors judged to be equivalent: the key of the mutant, and the reason."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one expression or statement."""

    file: str
    function: str
    line: int
    column: int
    before: str
    after: str
    ordinal: int
    """Number of equal changes before this one in the same function."""
    span: tuple[int, int] = field(repr=False)
    """First byte of the changed text and the one after its end."""
    own_lines: range
    """Lines of the changed text."""
    statement_lines: range
    """Lines of the statement around it, without the statements inside that one."""

    @property
    def key(self) -> str:
        """Identity that edits elsewhere in the file leave as it is."""
        return f"{self.file}::{self.function} {self.before} -> {self.after} #{self.ordinal}"

    def apply(self, source: bytes) -> bytes:
        """Return the source with the change."""
        return source[: self.span[0]] + self.after.encode() + source[self.span[1] :]


class _Collector(ast.NodeVisitor):
    """Gathers the mutants of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._optional = [False]
        self._statement = range(0)
        self._equal: Counter[tuple[str, str, str]] = Counter()

    def visit(self, node: ast.AST) -> None:
        """Visit a node; the innermost statement is kept beside it."""
        around = self._statement
        if isinstance(node, ast.stmt):
            inner = getattr(node, "body", None) or [case.pattern for case in getattr(node, "cases", ())]
            last = max(node.lineno, inner[0].lineno - 1) if inner else node.end_lineno or node.lineno
            self._statement = range(node.lineno, last + 1)
        super().visit(node)
        self._statement = around

    def _add(self, node: ast.expr | ast.stmt, after: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = self._starts[node.lineno - 1] + node.col_offset
        last = self._starts[node.end_lineno - 1] + node.end_col_offset
        before = self._source[first:last].decode()
        where = ".".join(self._names)
        ordinal = self._equal[where, before, after]
        self._equal[where, before, after] += 1
        self.found.append(
            Mutant(
                self._file,
                where,
                node.lineno,
                node.col_offset,
                before,
                after,
                ordinal,
                (first, last),
                range(node.lineno, node.end_lineno + 1),
                self._statement,
            )
        )

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        returns = "" if node.returns is None else ast.unparse(node.returns)
        self._names.append(node.name)
        self._optional.append("None" in returns.split(" | ") or returns.startswith("Optional["))
        for default in [*node.args.defaults, *(value for value in node.args.kw_defaults if value is not None)]:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()
        self._optional.pop()

    visit_FunctionDef = _definition  # noqa: N815
    visit_AsyncFunctionDef = _definition  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def _skip(self, node: ast.AST) -> None:
        """Leave texts of errors, formatted texts and assertions as they are."""

    visit_Raise = _skip  # noqa: N815
    visit_Assert = _skip  # noqa: N815
    visit_JoinedStr = _skip  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if _is_log(node.value):
                return
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        # `zip(strict=True)` guards against faults, as an assertion does.
        if node.arg != "strict":
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if self._optional[-1] and node.value is not None and ast.unparse(node.value) != "None":
            self._add(node, "return None")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in TURNED:
            self._turn(node)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in TURNED and not (_is_text(node.left) or _is_text(node.right)):
            self._turn(node)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._turn(node)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for position, operator in enumerate(node.ops):
            for table in (TURNED, REVERSED):
                if type(operator) in table:
                    changed = copy.deepcopy(node)
                    changed.ops[position] = table[type(operator)]()  # type: ignore[call-overload]
                    self._add(node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1))

    def _turn(self, node: ast.AugAssign | ast.BinOp | ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = TURNED[type(node.op)]()  # type: ignore[assignment]
        text = ast.unparse(changed)
        self._add(node, text if isinstance(node, ast.AugAssign) else f"({text})")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_log(call: ast.Call) -> bool:
    name = ast.unparse(call.func).lower().split(".")
    return any(part.strip("_") in ("log", "logger", "logging", "warnings") for part in name)


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return every mutant of one file, in the order of the text."""
    collector = _Collector(file, source)
    collector.visit(ast.parse(source))
    return sorted(collector.found, key=lambda mutant: (mutant.span, mutant.after))
