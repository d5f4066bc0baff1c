"""The process that `test_child.py` starts: it obeys requests until it dies."""

import importlib.util
import os
import sys
import time
from pathlib import Path

# By its path: importing the package, and JAX with it, takes seconds.
_FILE = Path(__file__).resolve().parents[2] / "tpudist" / "xla" / "compiler" / "child.py"
_SPEC = importlib.util.spec_from_file_location("child", _FILE)
child = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(child)


def answer(request, payload):
    if request["do"] == "sum":
        print("a library that prints to the standard output")
        return {"sum": sum(request["numbers"]), "pid": os.getpid()}, payload[::-1]
    if request["do"] == "sleep":
        time.sleep(request["seconds"])
    if request["do"] == "abort":
        print("the last words", file=sys.stderr, flush=True)
        os.abort()
    return {}, b""


if __name__ == "__main__":
    child.serve(answer, idle_s=float(os.environ["IDLE_S"]))
