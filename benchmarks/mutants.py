"""Change the source in small ways, one at a time, and find the changes that no test notices.

First every test file runs once, and it is recorded which test executes which line and how long it takes. Then each mutant is
applied to a copy of the repository in a temporary folder, and the tests that execute its line run there, in a fork of this
process, until the first one fails: those that caught other mutants and the quickest ones, then the others as far as `--budget`
allows. A mutant whose tests exceed their time limit counts as caught; one on a line that no test executes survives. Survivors
are printed for judging: some are equivalent to the original, which no program can know.

Recordings and results are kept in files. A second run with the same seed repeats nothing whose source is unchanged, except
survivors after a change of their tests.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import coverage
import hypothesis
import pytest
from mutations import EQUIVALENT, Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"build", "dist", "runs", "site"}
"""Folders of the root that are no source."""
MEMORY_LIMIT = 8 << 30
"""Bytes of data that the tests of a mutant may allocate: an endless loop that appends ends here."""
PR_SET_PDEATHSIG = 1
"""Option of Linux' prctl: the signal that a process gets when its parent ends."""
FIRST_TESTS = 40
"""Tests of a mutant that run before all others."""

Outcome: TypeAlias = tuple[str, str]
"""`passed`, `failed` or `timeout`, and the end of what the tests printed."""
Job: TypeAlias = Generator[None, None, Outcome]
"""Work in another process; it yields while that runs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The source to change and the tests that may notice."""

    root: Path
    packages: dict[str, str]
    """Import name -> folder below the root."""
    sources: tuple[str, ...]
    """Folders whose files are changed."""
    tests: tuple[str, ...]
    """Folders of tests."""
    left_out: tuple[str, ...] = ()
    """Tests, or files of tests, that cannot be recorded."""
    libraries: tuple[str, ...] = ()
    """Modules outside the packages that are imported once, before the forks."""


PLAN = Plan(
    ROOT,
    {"vajra_py": "vajra_py", "vajra_policies": "policies/vajra_policies", "vajra_kernels": "kernels/vajra_kernels"},
    ("vajra_py/contract", "vajra_py/runtime", "vajra_py/sim", "policies/vajra_policies"),
    (
        "tests/config",
        "tests/golden",
        "tests/plugins",
        "tests/policies",
        "tests/runtime",
        "tests/sim",
        "tests/systems",
        "tests/testing",
    ),
    # The first two interrupt policies in the middle of a line, and of what notes that it ran; the last measures memory.
    (
        "tests/plugins/test_watchdog.py",
        "tests/sim/test_sim_failures.py::test_the_error_names_the_policy_and_the_tables_are_kept"
        "[Layer.REPLICA_SCHEDULER-NeverReturns",
        "tests/testing/test_harness.py::test_counting_everything_costs_what_was_used_not_what_there_is",
    ),
    (
        "matplotlib.pyplot",
        "pandas",
        "pyarrow.parquet",
        "pydantic",
        "rich.console",
        "ruamel.yaml",
        "scipy.stats",
        "sortedcontainers",
    ),
)


@dataclass(slots=True)
class Recording:
    """Durations of tests, and the lines that they execute."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Test -> its duration."""
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """Source file -> line -> tests that execute it."""
    imported: dict[str, set[int]] = field(default_factory=dict)
    """Source file -> lines that are executed where it is imported."""
    digests: dict[str, str] = field(default_factory=dict)
    """Test file -> digest of its text."""

    def is_imported(self, mutant: Mutant) -> bool:
        """No test executes the mutant, but importing its module does."""
        return not self._executing(mutant) and not self.imported.get(mutant.file, set()).isdisjoint(
            {*mutant.own_lines, *mutant.statement_lines}
        )

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the mutant, quickest first; if importing does, those that execute its file."""
        found = self._executing(mutant)
        if self.is_imported(mutant):
            found = set().union(*self.lines.get(mutant.file, {}).values()) or set(self.seconds)
        return sorted(found, key=lambda test: (self.seconds[test], test))

    def _executing(self, mutant: Mutant) -> set[str]:
        lines = self.lines.get(mutant.file, {})
        own, around = (
            {test for line in some for test in lines.get(line, ())}
            for some in (mutant.own_lines, mutant.statement_lines)
        )
        return own or around

    def digest_of(self, tests: Sequence[str]) -> str:
        """Return a digest of the names of tests and the text of their files."""
        files = sorted({test.partition("::")[0] for test in tests})
        return _digest(*sorted(tests), *(self.digests[file] for file in files))


def _digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return total.hexdigest()[:16]


def sample(plan: Plan, seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of all files of the plan (fewer if there are fewer), drawn without replacement.

    An edit of the source changes the sample by about as much as it changes the source.
    """
    paths = [path for folder in plan.sources for path in sorted((plan.root / folder).rglob("*.py"))]
    every = [m for path in paths for m in mutants_of(path.relative_to(plan.root).as_posix(), path.read_bytes())]
    return sorted(every, key=lambda mutant: random.Random(f"{seed} {mutant.key}").random())[:count]


class Copy:
    """A copy of the repository whose packages are imported instead of the installed ones."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self.tree, self._site = plan, folder / "tree", folder / "site"
        self.functions: dict[str, list[FunctionType]] = {}
        """Functions of this process that come from the copy, by file."""

        def left_out(place: str, names: list[str]) -> set[str]:
            made = {name for name in names if name.startswith(".") or name == "__pycache__"}
            return made | (LEFT_OUT if Path(place) == plan.root else set())

        shutil.copytree(plan.root, self.tree, ignore=left_out)
        self._site.mkdir()
        for name, place in plan.packages.items():
            (self._site / name).symlink_to(self.tree / place)
        shared = Path(os.environ.get("VAJRA_SHARED_DIR", plan.root.parent / "shared"))
        if shared.is_dir():
            (folder / "shared").symlink_to(shared.resolve())

    def _enter(self) -> None:
        """Import what this process and its children import from the copy."""
        os.chdir(self.tree)
        sys.path.insert(0, str(self._site))
        os.environ["PYTHONPATH"] = str(self._site)
        for name in self._plan.packages:
            place = importlib.util.find_spec(name)
            if place is None or not Path(place.origin or "").resolve().is_relative_to(self.tree.resolve()):
                sys.exit(f"mutants: {name} would be imported from {place}. It must be the copy in {self.tree}.")

    def run(self, work: Callable[[], int], limit_s: float | None = None) -> Job:
        """Do work in a fork of this process; it passes if it returns 0.

        The limit holds for its processor time; it may last ten times as long.
        """
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                code = 1
                try:
                    os.setsid()
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                    if limit_s is not None:
                        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 1))
                        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
                    self._enter()
                    code = work()
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            result = yield from _ended(child, None if limit_s is None else time.monotonic() + 10 * limit_s)
            output.seek(0)
            return result, output.read().decode(errors="replace")[-3000:]

    def record(self, test_file: str, into: Path) -> int:
        """Run one file of tests and write what its tests execute."""
        self._import_sources()
        measured = self._measure()
        recorder = _Recorder(measured)
        measured.start()
        code = _pytest([test_file, *(f"--deselect={test}" for test in self._plan.left_out)], recorder)
        measured.stop()
        numbers = {test: number for number, test in enumerate(recorder.seconds)}
        # What runs for several tests (a fixture of the module) has no context of its own.
        lines = {
            source: {
                line: [numbers[test] for test in (numbers if "" in tests else tests)] for line, tests in found.items()
            }
            for source, found in self._measured(measured)
        }
        if not (code := _unless_empty(code)):
            into.write_text(json.dumps({"seconds": recorder.seconds, "lines": lines}), encoding="utf-8")
        return code

    def record_import(self, into: Path) -> int:
        """Write which lines are executed where the source is imported."""
        measured = self._measure()
        measured.start()
        self._import_sources()
        measured.stop()
        lines = {source: list(found) for source, found in self._measured(measured)}
        into.write_text(json.dumps(lines), encoding="utf-8")
        return 0

    def _measure(self) -> coverage.Coverage:
        os.environ["COVERAGE_CORE"] = "ctrace"
        folders = [str(self.tree.resolve() / folder / "*") for folder in self._plan.sources]
        return coverage.Coverage(data_file=None, config_file=False, include=folders, messages=False)

    def _measured(self, measured: coverage.Coverage) -> Iterator[tuple[str, dict[int, list[str]]]]:
        """Yield each file and, for each line, the contexts in which it was executed."""
        data = measured.get_data()
        for path in data.measured_files():
            yield os.path.relpath(path, self.tree.resolve()), data.contexts_by_lineno(path)

    def _import_sources(self) -> None:
        """Import every module that is going to be changed, so that what runs at import belongs to no test."""
        for name, place in self._plan.packages.items():
            for path in sorted((self.tree / place).rglob("*.py")):
                if path.relative_to(self.tree).as_posix().startswith(self._plan.sources):
                    parts = path.relative_to(self.tree / place).with_suffix("").parts
                    importlib.import_module(".".join((name, *parts)).removesuffix(".__init__"))

    def try_mutant(
        self, mutant: Mutant, stages: Iterable[tuple[Sequence[str], float]], tests: Callable[[Sequence[str]], int]
    ) -> Job:
        """Run the tests of each stage, within its limit in seconds, with the mutant in place, and put the source back."""
        path = self.tree / mutant.file
        source, times = path.read_bytes(), path.stat()
        changed = mutant.apply(source)
        ast.parse(changed)
        outcome = ("passed", "")

        def attempt(chosen: Sequence[str]) -> int:
            # A compiled file whose source has the same size and second would be taken for that of the next mutant.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            _exchange(self.functions.get(mutant.file, ()), source, changed)
            return tests(chosen)

        try:
            path.write_bytes(changed)
            for chosen, limit_s in stages:
                if outcome[0] == "passed":
                    outcome = yield from self.run(partial(attempt, chosen), limit_s)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return outcome


def _functions(tree: Path) -> dict[str, list[FunctionType]]:
    """Return the functions that exist, by the file of a tree that they come from."""
    every = [one for one in gc.get_objects() if isinstance(one, FunctionType)]
    names = {one.__code__.co_filename for one in every}
    paths = {name: Path(name).resolve() for name in names}
    found: dict[str, list[FunctionType]] = {}
    for one in every:
        path = paths[one.__code__.co_filename]
        if path.is_relative_to(tree.resolve()):
            found.setdefault(path.relative_to(tree.resolve()).as_posix(), []).append(one)
    return found


def _exchange(functions: Iterable[FunctionType], source: bytes, changed: bytes) -> None:
    """Give functions that exist already the code of their changed source."""
    by_code: dict[CodeType, list[FunctionType]] = {}
    for one in functions:
        by_code.setdefault(one.__code__, []).append(one)
    forms = (compile(text, "", "exec", dont_inherit=True) for text in (source, changed))
    for old, new in _changed_code(*forms):
        for function in by_code.get(old, ()):
            function.__code__ = new.replace(co_filename=function.__code__.co_filename)


def _changed_code(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the code of each function that differs, and its other form, those inside of others too."""
    if old != new:
        yield old, new
        inner = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
        for pair in zip(*inner, strict=False):
            if pair[0].co_qualname == pair[1].co_qualname:
                yield from _changed_code(*pair)


def _ended(child: int, end: float | None) -> Generator[None, None, str]:
    """Wait for a process until a time of the monotonic clock, and end it and what it started."""
    done = status = 0
    try:
        done, status = os.waitpid(child, os.WNOHANG)
        while not done and (end is None or time.monotonic() < end):
            yield
            done, status = os.waitpid(child, os.WNOHANG)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not done:
            _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return "timeout"
    return "passed" if status == 0 else "failed"


def side_by_side(
    copies: Sequence[Copy], jobs: Iterable[tuple[str, Callable[[Copy], Job]]]
) -> Iterator[tuple[str, Outcome]]:
    """Do jobs, as many at once as there are copies, and yield the name and the outcome of each as it ends."""
    todo, free, active = iter(jobs), list(copies), list[tuple[str, Copy, Job]]()
    while True:
        while free and (job := next(todo, None)):
            active.append((job[0], free[-1], job[1](free.pop())))
        if not active:
            return
        for entry in list(active):
            name, place, running = entry
            try:
                next(running)
            except StopIteration as ended:
                active.remove(entry)
                free.append(place)
                yield name, ended.value
        time.sleep(0.01)


def _pytest(arguments: Sequence[str], *plugins: object) -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
    return int(pytest.main([*options, *arguments], list(plugins)))


def _unless_empty(code: int) -> int:
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def _run_tests(tests: Sequence[str]) -> int:
    """Run some tests, those of a file together, in the order of their first ones; none at all is no failure."""
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    return _unless_empty(_pytest(list(files), _Chosen(frozenset(tests))))


class _Chosen:
    """A plugin of pytest that leaves out all other tests."""

    def __init__(self, tests: frozenset[str]) -> None:
        self._tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests."""
        items[:] = [item for item in items if item.nodeid in self._tests]


class _Warm:
    """A plugin of pytest that does work beside collected tests instead of running them."""

    def __init__(self, work: Callable[[Callable[[Sequence[str]], int]], None]) -> None:
        self._work = work

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do the work; it is given what runs tests by name, until the first failure, in a fork."""
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        items = {item.nodeid: item for item in session.items}

        def run_tests(tests: Sequence[str]) -> int:
            chosen = [items[test] for test in tests if test in items]
            for item, following in zip(chosen, [*chosen[1:], None], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    print(f"\nFAILED {item.nodeid} - ", flush=True)
                    return 1
            return 0

        self._work(run_tests)
        return True


def _processor_time() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


class _Recorder:
    """A plugin of pytest that tells coverage.py which test runs, and takes its time."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}
        self._test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record a test with the fixtures that are its own."""
        self._test = item.nodeid
        self._measured.switch_context(self._test)
        started = _processor_time()
        try:
            return (yield)
        finally:
            self.seconds[self._test] = round(_processor_time() - started, 4)
            self._test = ""
            self._measured.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """Record a fixture that several tests share for all tests of the file."""
        if fixturedef.scope == "function":
            return (yield)
        self._measured.switch_context("")
        try:
            return (yield)
        finally:
            self._measured.switch_context(self._test)


def _read(plan: Plan, folders: Iterable[str]) -> dict[str, bytes]:
    paths = (path for folder in folders for path in sorted((plan.root / folder).rglob("*.py")))
    return {path.relative_to(plan.root).as_posix(): path.read_bytes() for path in paths}


def record(plan: Plan, folder: Path, copies: Sequence[Copy]) -> Recording:
    """Return the recording in a folder, after running the test files that have changed since (all, if others have)."""
    texts = _read(plan, plan.tests)
    files = [name for name in texts if Path(name).name.startswith("test_")]
    tests = {name: _digest(texts[name]) for name in files if name not in plan.left_out}
    helpers = (text for name, text in texts.items() if name not in files)
    base = _digest(*helpers, *_read(plan, plan.packages.values()).values())
    places = {name: folder / f"{Path(name).stem}-{_digest(base, digest)}.json" for name, digest in tests.items()}
    missing = [name for name, place in places.items() if not place.exists()]

    def job(name: str) -> tuple[str, Callable[[Copy], Job]]:
        return name, lambda copy: copy.run(partial(copy.record, name, places[name]))

    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, (result, output)) in enumerate(side_by_side(copies, map(job, missing)), 1):
        if result != "passed":
            sys.exit(f"mutants: the tests fail without a mutant.\n{output}")
        print(f"{number}/{len(missing)} recorded {name}", flush=True)

    place = folder / f"import-{base}.json"
    for _, (result, output) in side_by_side(
        copies[:1], [("", lambda copy: copy.run(partial(copy.record_import, place)))]
    ):
        if result != "passed":
            sys.exit(f"mutants: the source cannot be imported.\n{output}")
    imported = json.loads(place.read_text(encoding="utf-8"))
    found = Recording(digests=tests, imported={source: set(lines) for source, lines in imported.items()})
    for place in places.values():
        facts = json.loads(place.read_text(encoding="utf-8"))
        found.seconds |= facts["seconds"]
        names = list(facts["seconds"])
        for source, lines in facts["lines"].items():
            for line, numbers in lines.items():
                found.lines.setdefault(source, {}).setdefault(int(line), set()).update(names[n] for n in numbers)
    return found


def _first_failure(output: str) -> str:
    """Return the first test that failed, without what it said."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].partition(" ")[2].partition(" - ")[0] if lines else ""


def _known(results: Path) -> dict[str, dict[str, Any]]:
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["key"]: line for line in lines}


def _stages(
    tests: Sequence[str], recording: Recording, catches: Counter[str], budget_s: float
) -> list[tuple[list[str], float]]:
    """Return the tests to run first, and the others, each with their limit in seconds."""
    # A quarter of the first ones have caught most mutants up to now.
    apt = [test for test in sorted(tests, key=lambda test: -catches[test]) if catches[test]][: FIRST_TESTS // 4]
    order = list(dict.fromkeys([*apt, *tests]))
    chosen, left_s = order[: FIRST_TESTS // 4], budget_s
    for test in order[FIRST_TESTS // 4 :]:
        left_s -= recording.seconds[test]
        if left_s > 0:
            chosen.append(test)
    stages = (chosen[:FIRST_TESTS], chosen[FIRST_TESTS:])
    return [(some, 5 + 4 * sum(map(recording.seconds.__getitem__, some))) for some in stages if some]


@dataclass(slots=True)
class _Trial:
    """Mutants to try, and what is known of them and of others."""

    recording: Recording
    results: Path
    budget_s: float
    digests: dict[str, dict[str, str]]
    screen: int
    """File descriptor for messages."""

    def warm(self, mutants: Sequence[Mutant], place: Copy) -> int:
        """Try mutants in forks of a process that has imported the source and the tests."""
        files = sorted({test.partition("::")[0] for mutant in mutants for test in self.recording.tests_of(mutant)})

        def work(tests: Callable[[Sequence[str]], int]) -> None:
            place.functions = _functions(place.tree)
            gc.freeze()  # else each fork's collections would copy what they only look at
            for mutant in mutants:
                self._try(mutant, place, tests)

        # The tests' own profiles inherit that a failing example is enough, and need not be made smaller.
        hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
        hypothesis.settings.load_profile("mutants")
        options = ["-s", "--tb=native", f"--basetemp={place.tree.parent / 'temporary'}"]
        return _pytest([*options, *files], _Warm(work))

    def cold(self, mutants: Sequence[Mutant], place: Copy) -> int:
        """Try mutants in forks that import the source anew."""
        for mutant in mutants:
            self._try(mutant, place, _run_tests)
        return 0

    def _try(self, mutant: Mutant, place: Copy, run_tests: Callable[[Sequence[str]], int]) -> None:
        catches = Counter(record["by"] for record in _known(self.results).values())
        tests = self.recording.tests_of(mutant)
        job = place.try_mutant(mutant, _stages(tests, self.recording, catches, self.budget_s), run_tests)
        [(_, (result, output))] = side_by_side([place], [("", lambda _: job)])
        facts = {name: getattr(mutant, name) for name in ("key", "file", "function", "line", "before", "after")}
        found = {"result": result, "by": _first_failure(output), "num_tests": len(tests), "budget_s": self.budget_s}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts | found | self.digests[mutant.key]) + "\n")
        os.write(self.screen, f"{result:8}{mutant.file}:{mutant.line} {mutant.function}\n".encode())


def run(plan: Plan, mutants: Sequence[Mutant], results: Path, workers: int, budget_s: float) -> list[dict[str, Any]]:
    """Try the mutants that are not in the results yet, append what comes out, and return the records of all."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copies = [Copy(plan, Path(temporary) / str(number)) for number in range(workers)]
        for name in plan.libraries:
            importlib.import_module(name)
        recording = record(plan, results.with_name(f"{results.stem}-recording"), copies)
        digests = {
            m.key: {
                "source": _digest((plan.root / m.file).read_bytes()),
                "tests": recording.digest_of(recording.tests_of(m)),
            }
            for m in mutants
        }
        known = _known(results)

        def is_done(mutant: Mutant) -> bool:
            record, now = known.get(mutant.key, {}), digests[mutant.key]
            return record.get("source") == now["source"] and (
                record["result"] != "passed" or (record["tests"] == now["tests"] and record["budget_s"] >= budget_s)
            )

        todo = [m for m in mutants if not is_done(m)]
        print(f"{len(todo)} mutants to try", flush=True)
        trial = _Trial(recording, results, budget_s, digests, os.dup(1))
        for is_cold, work in ((False, trial.warm), (True, trial.cold)):
            some = [m for m in todo if recording.is_imported(m) == is_cold]
            parts = [part for number in range(workers) if (part := some[number::workers])]
            jobs = [("", lambda copy, part=part: copy.run(partial(work, part, copy))) for part in parts]  # noqa: B023
            for _, (result, output) in side_by_side(copies, jobs):
                if result != "passed":
                    sys.exit(f"mutants: the tests cannot be run.\n{output}")
        known = _known(results)
    return [known[m.key] for m in mutants]


def report(records: Sequence[dict[str, Any]]) -> str:
    """Return the caught fraction and the survivors, those judged equivalent apart."""
    survivors = [r for r in records if r["result"] == "passed"]
    judged = [r for r in survivors if r["key"] in EQUIVALENT]
    late = sum(r["result"] == "timeout" for r in records)
    counted, caught = len(records) - len(judged), len(records) - len(survivors)
    share = f" ({caught / counted:.1%})" if counted else ""
    lines = [f"caught {caught} of {counted}{share}, {late} of them by time; {len(judged)} more judged equivalent"]
    for r in survivors:
        reason = EQUIVALENT.get(r["key"])
        tests = {"0": "no test", "1": "1 test"}.get(str(r["num_tests"]), f"{r['num_tests']} tests")
        lines += [f"{r['file']}:{r['line']} {r['function']} ({tests})", f"  - {r['before']}", f"  + {r['after']}"]
        lines += [f"  equivalent: {reason}"] if reason else []
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, plan: Plan = PLAN) -> None:
    """Try a sample of mutants and print what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which sample (default 0)")
    parser.add_argument("--count", type=int, default=400, help="mutants to try (default 400)")
    parser.add_argument("--workers", type=int, default=1, help="mutants at once, each in a copy of its own (default 1)")
    parser.add_argument("--budget", type=float, default=20, help="seconds of tests after the first ones (default 20)")
    parser.add_argument("--results", type=Path, default=plan.root / "runs" / "mutants.jsonl", help="file to append to")
    options = parser.parse_args(arguments)
    mutants = sample(plan, options.seed, options.count)
    print(report(run(plan, mutants, options.results.resolve(), options.workers, options.budget)))


if __name__ == "__main__":
    main()
