"""Emulated devices: request them in time, and run reliably however far the host is ahead."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tpudist
from benchmarks import emulation
from places import PROGRAMS, ROOT
from tpudist.run.dispatch.throttle import MAX_STEPS_IN_FLIGHT, Throttle
from tpudist.xla.emulation import has_accelerators


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in ("TPUDIST_EMULATE", "NPROC")}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=inherited | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables,
    )


# Requests.


@pytest.mark.parametrize("number", [0, -1, 2.5, 8.0, "many", []])
def test_emulate_rejects_an_invalid_number(number):
    with pytest.raises(ValueError, match=r"tpudist\.emulate requests .* devices\. The number must"):
        tpudist.emulate(number)


def test_emulate_names_the_environment_variable_if_it_is_invalid(monkeypatch):
    monkeypatch.setenv("TPUDIST_EMULATE", "eight")
    with pytest.raises(ValueError, match="TPUDIST_EMULATE requests 'eight' devices"):
        tpudist.emulate()


@pytest.mark.parametrize(
    ("platforms", "files", "number", "has"),
    [
        ("", [], 1, False),
        ("", ["accel0", "accel1"], 2, True),
        ("", ["vfio/0", "vfio/vfio"], 2, False),
        ("", ["nvidia0", "nvidiactl"], 1, True),
        ("", ["dri/renderD128"], 1, False),
        ("", ["dri/renderD128", "kfd"], 1, True),
        ("cpu", ["accel0"], 1, False),
        ("tpu,cpu", [], 4, True),
    ],
)
def test_accelerators_are_detected_without_starting_a_backend(
    platforms, files, number, has, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert has_accelerators(number, tmp_path) is has


def test_a_machine_with_accelerators_is_not_emulated(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    tpudist.emulate(4, unless_accelerators=1)  # would fail without unless_accelerators
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(RuntimeError, match="JAX has already started"):
        tpudist.emulate(4, unless_accelerators=1)


def test_emulate_may_be_repeated_with_the_same_number():
    tpudist.emulate(8)
    tpudist.emulate(8)
    assert jax.device_count() == 8


def test_emulate_with_a_different_number_raises_an_error():
    with pytest.raises(
        RuntimeError,
        match=r"emulate\(4\): JAX has already started with 8 cpu device",
    ):
        tpudist.emulate(4)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_emulate_after_the_first_array_raises_an_error_with_the_remedy():
    ended = run_python("import jax.numpy as jnp, tpudist; jnp.ones(3); tpudist.emulate(8)")
    assert ended.returncode == 1
    assert (
        "RuntimeError: emulate(8): JAX has already started with 1 cpu "
        "device(s), and a process chooses its devices once. Call tpudist.emulate(8) before the "
        "first array is made, or start Python with TPUDIST_EMULATE=8 and call tpudist.emulate()."
    ) in ended.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("argument", "variables", "num_devices", "threads"),
    [
        ("", {"TPUDIST_EMULATE": "5", "NPROC": "99"}, 5, 99),
        pytest.param("2", {"TPUDIST_EMULATE": "5", "NPROC": "1"}, 2, 32, marks=pytest.mark.slow),
        pytest.param("16", {}, 16, 64, marks=pytest.mark.slow),
        pytest.param("", {}, 8, 32, marks=pytest.mark.slow),
    ],
)
def test_the_argument_overrides_the_environment_variable_which_overrides_eight(
    argument, variables, num_devices, threads
):
    """XLA needs enough threads: with fewer, an all-reduce waits for threads that wait for it."""
    program = (
        f"import os, jax, tpudist; tpudist.emulate({argument}); print(jax.devices())\n"
        "print('threads', os.environ['NPROC'])"
    )
    ended = run_python(program, **variables)
    assert ended.stdout.count("CpuDevice") == num_devices, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"threads {threads}"


# Dispatch ahead of the devices.


class FakeArray:
    """The output of a step; records whether someone waited for it."""

    def __init__(self, *, deleted: bool = False):
        self.deleted, self.waited = deleted, False

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> None:
        assert not self.deleted, "JAX raises"
        self.waited = True


def outputs_after(throttle: Throttle, outputs: list) -> list[bool]:
    for output in outputs:
        throttle.before_step()
        throttle.after_step(output)
    return [output.waited for output in outputs]


def test_the_host_is_at_most_two_steps_ahead_of_emulated_devices():
    assert MAX_STEPS_IN_FLIGHT == 2
    throttle = Throttle(jax.devices())
    assert outputs_after(throttle, [FakeArray() for _ in range(5)]) == [True] * 3 + [False] * 2


def test_the_host_waits_for_a_later_step_if_outputs_were_donated():
    throttle = Throttle(jax.devices())
    outputs = [FakeArray(deleted=True), FakeArray(), FakeArray()]
    assert outputs_after(throttle, outputs) == [False, True, False]


def test_a_state_donated_on_only_some_devices_does_not_stop_the_steps():
    """Memory that the host reads in place, for example to save a checkpoint, is not donated."""
    sharding = NamedSharding(jax.make_mesh((8,), ("x",), (AxisType.Auto,)), PartitionSpec())
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    throttle = Throttle(jax.devices())
    x, views = add(jax.device_put(jnp.zeros((64, 64)), sharding)), []
    for _ in range(6):
        throttle.before_step()
        throttle.after_step(x)
        views.append(np.asarray(x.addressable_data(0)))
        x = add(x)
    assert [int(view[0, 0]) for view in views] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_error_of_one_step_is_not_raised_by_an_unrelated_step():
    """JAX raises it when the result is read, and in every step that uses the result."""
    program = str(PROGRAMS / "failed_step_program.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["4.0", "raised where it is read", "raised with it"]
    assert done.stderr.count("An earlier step has failed") == 1


def test_one_device_needs_no_throttle():
    throttle = Throttle(jax.devices()[:1])
    assert not any(outputs_after(throttle, [FakeArray() for _ in range(5)]))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_devices", [8, 16])
def test_thousands_of_unread_steps_neither_hang_nor_slow_down(num_devices):
    """Queued steps were ten times slower; a limit of twice allows for a busy machine."""
    loops = emulation.run(num_devices, 8_000, 100)
    assert [(name, loop.num_steps) for name, loop in loops.items()] == [
        ("small", 8_000),
        ("transformer", 100),
    ]
    for name, loop in loops.items():
        # Other work on the machine also slows the waiting loop.
        without_queue_ms = max(loop.first_tenth_ms, loop.waiting_by_hand_ms)
        assert loop.last_tenth_ms <= emulation.MAX_SLOWDOWN * without_queue_ms, (name, loop)
