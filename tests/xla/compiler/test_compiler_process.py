import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from kept_programs import jax_keeps_programs
from tpudist.xla import topology
from tpudist.xla.compiler import child, compiler_process, flags, jax_cache, lowered_program
from tpudist.xla.compiler.compiler_process import CompilerDied, HbmExceeded
from tpudist.xla.hlo import compiled_program, hlo_module

pytestmark = pytest.mark.multiprocess
WIDTH = 256


def _step(weights, x):
    hidden = x
    for _ in range(3):
        hidden = jax.nn.relu(hidden @ weights)
    # The names look like sharding attributes, but must not affect how a result is split.
    return (hidden**2).sum(), {"sdy.sharding?": hidden}, weights - 0.1


def _lowered(devices, width=WIDTH, **how):
    """Returns a small program and its mesh, whose devices are in an unusual order."""
    grid = np.array(devices[::-1]).reshape(-1, 2)
    mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def shape(*spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=sharding)

    # The compiler chooses the sharding of the first two.
    out_shardings = (None, None, NamedSharding(mesh, P("data", "model")))
    step = jax.jit(_step, donate_argnums=0, out_shardings=out_shardings, **how)
    return step.lower(shape("data", "model"), shape("data")), mesh


@pytest.fixture(autouse=True, scope="module")
def _no_compiler_is_left():
    yield
    compiler_process.close_compilers()
    assert compiler_process._idle == []


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("name", "num_devices"), [("v5e:2x4", 8), ("v5e:2x4", 4), ("2xv5e:2x2", 8), ("tpu7x:2x2x1", 8)]
)
def test_another_process_compiles_the_same_program(name, num_devices):
    """Covers the device order, free output shardings, and the options of jit and of the call."""
    lowered, mesh = _lowered(
        topology.devices(name)[:num_devices],
        compiler_options={"xla_tpu_scoped_vmem_limit_kib": 20000},
    )
    options = {"xla_tpu_enable_latency_hiding_scheduler": True}
    progress = []
    there = compiler_process.compile_elsewhere(
        lowered, mesh.devices, options, progress=lambda *told: progress.append(told)
    )
    here = compiler_process.compile_here(lowered, options)
    assert there.text == here.text == lowered.compile(compiler_options=options).as_text()
    assert there.memory == here.memory
    assert there.buffers == here.buffers
    assert there.seconds > 0
    assert progress
    assert {what for what, _ in progress} <= {"starting the compiler", "compiling"}


@pytest.mark.libtpu
def test_a_compile_without_code_differs_only_by_the_code_and_its_cycles():
    lowered, mesh = _lowered(topology.devices("v5e:2x4"))
    whole = compiler_process.compile_elsewhere(lowered, mesh.devices)
    compiler_process.close_compilers()
    early = compiler_process.compile_elsewhere(lowered, mesh.devices, with_code=False)
    assert early.buffers == whole.buffers
    assert early.memory.generated_code_bytes is None
    assert whole.memory.generated_code_bytes > 0
    for name in ("argument_bytes", "output_bytes", "alias_bytes"):
        assert getattr(early.memory, name) == getattr(whole.memory, name) > 0
    modules = [hlo_module.parse(program.text) for program in (early, whole)]
    assert ["estimated_cycles" in x.text for x in (early, whole)] == [False, True]
    kinds = [[(x.opcode, x.shape) for x in m.entry.instructions.values()] for m in modules]
    assert kinds[0] == kinds[1]
    # A refusal comes before the machine code.
    large, mesh = _lowered(topology.devices("v5e:2x4"), width=2**17)
    with pytest.raises(HbmExceeded):
        compiler_process.compile_elsewhere(large, mesh.devices, with_code=False)


@pytest.mark.libtpu
def test_a_program_with_random_numbers_compiles_without_code():
    """The compiler gives such a module another number before it writes the last file."""
    (device,) = topology.devices("v5e:1x1")
    arguments = jax.random.key(0), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    draw = jax.jit(lambda key, x: x * jax.random.bernoulli(key, 0.5, x.shape))
    with jax.default_device(device):
        lowered = draw.trace(*arguments).lower(lowering_platforms=("tpu",))
    early = compiler_process.compile_elsewhere(lowered, [device], with_code=False)
    assert early.memory.generated_code_bytes is None


def test_code_for_sparse_cores_is_not_awaited(tmp_path):
    """The compiler generates it for minutes before it writes the last file."""
    kinds = ["", "-buffer-assignment", "-live-range"]
    files = [tmp_path / f"module_0003.jit_f.after_optimizations{kind}.txt" for kind in kinds]
    for file in (tmp_path / "module_0000.jit_f.before_optimizations.txt", *files):
        assert not compiled_program.is_code_next(str(tmp_path))
        file.write_text("text")
    assert not compiled_program.is_code_next(str(tmp_path))  # they may not be complete
    for file in files:
        os.utime(file, (0, 0))
    assert compiled_program.is_code_next(str(tmp_path))


@pytest.mark.slow
@pytest.mark.libtpu
def test_the_memory_and_buffers_describe_the_program():
    _, _, found = _usual()
    weights, x = 4 * WIDTH**2 // 8, 4 * WIDTH**2 // 4
    assert found.memory.argument_bytes == weights + x
    assert found.memory.alias_bytes == weights  # donated
    assert found.memory.peak_bytes >= weights + x
    assert found.memory.host_argument_bytes == 0
    for part in ("allocation 0: size", "value: <", "HloLiveRange", "(peak):"):
        assert part in found.buffers


@pytest.mark.libtpu
def test_the_options_of_jit_reach_the_other_process():
    """They are not in any public attribute of the lowered program."""
    options = {"xla_tpu_scoped_vmem_limit_kib": 20000}
    lowered, _ = _lowered(topology.devices("v5e:2x4"), compiler_options=options)
    assert lowered_program.compiler_options_of(lowered) == options


@functools.cache
def _usual():
    """Returns a small program, its mesh, and its compilation with default settings elsewhere."""
    lowered, mesh = _lowered(topology.devices("v5e:2x4"))
    return lowered, mesh, compiler_process.compile_elsewhere(lowered, mesh.devices)


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("setting", "value", "changes_it"),
    [
        ("jax_optimization_level", "O1", True),
        ("jax_exec_time_optimization_effort", -1.0, True),
        ("jax_memory_fitting_level", "O0", False),
        ("jax_compiler_enable_remat_pass", None, False),
        ("jax_disable_most_optimizations", None, False),  # affects only LLVM, for CPUs
    ],
)
def test_jax_settings_for_the_compiler_reach_the_other_process(setting, value, changes_it):
    """They also affect the compilation for a slice. A value of None inverts a boolean setting."""
    lowered, mesh, usual = _usual()
    options = flags.jit_options()
    if setting not in jax.config.values:
        pytest.skip(f"jax {jax.__version__} has no {setting}")
    before = jax.config.values[setting]
    jax.config.update(setting, (not before) if value is None else value)
    try:
        there = compiler_process.compile_elsewhere(lowered, mesh.devices)
        here = compiler_process.compile_here(lowered)
        assert flags.jit_options() != options
    finally:
        jax.config.update(setting, before)
    assert there.text == here.text
    assert (there.text != usual.text) == changes_it


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_program_that_does_not_fit_raises_the_compilers_message():
    lowered, mesh = _lowered(topology.devices("v5e:2x4"), width=200_000)
    with pytest.raises(HbmExceeded, match=r"exceeds available HBM \(15.75G\)") as raised:
        compiler_process.compile_elsewhere(lowered, mesh.devices)
    with pytest.raises(HbmExceeded) as here:
        compiler_process.compile_here(lowered)
    assert str(here.value) == str(raised.value)
    # The error also contains the allocations that the compiler had planned.
    assert here.value.text == raised.value.text
    assert raised.value.text.startswith(str(raised.value))
    assert "HloModule" in raised.value.text


@pytest.mark.slow
@pytest.mark.libtpu
def test_an_option_unknown_to_the_compiler_is_an_error_of_the_caller():
    lowered, mesh = _lowered(topology.devices("v5e:2x4"))
    for attempt in (
        lambda options: compiler_process.compile_elsewhere(lowered, mesh.devices, options),
        lambda options: compiler_process.compile_here(lowered, options),
    ):
        with pytest.raises(ValueError, match="No such compile option: 'xla_tpu_nonsense'"):
            attempt({"xla_tpu_nonsense": True})


@pytest.mark.slow
@pytest.mark.libtpu
def test_an_abort_of_the_compiler_raises_an_error_and_the_next_program_compiles():
    lowered, mesh = _lowered(topology.devices("v5e:2x4"))
    # Too little VMEM for an all-reduce: libtpu fails a check and aborts.
    with pytest.raises(CompilerDied, match=r"SIGABRT\) on a program for v5e:2x4.*\n.*Check failed"):
        compiler_process.compile_elsewhere(
            lowered, mesh.devices, {"xla_tpu_scoped_vmem_limit_kib": 1}
        )
    assert compiler_process.compile_elsewhere(lowered, mesh.devices).text


@pytest.mark.slow
@pytest.mark.libtpu
def test_the_error_distinguishes_a_killed_compiler_from_an_aborted_one():
    lowered, mesh = _lowered(topology.devices("v5e:2x2"))
    compiler_process.compile_elsewhere(lowered, mesh.devices)

    def kill(_, __):
        (waiting_for,) = used
        os.kill(waiting_for.pid, signal.SIGKILL)

    used = list(compiler_process._idle)
    with pytest.raises(CompilerDied, match=r"SIGKILL.*\n.*\nA system that runs out of memory"):
        compiler_process.compile_elsewhere(lowered, mesh.devices, progress=kill)


@pytest.mark.slow
@pytest.mark.libtpu
def test_one_process_compiles_several_programs(monkeypatch):
    started = []

    class Counted(child.Child):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    compiler_process.close_compilers()
    monkeypatch.setattr(compiler_process.child, "Child", Counted)
    lowered, mesh = _lowered(topology.devices("v5e:2x2"))
    for _ in range(3):
        compiler_process.compile_elsewhere(lowered, mesh.devices)
    assert len(started) == 1
    started[0]._process.kill()
    started[0]._process.wait()
    compiler_process.compile_elsewhere(lowered, mesh.devices)
    assert len(started) == 2


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_compiler_with_different_settings_is_not_reused(monkeypatch):
    """XLA and libtpu read their settings only once, when their process starts."""
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    lowered, mesh = _lowered(topology.devices("v5e:2x2"))

    def compiled():
        before = list(compiler_process._idle)
        program = compiler_process.compile_elsewhere(lowered, mesh.devices)
        (compiler,) = compiler_process._idle
        return program.text, before, compiler

    text, _, first = compiled()
    monkeypatch.setenv("UNRELATED", "1")
    assert compiled()[2] is first
    # Too little VMEM, as above; only a new process reads this setting.
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1")
    with pytest.raises(CompilerDied, match="SIGABRT"):
        compiled()
    assert not first.is_alive
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    again, waiting, _ = compiled()
    assert (again, waiting) == (text, [])


def test_programs_for_local_devices_are_compiled_in_this_process():
    lowered, mesh = _lowered(jax.devices(), width=64)
    with pytest.raises(ValueError, match=r"compiles only for the devices of .*topology.devices"):
        compiler_process.compile_elsewhere(lowered, mesh.devices)
    found = compiler_process.compile_here(lowered)
    # A program from JAX's cache has the source lines of the run that compiled it.
    with jax_cache.bypass():
        text = lowered.compile().as_text()
    assert len(found.text) == len(text)  # XLA:CPU prints maps in any order
    assert found.memory.argument_bytes == 4 * 64**2 * (1 / 8 + 1 / 4)
    assert "allocation 0: size" in found.buffers


@pytest.mark.slow
def test_a_program_in_jaxs_cache_is_compiled_again_for_its_buffers(tmp_path):
    """A program from JAX's cache has no description of its buffers."""
    with jax_keeps_programs(tmp_path):
        lowered, _ = _lowered(jax.devices(), width=128)  # not compiled before in this process
        lowered.compile()
        kept = sorted(tmp_path.iterdir())
        assert kept
        found = compiler_process.compile_here(lowered)
        assert "allocation 0: size" in found.buffers
        assert sorted(tmp_path.iterdir()) == kept
        jax.jit(lambda x: x * 5 - 4).lower(np.ones(3)).compile()  # the cache works again
        assert len(list(tmp_path.iterdir())) > len(kept)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_jax_cache_is_restored_after_the_last_compile(enabled):
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, enabled)
    try:
        first, second = jax_cache.bypass(), jax_cache.bypass()
        with first:
            second.__enter__()
            assert not getattr(jax.config, name)
        assert not getattr(jax.config, name)
        second.__exit__(None, None, None)
        assert getattr(jax.config, name) is enabled
    finally:
        jax.config.update(name, before)


@pytest.mark.slow
def test_an_option_unknown_to_the_local_compiler_is_an_error_of_the_caller():
    lowered, _ = _lowered(jax.devices(), width=64)
    with pytest.raises(ValueError, match="xla_nonsense"):
        compiler_process.compile_here(lowered, {"xla_nonsense": True})
