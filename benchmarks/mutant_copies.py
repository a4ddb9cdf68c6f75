"""Copies of the repository in which tests run in forks: recorded, or with a mutant in place."""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import TypeAlias

import coverage
import hypothesis
import pytest
from mutations import Mutant

LEFT_OUT = {"build", "dist", "runs", "site"}
"""Folders of the root that are no source."""
MEMORY_LIMIT = 8 << 30
"""Bytes of data that the tests of a mutant may allocate: an endless loop that appends ends here."""
PR_SET_PDEATHSIG = 1
"""Option of Linux' prctl: the signal that a process gets when its parent ends."""
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


class Copy:
    """A copy of the repository whose packages are imported instead of the installed ones."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self.tree, self._site = plan, folder / "tree", folder / "site"
        self._functions: dict[str, list[FunctionType]] = {}
        """Functions of this process that come from the copy, by file."""

        def left_out(place: str, names: list[str]) -> set[str]:
            made = {name for name in names if name.startswith(".") or name == "__pycache__"}
            return made | (LEFT_OUT if Path(place) == plan.root else set())

        shutil.copytree(plan.root, self.tree, ignore=left_out)
        self._names = frozenset(os.listdir(self.tree))
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

    def warm(self, files: Sequence[str], work: Callable[[Callable[[Sequence[str]], int]], None]) -> int:
        """Import files of tests and do work, which is given what runs tests of them by name, in a fork."""
        # The tests' own profiles inherit that a failing example is enough, and need not be made smaller.
        hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
        hypothesis.settings.load_profile("mutants")

        def begin(run_tests: Callable[[Sequence[str]], int]) -> None:
            self._functions = _functions(self.tree)
            gc.freeze()  # else each fork's collections would copy what they only look at
            work(run_tests)

        options = ["-s", "--tb=native", f"--basetemp={self.tree.parent / 'temporary'}"]
        return _pytest([*options, *files], _Warm(begin))

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
            _exchange(self._functions.get(mutant.file, ()), source, changed)
            return tests(chosen)

        try:
            path.write_bytes(changed)
            for chosen, limit_s in stages:
                if outcome[0] == "passed":
                    outcome = yield from self.run(partial(attempt, chosen), limit_s)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            self._tidy_up()
        return outcome

    def _tidy_up(self) -> None:
        """Remove what tests left in their working folder, where a mutant lets them run what otherwise is refused."""
        for name in set(os.listdir(self.tree)) - self._names:
            place = self.tree / name
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink()


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


def run_tests(tests: Sequence[str]) -> int:
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
        """Call the work function with a function that runs tests by name, in a fork, until the first failure."""
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        items = {item.nodeid: item for item in session.items}

        def run_collected(tests: Sequence[str]) -> int:
            chosen = [items[test] for test in tests if test in items]
            for item, following in zip(chosen, [*chosen[1:], None], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    print(f"\nFAILED {item.nodeid} - ", flush=True)
                    return 1
            return 0

        self._work(run_collected)
        return True


def _processor_time() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


class _Recorder:
    """A plugin of pytest that gives coverage.py the running test, and takes its time."""

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
