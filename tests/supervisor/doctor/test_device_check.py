"""Checks of devices and of a TPU, in real processes that work, err, crash and hang."""

import fcntl
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from places import ROOT
from tpudist import cli
from tpudist.supervisor.doctor import device_check, device_program, examination, tpu_check
from tpudist.supervisor.doctor.checks import Verdict
from tpudist.xla import emulation, versions

processes = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Imitates a machine without a TPU, and removes variables that other tests have set."""
    for name in ("TPU_LIBRARY_PATH", "TPUDIST_EMULATE", "JAX_PLATFORMS", *tpu_check._VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name in [x for x in os.environ if x.startswith("MEGASCALE_") or x == "TF_CONFIG"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")


def add_to_path(monkeypatch, folder):
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


def make_python(folder, *said, more=""):
    """A program in place of Python: it says something and does no more."""
    file = folder / "python"
    lines = [f"echo '{device_program.MARK}{json.dumps(x)}'" for x in said]
    file.write_text("\n".join(["#!/bin/sh", *lines, more]) + "\n")
    file.chmod(0o755)
    return str(file)


# The program.


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_sum_over_devices_is_exact(count):
    import jax

    found = device_program.sum_over(jax.devices()[:count])
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, device_program.exact_sum(count))
    assert found[0] == sum(range(1, count + 1))
    assert found[-1] == 128 * found[0]


# Devices.


# As a plugin of a vendor would: JAX loads it when it starts devices.
HANGING_PLUGIN = """
import time

def initialize():
    time.sleep(1000)
"""


@pytest.mark.slow
@processes
def test_devices_that_hang_are_ended_and_show_their_stack(tmp_path, monkeypatch):
    (tmp_path / "hanging_plugin.py").write_text(HANGING_PLUGIN)
    info = tmp_path / "hanging-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n\n")
    (info / "entry_points.txt").write_text("[jax_plugins]\nhanging = hanging_plugin\n")
    add_to_path(monkeypatch, tmp_path)
    start = time.monotonic()
    (answer,) = device_check.check_devices(None, timeout_s=6)
    assert time.monotonic() - start < 6 + device_check.END_S + 20
    assert answer.verdict is Verdict.FAIL
    assert answer.found == "no answer within 6 s; its stack is below"
    assert 'hanging_plugin.py", line 5 in initialize' in answer.details
    assert "device_program.py" in answer.details


@processes
def test_a_python_that_hangs_at_its_start_shows_its_stack(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(1000)\n")
    add_to_path(monkeypatch, tmp_path)
    start = time.monotonic()
    (answer,) = device_check.check_devices(2, timeout_s=1)
    assert time.monotonic() - start < 1 + device_check.END_S + 20
    assert answer.verdict is Verdict.FAIL
    assert "no answer within 1 s" in answer.found
    assert 'sitecustomize.py", line 2' in answer.details


@pytest.mark.slow
@processes
def test_a_program_that_ignores_signals_is_killed(tmp_path):
    """It ignores SIGABRT, and has started another one."""
    note = tmp_path / "pids"
    script = f"trap '' ABRT\nsleep 1000 & echo $$ $! > {note}\nwhile true; do wait; done"
    python = make_python(tmp_path, more=script)
    (answer,) = device_check.check_devices(None, timeout_s=0.5, python=python)
    assert answer.verdict is Verdict.FAIL
    pids, deadline = note.read_text().split(), time.monotonic() + 5
    while any(is_running(int(x)) for x in pids) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel ends them after it was asked to
    assert [x for x in pids if is_running(int(x))] == []


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # whose parent has not asked how it ended


@pytest.mark.slow
@processes
def test_devices_that_cannot_start_give_the_error_of_jax(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    (answer,) = device_check.check_devices(None, timeout_s=60)
    assert answer.verdict is Verdict.FAIL
    assert "nonsense" in answer.found
    assert "Error: " in answer.found


DEVICES = {"platform": "cpu", "kind": "cpu", "count": 2}
WRONG = {"is_exact": False, "wrong": [5], "total": [17], "expected": [18]}


@processes
def test_a_wrong_sum_is_a_failure(tmp_path):
    python = make_python(tmp_path, DEVICES, WRONG)
    devices, total = device_check.check_devices(None, timeout_s=20, python=python)
    assert devices.verdict is Verdict.OK
    assert total.verdict is Verdict.FAIL
    assert total.found == "element 5 of the sum is 17, but must be 18"


@processes
def test_devices_that_fail_in_the_sum_are_a_separate_failure(tmp_path):
    python = make_python(tmp_path, DEVICES, more="kill -9 $$")
    devices, total = device_check.check_devices(None, timeout_s=20, python=python)
    assert devices.verdict is Verdict.OK
    assert total.verdict is Verdict.FAIL
    assert "its process exited with code -9" in total.found


@pytest.mark.parametrize(
    ("platforms", "verdict", "told"),
    [("", Verdict.FAIL, "Install libtpu"), ("cpu", Verdict.WARNING, "unset it")],
)
@processes
def test_cpu_devices_on_a_tpu_host_are_reported(tmp_path, monkeypatch, platforms, verdict, told):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    python = make_python(tmp_path, DEVICES, {"is_exact": True, "wrong": []})
    devices, _ = device_check.check_devices(None, timeout_s=20, python=python)
    assert devices.verdict is verdict
    assert told in devices.remedy
    emulated, _ = device_check.check_devices(2, timeout_s=20, python=python)
    assert emulated.verdict is Verdict.OK


@pytest.mark.slow
@processes
def test_processes_end_if_one_of_them_does_not_start(tmp_path):
    """The second hangs, and the first waits for it: both show where."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\ncase $TF_CONFIG in *'\"index\": 1'*) exec sleep 1000;; esac\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    start = time.monotonic()
    (answer,) = device_check.check_local_processes(2, 1, timeout_s=8, python=str(python))
    assert time.monotonic() - start < 8 + device_check.END_S + 20
    assert answer.verdict is Verdict.FAIL
    assert "no answer within 8 s" in answer.found
    assert "in join" in answer.details


def test_emulation_uses_the_variables_of_launch():
    assert emulation.environment_of(4)["JAX_NUM_CPU_DEVICES"] == "4"
    assert emulation.environment_of(4)["JAX_PLATFORMS"] == "cpu"


# A TPU.


def make_dev(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_device_files_or_variables_are_signs_of_a_tpu(tmp_path):
    dev = make_dev(tmp_path, "vfio/vfio", "accelerated")
    assert tpu_check.signs_of_tpu(dev, {}) == []
    assert tpu_check.signs_of_tpu(dev, {"TPU_WORKER_ID": "0", "OTHER": "1"}) == ["TPU_WORKER_ID"]
    assert tpu_check.signs_of_tpu(make_dev(tmp_path, "vfio/0"), {}) == [f"{dev}/vfio/0"]
    make_dev(tmp_path, "accel0", "accel1")
    assert tpu_check.signs_of_tpu(dev, {}) == [f"{dev}/accel0 to {dev}/vfio/0"]


@pytest.mark.parametrize(
    ("version", "has_tpu", "verdict", "told"),
    [
        ("", True, Verdict.FAIL, "not installed; this host seems to have a TPU"),
        ("", False, Verdict.OK, "not installed; this host does not seem to have"),
        ("0.0.1", True, Verdict.WARNING, "0.0.1, but this jax was built for libtpu==0.0."),
    ],
)
def test_libtpu_is_required_on_a_tpu_host(tmp_path, monkeypatch, version, has_tpu, verdict, told):
    monkeypatch.setattr(versions, "version_of", lambda package: version)
    dev = make_dev(tmp_path, "accel0") if has_tpu else tmp_path
    (answer,) = tpu_check.check_libtpu(dev)
    assert answer.verdict is verdict
    assert told in answer.found
    assert bool(answer.remedy) is (verdict is not Verdict.OK)


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_the_installed_libtpu_fits_this_jax(tmp_path):
    (answer,) = tpu_check.check_libtpu(tmp_path)
    assert answer.verdict is Verdict.OK
    assert answer.found.startswith(versions.version_of("libtpu"))


def test_a_missing_custom_libtpu_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    (answer,) = tpu_check.check_libtpu(tmp_path)
    assert answer.verdict is Verdict.FAIL
    (tmp_path / "libtpu.so").touch()
    (answer,) = tpu_check.check_libtpu(tmp_path)
    assert answer.verdict is Verdict.OK


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
if sys.argv[2] == "lock":
    fcntl.lockf(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def hold():
    """Starts a process that holds a file."""
    running = []

    def start(file, how):
        one = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(file), how], stdout=subprocess.PIPE
        )
        running.append(one)
        assert one.stdout.readline() == b"ready\n"
        return one.pid

    yield start
    for one in running:
        one.kill()
        one.communicate()


@processes
def test_the_process_that_has_the_device_open_is_named(tmp_path, hold):
    dev = make_dev(tmp_path / "dev", "accel0", "accel1")
    lock = tmp_path / "lock"
    (answer,) = tpu_check.check_tpu_users(dev, lock)
    assert (answer.verdict, answer.found) == (Verdict.OK, "no, as far as this user can see")
    pid = hold(dev / "accel1", "open")
    (answer,) = tpu_check.check_tpu_users(dev, lock)
    assert answer.verdict is Verdict.FAIL
    assert f"process {pid} (" in answer.found
    assert answer.found.endswith("uses the device")


@processes
def test_the_process_that_holds_the_lock_is_named_and_keeps_it(tmp_path, hold):
    dev, lock = make_dev(tmp_path / "dev", "accel0"), tmp_path / "lock"
    lock.touch()
    assert tpu_check.lock_holder(lock) is None
    pid = hold(lock, "lock")
    assert tpu_check.lock_holder(lock) == pid
    (answer,) = tpu_check.check_tpu_users(dev, lock)
    assert answer.verdict is Verdict.FAIL
    assert f"process {pid} (" in answer.found
    with open(lock, "r+") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_missing_permissions_fail_with_a_remedy(tmp_path, monkeypatch):
    """The tests may run as root, who may open everything; so the answers of the system are made."""
    dev = make_dev(tmp_path / "dev", "accel0")

    def refuse(lock):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(tpu_check, "lock_holder", refuse)
        (answer,) = tpu_check.check_tpu_users(dev)
    assert answer.verdict is Verdict.FAIL
    assert "sudo rm /tmp/libtpu_lockfile" in answer.remedy
    monkeypatch.setattr(os, "access", lambda file, how: False)
    (answer,) = tpu_check.check_tpu_users(dev)
    assert answer.verdict is Verdict.FAIL
    assert f"chmod a+rw {dev}/accel0" in answer.remedy


# The command.


@pytest.mark.slow
@processes
def test_the_doctor_without_a_folder_checks_this_machine(capsys):
    code = cli.main(["doctor", "--emulate", "2", "--processes", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {x["asked"]: x for x in found["checks"]}
    assert rows["devices"]["found"] == "2 x cpu (cpu), emulated"
    assert rows["all-reduce"]["found"] == "the sum over 2 device(s) is exact"
    assert rows["2 processes of 2"]["found"] == "the sum over 4 device(s) is exact"
    assert set(rows) >= {"versions", "libtpu", "clock", "memory", "proxies", "working folder"}
    assert found["ok"] is all(x["verdict"] != "fail" for x in found["checks"])
    assert code == (0 if found["ok"] else 1)


@processes
def test_a_fault_is_a_row_a_remedy_and_the_exit_code_1(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    monkeypatch.setenv("TPUDIST_EMULATE", "1")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail     cluster" in out
    assert "cannot read TF_CONFIG" in out
    assert "What to do:\ncluster" in out
    assert "1 x cpu (cpu), emulated" in out
    assert "1 failed, " in out


def test_the_doctor_ends_even_if_every_check_hangs(monkeypatch, capsys):
    """The worst case: no check answers, and the command still reports that for each."""
    monkeypatch.setattr(device_check, "END_S", 0.2)
    hang = lambda *_: time.sleep(90)  # noqa: E731
    checks = [examination.Check(f"check {i}", hang, 0.3) for i in range(5)]
    monkeypatch.setattr(examination, "_quick_checks", lambda: checks)
    for name in ("check_devices", "check_local_processes"):
        monkeypatch.setattr(device_check, name, hang)
    start = time.monotonic()
    assert cli.main(["doctor", "--processes", "2", "--timeout-s", "1"]) == 1
    assert time.monotonic() - start < 40
    out = capsys.readouterr().out
    assert out.count("no answer within") == 7
    assert "7 failed, 0 warnings." in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--emulate", "0"], "--emulate 0: it must be at least 1"),
        (["--processes", "0"], "--processes 0: it must be at least 1"),
        (["--timeout-s", "0.5"], "--timeout-s 0.5: it must be at least 1"),
        (["runs/x", "--json"], "The options are for checks of this machine"),
    ],
)
def test_wrong_use_is_refused(args, message, capsys):
    assert cli.main(["doctor", *args]) == 2
    assert message in capsys.readouterr().err


def test_an_invalid_number_of_emulated_devices_is_rejected(monkeypatch, capsys):
    monkeypatch.setenv("TPUDIST_EMULATE", "many")
    assert cli.main(["doctor"]) == 2
    assert "TPUDIST_EMULATE requests 'many' devices" in capsys.readouterr().err
