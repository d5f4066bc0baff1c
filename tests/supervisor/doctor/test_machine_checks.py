"""Checks of versions, memory, disk, clock and variables, each with a real fault."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from places import ROOT
from tpudist.supervisor.doctor import (
    checks,
    clock_check,
    disk_check,
    environment_check,
    machine_checks,
    version_check,
)
from tpudist.supervisor.doctor.checks import Answer, Check, Verdict
from tpudist.supervisor.doctor.clock_check import KernelClock
from tpudist.supervisor.doctor.cluster_environment import Cluster

GIB = 2**30
ON_TWO_HOSTS = Cluster("TF_CONFIG", ("10.0.0.1:8476", "10.0.0.2:8476"), 0)


def verdict_of(answers):
    (one,) = answers
    assert bool(one.remedy) is (one.verdict is not Verdict.OK), one
    return one.verdict


# The checks themselves.


def test_a_check_that_crashes_or_hangs_becomes_a_row():
    def crash():
        raise KeyError("MemTotal")

    well = Answer("well", "yes")
    start = time.monotonic()
    crashed, hung, last = checks.run_checks(
        [
            Check("crash", crash),
            Check("hang", lambda: time.sleep(60) or [], timeout_s=0.3),
            Check("well", lambda: [well]),
        ]
    )
    assert time.monotonic() - start < 25
    assert last is well
    assert (crashed.asked, crashed.verdict) == ("crash", Verdict.FAIL)
    assert crashed.found == "the check failed: KeyError: 'MemTotal'"
    assert "raise KeyError" in crashed.details
    assert hung.found == "no answer within 0.3 s"
    assert hung.verdict is Verdict.FAIL


def test_calls_run_at_once_and_hanging_ones_time_out():
    def ask(seconds):
        time.sleep(seconds)
        if not seconds:
            raise OSError("gone")
        return seconds

    start = time.monotonic()
    found = checks.call_each(ask, [0.3, 0, 0.2, 60], timeout_s=1)
    assert time.monotonic() - start < 25
    assert found[0.3] == 0.3
    assert isinstance(found[0], OSError)
    assert isinstance(found[60], TimeoutError)


# Versions.


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("0.12.0.1", "<=0.12.0.1,>=0.11.2", True),
        ("0.12.0.2", "<=0.12.0.1,>=0.11.2", False),
        ("0.9.10", ">=0.10.2", False),
        ("0.10", ">=0.10.0", True),
        ("0.13.0.dev20261101", ">=0.13", True),
        ("0.0.50.1", "==0.0.50.*", True),
        ("0.0.5", "==0.0.50.*", False),
        ("0.0.51", "!=0.0.50.*", True),
        ("2.9", "~=2.2", True),
        ("3.0", "~=2.2", False),
        ("2.1", ">2, !=2.1", False),
        ("1", "", True),
        ("", "", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version, bounds, expected):
    assert version_check.is_met(version, bounds) is expected


def install(folder, name, version, *requires):
    """Creates the metadata of an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {x}" for x in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n\n")


def test_requirements_of_an_extra_are_selected(tmp_path, monkeypatch):
    lines = ["numpy>=2", 'a[b]>=1 ; extra == "tpu"', "c<3; python_version<'3'", "d (==1.*)", "e"]
    install(tmp_path, "sample", "1.0", *lines)
    monkeypatch.syspath_prepend(tmp_path)
    found = version_check.requirements_of("sample")
    assert found == {"numpy": ">=2", "d": "==1.*", "e": ""}
    assert version_check.requirements_of("sample", extra="tpu") == {"a": ">=1"}
    assert version_check.requirements_of("not-there") == {}


def test_the_installed_versions_fit():
    (answer,) = version_check.check_versions()
    assert answer.verdict is Verdict.OK, answer
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in answer.found


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("flax", "0.11.0", "flax 0.11.0, but tpudist needs flax>="),
        ("jaxlib", "0.4.1", "jaxlib 0.4.1, but jax needs jaxlib"),
        ("jax", "99.0", "is imported from"),
    ],
)
def test_a_package_outside_its_bounds_is_named(tmp_path, monkeypatch, name, version, told):
    install(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    answers = version_check.check_versions()
    assert verdict_of(answers) is Verdict.FAIL
    assert told in answers[0].found


# Memory and cores.


def make_machine(folder, available_kib, files, cgroup="0::/job"):
    """Creates the files in /proc and /sys of a machine."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup + "\n")
    lines = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"
    (proc / "meminfo").write_text(lines)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(f"{text}\n")
    return {"proc": proc, "cgroups": cgroups}


@pytest.mark.parametrize(
    ("available_gib", "files", "cgroup", "verdict", "told"),
    [
        (40, {}, "0::/job", Verdict.OK, "40.00 GiB of 64.00 GiB available"),
        (1, {}, "0::/job", Verdict.WARNING, "1.00 GiB of"),
        (0.25, {}, "0::/job", Verdict.FAIL, "256 MiB of"),
        (
            40,
            {"job/memory.max": 4 * GIB, "job/memory.current": 3 * GIB},
            "0::/job/step",  # a part of the path that is not in this container
            Verdict.WARNING,
            "1.00 GiB left of the cgroup's 4.00 GiB",
        ),
        (
            40,
            {
                "job/memory.max": 4 * GIB,
                "job/memory.current": 3.9 * GIB // 1,
                "job/memory.stat": f"anon 5\ninactive_file {3 * GIB}",
            },
            "0::/job",
            Verdict.OK,
            "3.10 GiB left of the cgroup's 4.00 GiB",
        ),
        (40, {"job/memory.max": "max"}, "0::/job", Verdict.OK, "40.00 GiB of 64.00 GiB available"),
        (
            40,
            {
                "memory/job/memory.limit_in_bytes": GIB,
                "memory/job/memory.usage_in_bytes": GIB,
                "memory/memory.limit_in_bytes": 2**63 - 4096,
            },
            "7:cpu:/other\n4:memory:/job",
            Verdict.FAIL,
            "0 B left of the cgroup's 1.00 GiB",
        ),
    ],
)
def test_free_memory_is_the_least_of_host_and_cgroup(
    tmp_path, available_gib, files, cgroup, verdict, told
):
    files = {name: f"{x:.0f}" if isinstance(x, float) else x for name, x in files.items()}
    machine = make_machine(tmp_path, int(available_gib * 2**20), files, cgroup)
    answers = machine_checks.check_memory(**machine)
    assert verdict_of(answers) is verdict
    assert told in answers[0].found


@pytest.mark.parametrize(
    ("files", "cgroup", "told"),
    [
        ({"job/cpu.max": "150000 100000"}, "0::/job", "to the time of 1.5"),
        ({"job/cpu.max": "max 100000"}, "0::/job", ""),
        (
            {"cpu/job/cpu.cfs_quota_us": 50000, "cpu/job/cpu.cfs_period_us": 100000},
            "3:cpu:/job",
            "to the time of 0.5",
        ),
        ({"cpu/job/cpu.cfs_quota_us": -1, "cpu/job/cpu.cfs_period_us": 100000}, "3:cpu:/job", ""),
    ],
)
def test_a_quota_of_less_than_two_cores_is_a_warning(tmp_path, monkeypatch, files, cgroup, told):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    answers = machine_checks.check_cores(**make_machine(tmp_path, 2**20, files, cgroup))
    assert verdict_of(answers) is (Verdict.WARNING if told else Verdict.OK)
    assert told in answers[0].found


def test_a_process_on_one_core_is_a_warning(tmp_path):
    allowed = os.sched_getaffinity(0)
    machine = make_machine(tmp_path, 2**20, {})
    try:
        os.sched_setaffinity(0, {min(allowed)})
        answers = machine_checks.check_cores(**machine)
    finally:
        os.sched_setaffinity(0, allowed)
    assert verdict_of(answers) is Verdict.WARNING
    assert answers[0].found == f"1 of {os.cpu_count()}"


def test_few_open_files_are_a_warning():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
        few = machine_checks.check_open_files()
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        enough = machine_checks.check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert verdict_of(few) is Verdict.WARNING
    assert few[0].found.startswith("limit 1000,")
    assert verdict_of(enough) is Verdict.OK


def test_shared_memory_that_is_small_or_missing_is_a_warning(tmp_path, monkeypatch):
    assert verdict_of(machine_checks.check_shared_memory(tmp_path / "x")) is Verdict.WARNING
    assert verdict_of(machine_checks.check_shared_memory(tmp_path)) is Verdict.OK
    monkeypatch.setattr(machine_checks, "_SHARED_BYTES", 2**60)
    assert verdict_of(machine_checks.check_shared_memory(tmp_path)) is Verdict.WARNING


# Disk.


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path):
    (answer,) = disk_check.check_folder("folder", tmp_path)
    assert answer.found.startswith(f"{tmp_path}: ")
    assert answer.verdict is Verdict.OK
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["missing", "a file", "not for writing"])
def test_a_folder_that_cannot_be_written_to_fails(tmp_path, kind):
    folder = Path("/proc") if kind == "not for writing" else tmp_path / "x"
    if kind == "a file":
        folder.write_text("")
    answers = disk_check.check_folder("folder", folder)
    assert verdict_of(answers) is Verdict.FAIL
    assert f"cannot write to {folder}: " in answers[0].found


@pytest.mark.slow
def test_a_full_disk_is_found_by_writing(tmp_path):
    """Whatever `statvfs` says: here a limit of the process, as a quota would be."""
    program = """
import resource, sys
from pathlib import Path
from tpudist.supervisor.doctor import disk_check
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(disk_check.check_folder("folder", Path(sys.argv[1])))
"""
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "File too large" in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("free_bytes", "files", "free_files", "verdict"),
    [
        (2 * GIB, 10**6, 10**5, Verdict.OK),
        (GIB - 1, 10**6, 10**5, Verdict.WARNING),
        (100 * 2**20 - 1, 10**6, 10**5, Verdict.FAIL),
        (2 * GIB, 10**6, 9_999, Verdict.WARNING),
        (2 * GIB, 10**6, 99, Verdict.FAIL),
        (2 * GIB, 0, 0, Verdict.OK),  # btrfs
    ],
)
def test_room_for_bytes_and_files_is_judged(
    tmp_path, monkeypatch, free_bytes, files, free_files, verdict
):
    stats = os.statvfs(tmp_path)
    fields = [1, 1, stats.f_blocks, free_bytes, free_bytes, files, free_files, free_files, 0, 255]
    monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result(fields))
    assert verdict_of(disk_check.check_folder("folder", tmp_path)) is verdict


@pytest.mark.parametrize(
    ("name", "verdict", "told"),
    [
        (None, Verdict.OK, "none"),
        ("gs://bucket/cache", Verdict.OK, "on another machine"),
        ("{tmp}/a/b", Verdict.OK, "{tmp}: "),
        ("/proc/a/b", Verdict.FAIL, "cannot write to /proc"),
    ],
)
def test_the_folder_of_the_compilation_cache_may_be_made_later(
    tmp_path, monkeypatch, name, verdict, told
):
    name = name and name.format(tmp=tmp_path)
    monkeypatch.setattr(disk_check.Setting, "read", lambda self: name)
    answers = disk_check.check_cache()
    assert verdict_of(answers) is verdict
    assert told.format(tmp=tmp_path) in answers[0].found


# The clock.


@pytest.mark.parametrize(
    ("kernel", "chrony", "has_file", "verdict", "told"),
    [
        (KernelClock(True, 0.002), None, False, Verdict.OK, "at most 0.002 s wrong"),
        (KernelClock(False, 16.0), None, True, Verdict.OK, "synchronized by "),
        (KernelClock(False, 16.0), True, False, Verdict.OK, "by chrony"),
        (KernelClock(False, 16.0), False, False, Verdict.WARNING, "has no time source"),
        (KernelClock(False, 16.0), None, False, Verdict.WARNING, "unknown: no time service"),
        (None, None, False, Verdict.WARNING, "unknown: no permission to ask the kernel"),
    ],
)
def test_any_time_service_makes_the_clock_synchronized(
    tmp_path, kernel, chrony, has_file, verdict, told
):
    file = tmp_path / "synchronized"
    if has_file:
        file.touch()
    answers = clock_check.check_clock(lambda: kernel, lambda: chrony, file)
    assert verdict_of(answers) is verdict
    assert told in answers[0].found


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'Stratum         : 3'; echo 'Leap status     : Normal'", True),
        ("echo 'Leap status     : Not synchronised'", False),
        ("echo '506 Cannot talk to daemon'; exit 1", None),
        ("sleep 30", None),
    ],
)
def test_chrony_is_read_with_a_timeout(tmp_path, monkeypatch, script, expected):
    monkeypatch.setattr(clock_check, "_CHRONY_S", 1.0)
    program = tmp_path / "chronyc"
    program.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert clock_check.read_chrony() is expected


def test_the_kernel_clock_can_be_read():
    """An error in the layout of the C structure would return nonsense."""
    found = clock_check.read_kernel_clock()
    assert found is None or 0 <= found.max_error_s <= 16.1  # where the kernel stops counting


# Variables.


@pytest.mark.parametrize(
    ("environ", "cluster", "told"),
    [
        ({}, ON_TWO_HOSTS, ""),
        ({"HTTPS_PROXY": "http://p:1"}, Cluster(), ""),
        ({"https_proxy": "http://p:1"}, ON_TWO_HOSTS, "https_proxy may send traffic for 10.0.0.1"),
        ({"grpc_proxy": "p", "no_proxy": "10.0.0.1"}, ON_TWO_HOSTS, "traffic for 10.0.0.2"),
        ({"ALL_PROXY": "p", "no_proxy": "10.0.0.1, 10.0.0.2"}, ON_TWO_HOSTS, ""),
        ({"http_proxy": "p", "NO_PROXY": "*"}, ON_TWO_HOSTS, ""),
        ({"http_proxy": "p", "no_proxy": ".a.b"}, Cluster("x", ("n1.a.b:1", "n2.a.b:1"), 0), ""),
        (
            {"http_proxy": "p", "no_proxy": ".a.b"},
            Cluster("x", ("n1.a.b:1", "xa.b:1"), 0),
            "for xa.b",
        ),
    ],
)
def test_a_proxy_between_the_processes_is_a_warning(environ, cluster, told):
    answers = environment_check.check_proxies(cluster, environ)
    assert verdict_of(answers) is (Verdict.WARNING if told else Verdict.OK)
    assert told in answers[0].found


SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1:8080"}


@pytest.mark.parametrize(
    ("environ", "verdict", "told"),
    [
        ({}, Verdict.OK, "none"),
        ({"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}, Verdict.OK, "JAX_ENABLE_X64"),
        ({"JAX_NUM_PROCESSES": "2"}, Verdict.WARNING, "does not read JAX_NUM_PROCESSES"),
        ({"JAX_LOCAL_DEVICE_IDS": "0"}, Verdict.WARNING, "hides all other devices"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476"}, Verdict.OK, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_COORDINATOR_ADDRESS": "10.9.9.9:1"}, Verdict.WARNING, "begins with 10.0.0.1:8476"),
        (SLICES, Verdict.WARNING, "does not seem to have a TPU"),
        (SLICES | {"TPU_WORKER_ID": "0"}, Verdict.OK, "MEGASCALE_NUM_SLICES"),
        (SLICES | {"MEGASCALE_SLICE_ID": "2"}, Verdict.FAIL, "SLICE_ID=2 must be from 0 to 1"),
        (
            SLICES | {"MEGASCALE_SLICE_ID": "a"},
            Verdict.FAIL,
            "MEGASCALE_SLICE_ID=a is not a number",
        ),
        ({"MEGASCALE_NUM_SLICES": "2"}, Verdict.FAIL, "without MEGASCALE_COORDINATOR_ADDRESS"),
    ],
)
def test_stale_or_wrong_variables_are_named(environ, verdict, told):
    answers = environment_check.check_variables(ON_TWO_HOSTS, environ)
    assert verdict_of(answers) is verdict
    assert told in answers[0].found


def test_a_coordinator_without_a_cluster_is_stale():
    answers = environment_check.check_variables(Cluster(), {"JAX_COORDINATOR_ADDRESS": "a:1"})
    assert verdict_of(answers) is Verdict.WARNING
    assert answers[0].found == "JAX_COORDINATOR_ADDRESS=a:1 without a cluster"
