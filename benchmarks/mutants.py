"""Change the source in small ways, one at a time, and find the changes that no test notices.

Each mutant is applied to a copy of the repository in a temporary folder, and the tests of its package run there until the first
one fails. A mutant whose tests exceed their time limit counts as caught. Survivors are printed for judging: some are equivalent
to the original, which no program can know.

Results are appended to a file of JSON lines. A second run with the same seed repeats nothing whose source is unchanged, except
survivors after a change of their tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "results", "*.egg-info")
MEMORY_LIMIT = 8 << 30
"""Bytes of data that the tests of a mutant may allocate: an endless loop that appends ends here."""

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

EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
"""Survivors judged to be equivalent: (file, function, before, after) and the reason."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The packages to change and the tests that cover them."""

    root: Path
    packages: dict[str, str]
    """Import name -> folder below the root."""
    tests: dict[str, tuple[str, ...]]
    """Folder of source -> folders of tests, quickest first."""


PLAN = Plan(
    ROOT,
    {"vajra_py": "vajra_py", "vajra_policies": "policies/vajra_policies", "vajra_kernels": "kernels/vajra_kernels"},
    {
        "vajra_py/contract": (
            "tests/policies",
            "tests/runtime",
            "tests/sim",
            "tests/systems",
            "tests/testing",
            "tests/golden",
        ),
        "vajra_py/runtime": (
            "tests/runtime",
            "tests/policies",
            "tests/sim",
            "tests/systems",
            "tests/golden",
            "tests/testing",
        ),
        "vajra_py/sim": ("tests/sim", "tests/policies", "tests/systems", "tests/golden", "tests/testing"),
        "policies/vajra_policies": ("tests/policies", "tests/systems", "tests/sim", "tests/golden", "tests/testing"),
    },
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one expression or statement."""

    file: str
    function: str
    line: int
    column: int
    before: str
    after: str
    span: tuple[int, int] = field(repr=False)
    """First byte of the changed text and the one after its end."""

    @property
    def key(self) -> str:
        """Identity within one version of the file."""
        return f"{self.file}:{self.line}:{self.column} {self.before} -> {self.after}"

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

    def _add(self, node: ast.expr | ast.stmt, after: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = self._starts[node.lineno - 1] + node.col_offset
        last = self._starts[node.end_lineno - 1] + node.end_col_offset
        before = self._source[first:last].decode()
        where = ".".join(self._names)
        self.found.append(Mutant(self._file, where, node.lineno, node.col_offset, before, after, (first, last)))

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


def _files(plan: Plan) -> Iterator[Path]:
    for folder in plan.tests:
        yield from sorted((plan.root / folder).rglob("*.py"))


def sample(plan: Plan, seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of all files of the plan (fewer if there are fewer), drawn without replacement."""
    every = [m for path in _files(plan) for m in mutants_of(path.relative_to(plan.root).as_posix(), path.read_bytes())]
    random.Random(seed).shuffle(every)
    return every[:count]


def _digest(paths: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def _tests_of(plan: Plan, file: str) -> tuple[str, ...]:
    return next(tests for folder, tests in plan.tests.items() if file.startswith(folder + "/"))


class Copy:
    """A copy of the repository whose packages are imported instead of the installed ones."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._tree, self._site = plan, folder / "tree", folder / "site"
        shutil.copytree(plan.root, self._tree, ignore=LEFT_OUT)
        self._site.mkdir()
        for name, place in plan.packages.items():
            (self._site / name).symlink_to(self._tree / place)
        shared = Path(os.environ.get("VAJRA_SHARED_DIR", plan.root.parent / "shared"))
        if shared.is_dir():
            (folder / "shared").symlink_to(shared.resolve())
        self._check_imports()

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self._site), "PYTHONDONTWRITEBYTECODE": "1"}

    def _check_imports(self) -> None:
        """Exit if the tests would import anything but the copy."""
        for name in self._plan.packages:
            command = [sys.executable, "-P", "-c", f"import {name}; print({name}.__file__)"]
            done = subprocess.run(
                command, cwd=self._tree, env=self._environment(), capture_output=True, text=True, check=True
            )
            if not Path(done.stdout.strip()).resolve().is_relative_to(self._tree.resolve()):
                sys.exit(
                    f"mutants: {name} is imported from {done.stdout.strip()}. It must be the copy in {self._tree}."
                )

    def test(self, folders: Sequence[str], limit_s: float | None) -> tuple[str, str]:
        """Run tests until the first failure: `passed`, `failed` or `timeout`, and the end of their output."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not gpu",
            *folders,
        ]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self._tree,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT)),
            )
            try:
                result = "passed" if process.wait(limit_s) == 0 else "failed"
            except subprocess.TimeoutExpired:
                result = "timeout"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return result, output.read().decode(errors="replace")[-3000:]

    def try_mutant(self, mutant: Mutant, folders: Sequence[str], limit_s: float) -> tuple[str, str]:
        """Run the tests with the mutant in place, and put the source back."""
        path = self._tree / mutant.file
        source = path.read_bytes()
        changed = mutant.apply(source)
        ast.parse(changed)
        try:
            path.write_bytes(changed)
            return self.test(folders, limit_s)
        finally:
            path.write_bytes(source)


def _first_failure(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0][:200] if lines else ""


def _known(results: Path) -> dict[str, dict[str, str]]:
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["key"]: line for line in lines}


def run(plan: Plan, mutants: Sequence[Mutant], results: Path, workers: int) -> list[dict[str, str]]:
    """Try the mutants that are not in the results yet, append what comes out, and return the records of all."""
    known = _known(results)
    source = {m.file: _digest([plan.root / m.file]) for m in mutants}
    folders = {m.file: _tests_of(plan, m.file) for m in mutants}
    tests = {
        one: _digest(sorted(p for f in one for p in (plan.root / f).rglob("*.py"))) for one in set(folders.values())
    }

    def is_done(mutant: Mutant) -> bool:
        record = known.get(mutant.key, {})
        same_tests = record.get("tests") == tests[folders[mutant.file]]
        return record.get("source") == source[mutant.file] and (record["result"] != "passed" or same_tests)

    todo = [m for m in mutants if not is_done(m)]
    if todo:
        results.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, results.open("a", encoding="utf-8") as file:
            copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
            made = [Copy(plan, Path(temporary) / str(number)) for number in range(workers)]
            for one in made:
                copies.put(one)
            union = list(dict.fromkeys(f for m in todo for f in folders[m.file]))
            started = time.monotonic()
            outcome, output = made[0].test(union, None)
            if outcome != "passed":
                sys.exit(f"mutants: the tests fail without a mutant.\n{output}")
            limit_s = 3 * (time.monotonic() - started) + 60
            print(f"{len(todo)} mutants to try; the tests pass without one; limit {limit_s:.0f} s", flush=True)

            def attempt(mutant: Mutant) -> None:
                place = copies.get()
                try:
                    result, text = place.try_mutant(mutant, folders[mutant.file], limit_s)
                finally:
                    copies.put(place)
                facts = {key: value for key, value in asdict(mutant).items() if key != "span"}
                digests = {"source": source[mutant.file], "tests": tests[folders[mutant.file]]}
                record = {"key": mutant.key, "result": result, "by": _first_failure(text), **digests, **facts}
                known[mutant.key] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(f"{result:8}{mutant.file}:{mutant.line}", flush=True)

            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(attempt, todo))
    return [known[m.key] for m in mutants]


def report(records: Sequence[dict[str, str]]) -> str:
    """Return the caught fraction and the survivors, those judged equivalent apart."""
    survivors = [r for r in records if r["result"] == "passed"]
    judged = [r for r in survivors if (r["file"], r["function"], r["before"], r["after"]) in EQUIVALENT]
    late = sum(r["result"] == "timeout" for r in records)
    counted, caught = len(records) - len(judged), len(records) - len(survivors)
    share = f" ({caught / counted:.1%})" if counted else ""
    lines = [f"caught {caught} of {counted}{share}, {late} of them by time; {len(judged)} more judged equivalent"]
    for r in survivors:
        if r not in judged:
            lines += [f"{r['file']}:{r['line']} {r['function']}", f"  - {r['before']}", f"  + {r['after']}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, plan: Plan = PLAN) -> None:
    """Try a sample of mutants and print what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which sample (default 0)")
    parser.add_argument("--count", type=int, default=400, help="mutants to try (default 400)")
    parser.add_argument("--workers", type=int, default=1, help="mutants at once, each in a copy of its own (default 1)")
    parser.add_argument("--results", type=Path, default=plan.root / "runs" / "mutants.jsonl", help="file to append to")
    options = parser.parse_args(arguments)
    print(report(run(plan, sample(plan, options.seed, options.count), options.results, options.workers)))


if __name__ == "__main__":
    main()
