"""Fields of the driver, of its replicas and of the builder are written by these alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "vajra_py"
SERVING, STEP = ROOT / "runtime" / "serving", ROOT / "runtime" / "step"


def fields_of(path: Path, class_name: str) -> set[str]:
    """Attributes that a class assigns to itself or declares."""
    (found,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    own = {target.attr for target in targets(found) if isinstance(target.value, ast.Name) and target.value.id == "self"}
    declared = {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return own | declared


def targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned or deleted anywhere in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def called(value: ast.expr) -> str:
    """The last name of an expression: `driver` of both `driver.now` and `self._driver.now`, without the underscore."""
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return name.lstrip("_")


DRIVER = fields_of(SERVING / "driver.py", "Driver")
REPLICA = fields_of(SERVING / "backend.py", "BackendReplica") - {"replica"}
BUILDER = fields_of(STEP / "builder.py", "Builder") | fields_of(STEP / "plan_draft.py", "PlanDraft")


def foreign_writes(source: str, path: Path) -> list[str]:
    """Assignments of fields that belong to a driver, a backend's replica or a builder, outside of these."""
    found = []
    for target in targets(ast.parse(source)):
        name = called(target.value)
        writes_driver = name == "driver" and target.attr in DRIVER
        writes_builder = name == "builder" and target.attr in BUILDER
        is_other = name in ("self", "entry")  # an entry of the prefix cache may be idle as well
        writes_replica = not is_other and target.attr in REPLICA and path.name != "driver.py"
        if writes_driver or writes_builder or writes_replica:
            found.append(f"{path.name}:{target.lineno}: {ast.unparse(target)}")
    return found


def test_fields_are_found() -> None:
    assert {"now", "until", "num_steps", "form_step"} <= DRIVER
    assert {"free_at", "epoch", "is_idle", "form_pending", "rank"} <= REPLICA
    assert {"dropped", "slots_held", "swap_bytes_due", "num_preempted_before", "policy_name"} <= BUILDER


@pytest.mark.parametrize(
    "line",
    [
        "self._driver.now = 1",
        "driver.num_steps += 2",
        "one.epoch += 1",
        "self.builder.dropped = []",
        "del builder.dropped",
    ],
)
def test_a_foreign_write_is_seen(line: str) -> None:
    assert foreign_writes(line, Path("somewhere.py")) == [f"somewhere.py:1: {line.removeprefix('del ').split()[0]}"]


def test_nobody_else_writes_them() -> None:
    found = [one for path in sorted(ROOT.rglob("*.py")) for one in foreign_writes(path.read_text(), path)]
    assert found == []
