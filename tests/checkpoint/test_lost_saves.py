"""A program that loses its last checkpoint does not exit with code 0."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from places import PYTHONPATH

PROGRAM = """
    import atexit, json, os, sys, threading, time, warnings
    import orbax.checkpoint
    from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager, manifest

    write = manifest.write
    warnings.simplefilter("ignore")

    def fail(path, shards):
        time.sleep(0.3)
        raise OSError("the disk is gone")

    def start_none(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def manager_that_fails():
        manager = CheckpointManager(Checkpoint(x=1), f"{sys.argv[1]}/{name}")
        manager.save(1)
        manager.wait()
        manifest.write = fail
        manager.save(2)
        return manager

    def after_the_last_call():
        keep.append(manager_that_fails())

    def without_its_manager():
        manager_that_fails()
        time.sleep(1.0)

    def with_another_exit_code():
        keep.append(manager_that_fails())
        sys.exit(3)

    def closed_by_an_exit_handler():
        atexit.register(manager_that_fails().close)

    def saved_by_an_exit_handler():
        manifest.write = fail
        manager = CheckpointManager(Checkpoint(x=1), f"{sys.argv[1]}/{name}", asynchronous=False)
        atexit.register(manager.save, 1)

    def written_by_an_exit_handler():
        manifest.write = fail
        atexit.register(Checkpoint(x=1).write, f"{sys.argv[1]}/{name}")

    def write_without_threads(path, shards):
        threading.Thread.start = start_none
        write(path, shards)

    def without_threads():  # as Python 3.12.0 and 3.12.1 end
        # Not earlier: a thread of Orbax would wait for a thread that could not start.
        manifest.write = write_without_threads
        keep.append(CheckpointManager(Checkpoint(x=1), f"{sys.argv[1]}/{name}"))
        keep[0].save(1)

    def in_a_block_whose_error_is_caught():
        try:
            with manager_that_fails():
                raise KeyError
        except KeyError:
            pass

    def raised_and_caught():
        try:
            manager_that_fails().close()
        except CheckpointError:
            pass

    def saved_again():
        try:
            with manager_that_fails():
                raise KeyError
        except KeyError:
            manifest.write = write
            keep.append(CheckpointManager(Checkpoint(x=1), f"{sys.argv[1]}/{name}"))
            keep[0].save(3)

    def saved():
        keep.append(CheckpointManager(Checkpoint(x=1), f"{sys.argv[1]}/{name}"))
        keep[0].save(3)

    keep, children = [], {}
    for name in sys.argv[2:]:
        children[name] = os.fork()  # each ends as a program of its own; the imports are shared
        if not children[name]:
            sys.stderr.flush()
            os.dup2(os.open(f"{sys.argv[1]}/{name}.txt", os.O_CREAT | os.O_WRONLY), 2)
            globals()[name]()
            break
    else:
        codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                 for name, child in children.items()}
        print(json.dumps(codes))
"""
LOST = {
    "after_the_last_call": "Step 2 in .*after_the_last_call: OSError: the disk is gone",
    "without_its_manager": "the disk is gone",
    "with_another_exit_code": "the disk is gone",
    "closed_by_an_exit_handler": "the disk is gone",
    "saved_by_an_exit_handler": "of step 1 could not be saved",
    "written_by_an_exit_handler": "could not be written",
    "without_threads": "Step 1 in .*: RuntimeError: can't create new thread",
    "in_a_block_whose_error_is_caught": "the disk is gone",
}
NOT_LOST = ["raised_and_caught", "saved_again", "saved"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_program_that_loses_its_last_checkpoint_exits_with_120(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), *LOST, *NOT_LOST],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,  # 11 programs, on machines that do other things too
        check=True,
    )
    expected = dict.fromkeys(LOST, 120) | dict.fromkeys(NOT_LOST, 0)
    texts = {name: (tmp_path / f"{name}.txt").read_text() for name in expected}
    assert json.loads(done.stdout.splitlines()[-1]) == expected, texts
    for name, why in LOST.items():
        assert texts[name].count("A checkpoint was lost, so the program exits with code 120") == 1
        assert re.search(why, texts[name]), texts[name]
    assert not any("was lost" in texts[name] for name in NOT_LOST)
