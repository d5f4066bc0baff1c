"""Measures how many small faults the tests notice.

    python scripts/mutants.py draw --out DIR          # 60 mutants from a fixed seed
    python scripts/mutants.py trace --out DIR [ARGS]  # one run of the tests, to see what they reach
    python scripts/mutants.py run --out DIR           # each mutant against the tests of its package

A *mutant* is the package with one line changed: a comparison, an operator, a number, a truth
value, or a statement that is dropped. It is *caught* if a test of its package fails. Only tests
that reach the changed statement run, the fastest first, up to the first failure and for at most
five minutes by their recorded times. `trace` passes ARGS to pytest.

Mutants are drawn by what they change, not by where it stands: a file that moves keeps its mutants.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 300  # for the tests of one mutant, by the durations that `trace` has recorded
ALL_TESTS = ("-m", "")  # options of pytest that leave no test out
TIMEOUT_S = 900  # for one mutant: a mutant whose tests take three times as long is caught

_COMPARISONS = {
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
}
_OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """One changed line: where the changed statement stands, and the line before and after."""

    file: str  # relative to the root, such as `tpudist/xla/mesh.py`
    function: str
    first_line: int
    last_line: int
    before: str
    after: str

    @property
    def package(self) -> str:
        """The package or module at the top of `tpudist/`."""
        return Path(self.file).parts[1].removesuffix(".py")


def mutants_of(root: Path, number: int, seed: int) -> list[Mutant]:
    """Draws mutants of `root/tpudist`: those whose contents have the smallest hashes."""
    found: dict[str, Mutant] = {}
    for file in sorted((root / "tpudist").rglob("*.py")):
        source = file.read_text()
        lines = source.splitlines()
        name = str(file.relative_to(root))
        for function, statement, node, changed in _changes(ast.parse(source)):
            if (mutant := _mutant(name, lines, function, statement, node, changed)) is None:
                continue
            key = f"{seed} {function} {ast.unparse(statement)[:500]} {mutant.before} {mutant.after}"
            found.setdefault(hashlib.sha256(key.encode()).hexdigest(), mutant)
    return [found[key] for key in sorted(found)[:number]]


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.AST, ast.AST | None]]:
    """Every change: the function, the statement, the node to replace and its replacement."""
    for function, statement in _statements(tree, ""):
        if isinstance(statement, _DROPPED) and not _is_docstring(statement):
            yield function, statement, statement, None
        if isinstance(statement, (ast.Raise, ast.Assert)):
            continue  # its expression is a message, or a claim about ourselves
        for node in _expressions(statement):
            if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
                changed = copy.copy(node)
                changed.ops = [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
                yield function, statement, node, changed
            elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _OPERATORS:
                changed = copy.copy(node)
                changed.op = _OPERATORS[type(node.op)]()
                yield function, statement, node, changed
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield function, statement, node, node.operand
            elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
                yield function, statement, node, ast.Constant(not node.value)
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
                yield function, statement, node, ast.Constant(node.value + 1)


def _statements(node: ast.AST, function: str) -> Iterator[tuple[str, ast.stmt]]:
    """The statements inside functions, with the dotted name of their function."""
    for child in ast.iter_child_nodes(node):
        name = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{function}.{child.name}".removeprefix(".")
        elif isinstance(child, ast.stmt) and function:
            yield function, child
        if isinstance(child, ast.ClassDef) and not function:
            for part in child.body:
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from _statements(part, f"{name}.{part.name}")
        else:
            yield from _statements(child, name)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without those of the statements nested in it."""
    waiting = [
        child
        for field, value in ast.iter_fields(statement)
        if field not in ("body", "orelse", "finalbody", "handlers", "cases", "annotation")
        for child in (value if isinstance(value, list) else [value])
        if isinstance(child, ast.AST)
    ]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.JoinedStr, ast.Lambda)):
            continue
        yield node
        waiting += [x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.stmt)]


def _mutant(
    file: str,
    lines: list[str],
    function: str,
    statement: ast.stmt,
    node: ast.AST,
    changed: ast.AST | None,
) -> Mutant | None:
    """The mutant that replaces a node, if the node stands on one line."""
    at, to = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    if not at or at != to:
        return None
    line = lines[at - 1]
    start, stop = (
        len(line.encode()[:offset].decode())
        for offset in (getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0))
    )
    text = "pass" if changed is None else f"({ast.unparse(changed)})"
    if isinstance(changed, ast.Constant):
        text = ast.unparse(changed)
    header_end = statement.end_lineno or at
    if body := getattr(statement, "body", None):
        header_end = max(statement.lineno, body[0].lineno - 1)
    return Mutant(
        file, function, statement.lineno, header_end, line, line[:start] + text + line[stop:]
    )


# The module that every process of a traced run loads as `sitecustomize`: it notes which test runs
# when a mutated statement is reached. Child processes know the test by pytest's own variable.
_TRACER = """
import json, os, sys
_sites = {}
for number, (file, first, last) in enumerate(json.load(open(os.environ["MUTANT_SITES"]))):
    for line in range(first, last + 1):
        _sites.setdefault((file, line), []).append(number)
_seen = set()
_files = {file for file, _ in _sites}
def _line(code, line):
    numbers = code.co_filename in _files and _sites.get((code.co_filename, line))
    if not numbers:
        return sys.monitoring.DISABLE
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    for number in numbers:
        if (number, test) not in _seen:
            _seen.add((number, test))
            with open(os.path.join(os.environ["MUTANT_TRACES"], f"{os.getpid()}.jsonl"), "a") as f:
                f.write(json.dumps([number, test]) + "\\n")
sys.monitoring.use_tool_id(4, "mutants")
sys.monitoring.register_callback(4, sys.monitoring.events.LINE, _line)
sys.monitoring.set_events(4, sys.monitoring.events.LINE)
"""


# A plugin of pytest that notes how long each test took, in the process that collects the reports.
_DURATIONS = """
import json, os
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.path.join(os.environ["MUTANT_TRACES"], "durations"), "a") as f:
            f.write(json.dumps([report.nodeid, report.duration]) + "\\n")
"""

# A plugin of pytest that notes which tests failed.
_FAILURES = """
import os
def pytest_runtest_logreport(report):
    if report.failed:
        with open(os.environ["MUTANT_FAILURES"], "a") as f:
            f.write(report.nodeid + "\\n")
"""


def trace(out: Path, root: Path, arguments: list[str]) -> int:
    """Runs the tests once: writes which tests reach which mutant, and how long each takes."""
    mutants = read(out)
    traces = out / "traces"
    traces.mkdir(exist_ok=True)
    sites = [[str(root / x.file), x.first_line, x.last_line] for x in mutants]
    (out / "sites.json").write_text(json.dumps(sites))
    (out / "sitecustomize.py").write_text(_TRACER)
    (out / "mutant_durations.py").write_text(_DURATIONS)
    environment = os.environ | {
        "MUTANT_SITES": str(out / "sites.json"),
        "MUTANT_TRACES": str(traces),
        "PYTHONPATH": os.pathsep.join([str(out), *filter(None, [os.getenv("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "mutant_durations", *arguments]
    return subprocess.run(command, cwd=root, env=environment).returncode


def read(out: Path) -> list[Mutant]:
    """The mutants that `draw` has written."""
    return [Mutant(**x) for x in json.loads((out / "mutants.json").read_text())]


def reached(out: Path) -> dict[int, set[str]]:
    """The tests that reach each mutant, by its number."""
    found: dict[int, set[str]] = collections.defaultdict(set)
    for file in (out / "traces").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            number, test = json.loads(line)
            found[number].add(_without_group(test))
    return found


def durations_s(out: Path) -> dict[str, float]:
    """Returns the seconds that each test took in the traced run, its fixtures included."""
    found: dict[str, float] = collections.defaultdict(float)
    for line in (out / "traces" / "durations").read_text().splitlines():
        test, duration_s = json.loads(line)
        found[_without_group(test)] += duration_s
    return found


def _without_group(test: str) -> str:
    """The name of a test without the group that pytest-xdist adds."""
    return re.sub(r"@[^@\]]*$", "", test)


def chosen_tests(
    mutant: Mutant, reaching: set[str], took_s: dict[str, float], folders: Collection[str]
) -> list[str]:
    """The tests of a mutant's package that reach it: the fastest first, within the budget."""
    own = [x for x in folders if x == mutant.package or x.startswith(f"{mutant.package}_")]
    own += [f"test_{mutant.package}.py"]
    tests = [x for x in reaching if len(x.split("/")) > 1 and x.split("::")[0].split("/")[1] in own]
    chosen, total_s = [], 0.0
    for test in sorted(tests, key=lambda x: (took_s[x], x)):
        total_s += took_s[test]
        if chosen and total_s > BUDGET_S:
            break
        chosen.append(test)
    return chosen


def run_one(mutant: Mutant, tests: list[str], root: Path, cache: Path) -> str:
    """Runs tests against a mutant in a copy: "caught", "survived" or "not reached".

    A test that fails without the mutant as well shows nothing: that is "invalid". Compiled programs
    are in `cache`, which all mutants share: most of them change none.
    """
    if not tests:
        return "not reached"
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "site", "runs")
        shutil.copytree(root, tree, ignore=ignored)
        file = tree / mutant.file
        source = file.read_text()
        lines = source.splitlines()
        lines[lines.index(mutant.before, mutant.first_line - 1)] = mutant.after
        file.write_text("\n".join(lines) + "\n")
        code, failed = _run_tests(tree, tests, Path(folder), cache)
        if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "survived"
        file.write_text(source)
        # Python tells versions of a file by size and whole seconds: bytecode of the mutant is old.
        os.utime(file, (time.time() + 10, time.time() + 10))
        code, _ = _run_tests(tree, failed or tests, Path(folder), cache)
        return "caught" if code == 0 else "invalid"


def _run_tests(tree: Path, tests: list[str], folder: Path, cache: Path) -> tuple[int, list[str]]:
    """Runs tests up to the first failure: the exit code, and the tests that failed."""
    (folder / "tests.txt").write_text("\n".join(tests))
    (folder / "mutant_failures.py").write_text(_FAILURES)
    failures = folder / "failures"
    failures.write_text("")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-o", f"cache_dir={cache}"]
    command += ["-p", "mutant_failures", *ALL_TESTS, f"@{folder / 'tests.txt'}"]
    paths = {"PYTHONPATH": f"{tree}{os.pathsep}{folder}", "MUTANT_FAILURES": str(failures)}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | paths,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = pytest.ExitCode.TESTS_FAILED
        with contextlib.suppress(ProcessLookupError):  # processes that the tests have started
            os.killpg(process.pid, signal.SIGKILL)
    return code, failures.read_text().splitlines()


def run(out: Path, root: Path, jobs: int) -> None:
    """Runs all mutants and writes `results.json`; prints each, and the share that is caught."""
    mutants, tests, took_s = read(out), reached(out), durations_s(out)
    folders = [x.name for x in (root / "tests").iterdir()]
    chosen = [chosen_tests(x, tests[i], took_s, folders) for i, x in enumerate(mutants)]
    results: dict[int, str] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(run_one, x, chosen[number], root, out / "cache"): number
            for number, x in enumerate(mutants)
        }
        for done in concurrent.futures.as_completed(waiting):
            number = waiting[done]
            results[number] = done.result()
            mutant = mutants[number]
            print(f"{number:3} {results[number]:12} {mutant.file}:{mutant.first_line}", flush=True)
            print(f"      - {mutant.before.strip()}\n      + {mutant.after.strip()}", flush=True)
    (out / "results.json").write_text(json.dumps({str(k): v for k, v in sorted(results.items())}))
    caught = sum(x == "caught" for x in results.values())
    print(f"{caught} of {len(mutants)} mutants caught")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["draw", "trace", "run"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--root", type=Path, default=ROOT, help="clone that is measured")
    parser.add_argument("--number", type=int, default=60, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    options, rest = parser.parse_known_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.action == "draw":
        mutants = mutants_of(options.root, options.number, options.seed)
        (out / "mutants.json").write_text(json.dumps([asdict(x) for x in mutants], indent=1))
        for number, mutant in enumerate(mutants):
            print(f"{number:3} {mutant.file}:{mutant.first_line}\n      - {mutant.before.strip()}")
            print(f"      + {mutant.after.strip()}")
    elif options.action == "trace":
        sys.exit(trace(out, options.root.resolve(), rest))
    else:
        run(out, options.root.resolve(), options.jobs)


if __name__ == "__main__":
    main()
