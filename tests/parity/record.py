"""Records what TensorFlow gives for every case: `python -m tests.parity.record`.

Each strategy runs in a process of its own, since TensorFlow's strategies disturb each other in one.
`--check` compares with the recorded results instead of recording. The environment variable
PARITY_PYTHON names an interpreter that has TensorFlow, if this one has not.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from . import rules, signatures

# The interpreter that has TensorFlow, where it is not this one.
PYTHON = os.environ.get("PARITY_PYTHON", sys.executable)
_TESTS = Path(__file__).parent.parent


def recorded(section: str) -> dict[str, Any]:
    """The rules' results of one file of cases: by rule, then by strategy."""
    return json.loads((rules.RECORDED / f"{section}.json").read_text())["results"]


def _results_on(strategy: str) -> dict[str, Any]:
    """Returns the results of TensorFlow on one strategy, by rule.

    An error in a collective operation leaves TensorFlow's process without any. The following cases
    run in another process, forked before TensorFlow has started its devices.
    """
    from . import on_tensorflow

    names = [r.name for r in rules.all_rules() if strategy in r.strategies]
    results: dict[str, Any] = {}
    errors: list[str] = []
    while len(results) + len(errors) < len(names):
        done = len(results) + len(errors)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=_run_until_aborted, args=(strategy, set(names[done:]), sender)
        )
        child.start()
        sender.close()
        more, more_errors = receiver.recv()
        child.join()
        results |= more
        errors += more_errors
    if errors:
        sys.exit("\n".join(errors))
    return {"version": on_tensorflow.tf.__version__, "results": results}


def _run_until_aborted(strategy: str, names: set[str], sender: Any) -> None:
    from . import on_tensorflow

    on_tensorflow.start()
    api = on_tensorflow.Api()
    results, errors = {}, []
    for rule in rules.all_rules():
        if rule.name in names:
            try:
                results[rule.name] = api.plain(rule.program(api, api.strategy(strategy)))
            except Exception:
                errors.append(f"'{rule.name}' on {strategy}: {traceback.format_exc()}")
                break
            if api.aborted:
                break
    sender.send((results, errors))


def _in_process(*arguments: str) -> Any:
    """Returns the last line that this module prints, in a separate process."""
    done = subprocess.run(
        [PYTHON, "-m", "parity.record", *arguments],
        cwd=_TESTS,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def files() -> dict[Path, str]:
    """Returns the current results of TensorFlow, as the contents of files."""
    names = {s for rule in rules.all_rules() for s in rule.strategies} - rules.RECORDED_ON.keys()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        on = dict(zip(sorted(names), pool.map(_in_process, sorted(names)), strict=True))
        found = pool.submit(_in_process, "--signatures")
    [version] = {given["version"] for given in on.values()}
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    for rule in rules.all_rules():
        results = {s: on[s]["results"][rule.name] for s in rule.strategies if s in on}
        sections.setdefault(rule.section, {})[rule.name] = results
    texts = {
        rules.RECORDED / f"{section}.json": _text(version, results)
        for section, results in sections.items()
    }
    texts[signatures.RECORDED] = _signatures_text(version, found.result())
    return texts


def _text(version: str, results: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each result."""
    entries = []
    for name, on in sorted(results.items()):
        lines = [f"      {json.dumps(s)}: {json.dumps(r)}" for s, r in sorted(on.items())]
        entries.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n    }")
    body = ",\n".join(entries)
    return f'{{\n  "tensorflow": "{version}",\n  "results": {{\n{body}\n  }}\n}}\n'


def _signatures_text(version: str, signatures: dict[str, Any]) -> str:
    """JSON with a line for each symbol."""
    lines = [f"    {json.dumps(n)}: {json.dumps(s)}" for n, s in sorted(signatures.items())]
    body = ",\n".join(lines)
    return f'{{\n  "tensorflow": "{version}",\n  "signatures": {{\n{body}\n  }}\n}}\n'


def changed() -> list[str]:
    """The files that do not hold what TensorFlow gives now."""
    return [p.name for p, text in files().items() if not p.exists() or p.read_text() != text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", nargs="?", help="print the results on this strategy alone")
    parser.add_argument("--signatures", action="store_true", help="print the signatures alone")
    parser.add_argument("--check", action="store_true", help="compare, do not record")
    options = parser.parse_args()
    if options.strategy:
        print(json.dumps(_results_on(options.strategy)))
    elif options.signatures:
        print(json.dumps(signatures.of_tensorflow()))
    elif options.check:
        if names := changed():
            sys.exit(f"TensorFlow gives something else than is recorded in: {', '.join(names)}")
    else:
        for path, text in files().items():
            path.write_text(text)


if __name__ == "__main__":
    main()
