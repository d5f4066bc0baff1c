"""`tpudist port`: its output, the files it writes, and its errors."""

import builtins
import json
import re
import subprocess
import sys

import pytest

from places import ROOT
from tpudist import cli

BEFORE = """import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
print(tf.signal.fft(x))
"""
AFTER = """import tensorflow as tf
import tpudist

strategy = tpudist.MirroredStrategy()
# tpudist port: tf.signal.fft (docs/porting.md#names)
print(tf.signal.fft(x))
"""
LEFT = (
    "Porting train.py.\n"
    "train.py:6: tf.signal.fft: use a function of jax.numpy or keras.ops (docs/porting.md#names)\n"
    "train.py: 1 thing is left to port manually; the line numbers are those after the port.\n"
)


@pytest.fixture(autouse=True)
def program(monkeypatch, tmp_path):
    """Creates a program in the current folder."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # The progress of a port that takes longer on a busy machine is not in the expected outputs.
    monkeypatch.setattr("tpudist.cli.port_command.SECONDS_WITHOUT_PROGRESS", float("inf"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(BEFORE)
    return file


def test_port_prints_a_diff_and_the_remaining_names_and_changes_nothing(capsys, program):
    assert cli.main(["port", "train.py"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "-strategy = tf.distribute.MirroredStrategy()\n" in out
    assert "+strategy = tpudist.MirroredStrategy()\n" in out
    assert err == LEFT
    assert program.read_text() == BEFORE


def test_the_diff_can_be_applied_by_patch(capsys, program):
    cli.main(["port", "train.py"])
    patch = capsys.readouterr().out
    subprocess.run(["patch", "-p1"], input=patch, text=True, check=True, capture_output=True)
    assert program.read_text() == AFTER


@pytest.mark.slow
def test_the_guide_shows_the_actual_output(capsys, program):
    page = (ROOT / "docs" / "port_command.md").read_text()
    [diff] = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    [listed] = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    _, _, _, *lines = diff.splitlines()
    program.write_text("".join(f"{line[1:]}\n" for line in lines if line[:1] != "+"))
    assert cli.main(["port", "train.py"]) == 1
    assert capsys.readouterr() == (diff, listed)


def test_port_writes_in_place_or_to_a_different_file(capsys, program, tmp_path):
    assert cli.main(["port", "train.py", "--output", "new.py"]) == 1
    assert capsys.readouterr().out == ""
    assert program.read_text() == BEFORE
    assert (tmp_path / "new.py").read_text() == AFTER
    assert cli.main(["port", "train.py", "--write", "--diff"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("--- a/train.py")
    assert err == LEFT
    assert program.read_text() == AFTER
    assert cli.main(["port", "train.py"]) == 1  # again: same leftovers, no change
    assert capsys.readouterr() == ("\n", LEFT)


@pytest.mark.parametrize(
    ("statements", "line"),
    [
        (
            "d = tf.data.Dataset",
            "tf.data may stay; it needs TensorFlow: pip install tensorflow-cpu",
        ),
        (
            "d = tf.data.Dataset, tf.io.gfile",
            "tf.data, tf.io may stay; they need TensorFlow: pip install tensorflow-cpu",
        ),
        (
            "b = tf.keras.callbacks.TensorBoard('logs')",
            "keras.callbacks.TensorBoard may stay; it needs TensorFlow and tensorboard: "
            "pip install tensorflow-cpu tensorboard",
        ),
        (
            "w = tf.summary.create_file_writer('logs')",
            "tf.summary may stay; it needs TensorFlow and tensorboard: "
            "pip install tensorflow-cpu tensorboard",
        ),
    ],
)
def test_the_exit_code_is_0_if_no_names_remain(capsys, program, statements, line):
    program.write_text(BEFORE.replace("print(tf.signal.fft(x))\n", f"{statements}\n"))
    assert cli.main(["port", "train.py", "--write"]) == 0
    assert capsys.readouterr().err == (
        f"Porting train.py.\ntrain.py: {line}\ntrain.py: nothing is left to port manually.\n"
    )


def test_a_notebook_is_ported_cell_by_cell(capsys, tmp_path):
    cell = {"cell_type": "code", "source": BEFORE.splitlines(keepends=True)}
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert cli.main(["port", "train.ipynb"]) == 1
    out, err = capsys.readouterr()
    assert "+strategy = tpudist.MirroredStrategy()\n" in out
    assert "train.ipynb, cell 1:6: tf.signal.fft" in err


def test_a_slow_port_reports_its_progress(capsys, monkeypatch):
    monkeypatch.setattr("tpudist.cli.port_command.SECONDS_WITHOUT_PROGRESS", 0)
    cli.main(["port", "train.py"])
    assert "train.py: 1 of 9 passes done.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.py"], "none.py cannot be read: No such file or directory. Pass a Python program."),
        (["."], ". cannot be read: Is a directory."),
        (["bytes.py"], "bytes.py is not UTF-8 text."),
        (["text.py"], "text.py cannot be ported. Line 1 is not valid Python"),
        (["plain.py"], "plain.py cannot be ported. It uses neither tf.distribute nor tpudist"),
        (["train.py", "--output", "no/new.py"], "no/new.py cannot be written: No such file"),
        (["train.py", "--write", "--output", "a.py"], "--write overwrites the file"),
    ],
)
def test_unusable_files_and_options_raise_an_error(capsys, tmp_path, arguments, message):
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe")
    (tmp_path / "text.py").write_text("This is a text.\n")
    (tmp_path / "plain.py").write_text("model = 1\n")
    assert cli.main(["port", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "tpudist: " in err
    assert "Traceback" not in err
    assert message in " ".join(err.split())


def test_a_module_may_contain_no_strategy(tmp_path, capsys):
    (tmp_path / "model.py").write_text("import tensorflow as tf\nm = tf.keras.Sequential()\n")
    assert cli.main(["port", "model.py", "--module", "--write"]) == 0
    assert "m = keras.Sequential()\n" in (tmp_path / "model.py").read_text()
    capsys.readouterr()


def test_port_without_libcst_names_the_package_to_install(monkeypatch, capsys):
    load = builtins.__import__

    def load_all_but_libcst(name, *arguments, **more):
        if name.startswith("libcst"):
            raise ModuleNotFoundError("No module named 'libcst'", name="libcst")
        return load(name, *arguments, **more)

    for name in [x for x in sys.modules if x.startswith(("tpudist.port", "libcst"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("tpudist.port", raising=False)
    monkeypatch.setattr(builtins, "__import__", load_all_but_libcst)
    assert cli.main(["port", "train.py"]) == 2
    assert "pip install -e '.[port]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_libcst_and_matplotlib_are_imported_only_when_needed():
    modules = "tpudist, tpudist.cli, tpudist.planner.plan_record"
    code = f"import sys, {modules}; assert not {{'libcst', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_line_endings_are_preserved(program):
    program.write_bytes(BEFORE.replace("\n", "\r\n").encode())
    assert cli.main(["port", "train.py", "--write"]) == 1
    assert program.read_bytes() == AFTER.replace("\n", "\r\n").encode()
