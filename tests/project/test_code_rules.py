"""Rules of the code base that no linter states: docstrings of packages, file and function sizes, declared dependencies."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (ROOT / "vajra_py", ROOT / "policies" / "vajra_policies", ROOT / "kernels" / "vajra_kernels")
OWN_NAMES = {"vajra_py", "vajra_policies", "vajra_kernels"}

MAX_FILE_LINES = 500
# Files that may be longer, each with its reason.
LONG_FILES: dict[str, str] = {
    "vajra_py/engine/loop.py": "every message of workers and clients in one order",
    "vajra_py/runtime/kv/block_pool.py": "one order of reuse in three parts, and the contents that keep their place in it",
    "vajra_py/runtime/kv/paged.py": "every operation on blocks, all or nothing; pools, orders and lookups are in files of their own",
    "vajra_py/runtime/kv/sharded.py": "the same operations over groups of ranks",
    "vajra_py/runtime/serving/controller.py": "the account of every request, from its submission to its end",
    "vajra_py/runtime/requests/request.py": "all that the mechanism keeps of one request, and its counters in bulk",
    "vajra_py/runtime/serving/build.py": "everything that a replicaset is made of, in order",
    "vajra_py/runtime/serving/hand_off.py": "one request's way from replica to replica, with every end before its time",
    "vajra_py/runtime/step/builder.py": "every verb of a plan, since nobody else writes one",
    "vajra_py/runtime/serving/driver.py": "what it does in one order for every backend; its parts are in files of their own",
    "vajra_py/runtime/serving/replica.py": "one step, from the policy's plan to its end",
    "vajra_py/vllm/mechanism.py": "everything that a vLLM's scheduler takes from the mechanism, so that nothing else does",
    "vajra_py/vllm/scheduler.py": "every method of vLLM's scheduler interface",
    "vajra_py/runtime/serving/replicaset.py": "states of replicas and every question to their scheduler; loads and bounds are in files of their own",
}

MAX_POLICY_CODE_LINES = 150
# Files of `vajra_policies` that may have more lines of code, each with its reason.
LONG_POLICIES: dict[str, str] = {
    "policies/vajra_policies/systems/presets.py": "a table: every preset, one after the other",
    "policies/vajra_policies/systems/vllm_v1.py": "every option of vLLM's scheduler, in one file that can be copied",
}

MAX_FUNCTION_LINES = 60
# Functions that may be longer (`file::name`), each with its reason. Signature and docstring do not count.
LONG_FUNCTIONS: dict[str, str] = {}

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)

# Import name of a distribution where the two differ.
DISTRIBUTION_OF = {
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",  # which pins it exactly
    "ruamel": "ruamel.yaml",
    "zmq": "pyzmq",
}


def product_files() -> list[Path]:
    """Every Python file of the three import names, without templates, which are text until they are written out."""
    return sorted(f for root in PRODUCT for f in root.rglob("*.py") if not {"template", "templates"} & set(f.parts))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (item for item in ast.walk(node) if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body after the docstring: a kernel's arguments, one a line, make no function hard to read."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def num_code_lines(source: str) -> int:
    """Lines of code of a file: neither blank nor comments, and no docstrings, of fields and constants included."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for one in tokens if one.type not in NO_CODE for line in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def modules() -> dict[str, Path]:
    """Product files by the name under which they are imported."""
    names = {}
    for path in product_files():
        root = next(root for root in PRODUCT if root in path.parents)
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def own_imports(tree: ast.AST, known: Collection[str]) -> set[str]:
    """Modules that a file imports anywhere, in functions too, but for annotations alone."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members if members <= set(known) else {node.module, *(members & set(known))}
        else:
            found |= own_imports(node, known)
    return found & set(known)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared_distributions(project: dict[str, object]) -> dict[str, str]:
    """Requirement text by normalized name, of the dependencies and every extra."""
    requirements: list[str] = list(project["dependencies"])  # type: ignore[call-overload]
    for extra in project["optional-dependencies"].values():  # type: ignore[attr-defined]
        requirements += extra
    names = {}
    for requirement in requirements:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match is not None, requirement
        names[normalized(match.group())] = requirement
    return names


@pytest.mark.parametrize("package", sorted(f for r in PRODUCT for f in r.rglob("__init__.py")), ids=relative)
def test_every_package_says_what_it_does(package: Path) -> None:
    docstring = ast.get_docstring(tree_of(package))
    assert docstring, f"{relative(package)} has no docstring"
    assert docstring.partition("\n")[0].endswith((".", ":", ",")) or "\n" in docstring


NO_PHRASE = re.compile(r"\s*(Whether|What|Who|Whose|Whom|Told|Tells?|Says?|Knows?|Asked|Asks)\b")
"""Beginnings of docstrings that neither name a thing nor say what it does."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below attributes included."""
    for node in ast.walk(tree):
        for item in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.lineno, item.value.value


def test_docstrings_are_statements() -> None:
    wrong = [
        f"{relative(path)}:{line}: {text.strip().splitlines()[0]}"
        for path in product_files()
        for line, text in docstrings(tree_of(path))
        if "?" in text.partition("\n\n")[0] or NO_PHRASE.match(text)
    ]
    assert not wrong


def test_files_stay_small() -> None:
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in product_files()}
    too_long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES and name not in LONG_FILES}
    assert not too_long
    stale = [name for name in LONG_FILES if lines.get(name, 0) <= MAX_FILE_LINES]
    assert not stale, "no longer long, or gone: take it off the list"


def test_policies_stay_short() -> None:
    files = [path for path in product_files() if relative(path).startswith("policies/")]
    sizes = {relative(path): num_code_lines(path.read_text(encoding="utf-8")) for path in files}
    too_long = {
        name: count for name, count in sizes.items() if count > MAX_POLICY_CODE_LINES and name not in LONG_POLICIES
    }
    assert not too_long
    stale = [name for name in LONG_POLICIES if sizes.get(name, 0) <= MAX_POLICY_CODE_LINES]
    assert not stale, "no longer long, or gone: take it off the list"


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = '''"""Of a module,
on two lines."""

import math  # beside code

# A comment.
SIZES = (
    1,

    2,
)
"""Of a constant."""
TEXT = """not a docstring:
two lines"""
'''
    assert num_code_lines(source) == 7


def test_functions_stay_small() -> None:
    sizes = {f"{relative(p)}::{f.name}": code_lines(f) for p in product_files() for f in functions(tree_of(p))}
    too_long = {
        name: count for name, count in sizes.items() if count > MAX_FUNCTION_LINES and name not in LONG_FUNCTIONS
    }
    assert not too_long
    stale = [name for name in LONG_FUNCTIONS if sizes.get(name, 0) <= MAX_FUNCTION_LINES]
    assert not stale, "no longer long, or gone: take it off the list"


def test_no_modules_import_each_other() -> None:
    """Imports in functions count; a package's `__init__` may load its own modules late."""
    known = modules()
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    graph = {name: own_imports(tree_of(path), known) - packages - {name} for name, path in known.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = declared_distributions(project)
    undeclared = {}
    for path in product_files():
        foreign = imported_names(tree_of(path)) - sys.stdlib_module_names - OWN_NAMES
        missing = {name for name in foreign if normalized(DISTRIBUTION_OF.get(name, name)) not in declared}
        if missing:
            undeclared[relative(path)] = sorted(missing)
    assert not undeclared


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {normalized(re.split(r"[=<>]", line)[0]) for line in lines}
    assert len(pinned) == len(lines), "a name is pinned twice"
    assert set(declared_distributions(project)) <= pinned
    assert [line for line in lines if "==" not in line] == ["triton>=3.7.1,<=3.9.0"]


def test_minimum_versions_admit_the_pinned_ones() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if version:
            pins[normalized(name)] = version
    for name, text in declared_distributions(project).items():
        if name in pins:
            assert Requirement(text).specifier.contains(pins[name]), text
