"""The parts of JAX and Flax that tpudist uses beyond their public interfaces, by name.

Where a test here fails, a new version has closed a door or lost a setting. The place to change is
the one that the test names; see "A new version of JAX" in docs/development.md.
"""

import ast
import contextlib
import importlib.metadata
import inspect
import re
import threading
import time

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.extend import core

from places import PACKAGE
from tpudist.programs import jaxprs, out_shardings, user_lines
from tpudist.state import norm_statistics
from tpudist.xla import compile_log, internals, topology, trace_caches, traces
from tpudist.xla.compiler import lowered_program, phases
from tpudist.xla.settings import Setting

PROJECT = PACKAGE.parent / "pyproject.toml"
VERSIONS = f"jax {jax.__version__}, flax {flax.__version__}"

# Settings that a version of JAX no longer has, and which one was the first without it.
LOST = {
    Setting.EXEC_TIME_OPTIMIZATION_EFFORT: (0, 11, 1),
    Setting.MEMORY_FITTING_EFFORT: (0, 11, 1),
}


def version_of(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version(package))[:3])


@pytest.mark.parametrize("setting", Setting, ids=lambda setting: setting.name)
def test_this_jax_has_the_setting(setting):
    gone = setting in LOST and version_of("jax") >= LOST[setting]
    assert setting.is_known != gone, (
        f"jax {jax.__version__} has {'' if setting.is_known else 'lost '}{setting.jax_name}: "
        f"update LOST here, and the setting in tpudist/xla/settings.py."
    )
    if gone:
        assert setting.read() == setting.value[1]
        with pytest.raises(RuntimeError, match=f"{setting.jax_name} = 1.0 does not exist"):
            setting.set(1.0)
    else:
        setting.read()


def test_a_setting_is_read_as_a_context_manager_has_it_in_this_thread():
    with jax.enable_x64(True):
        assert Setting.ENABLE_X64.read()
    assert not Setting.ENABLE_X64.read()


# The private doors, each as its one user opens it.


def coordination_service():
    from jax._src import distributed

    assert hasattr(distributed.global_state, "client")
    assert internals.coordination_client() is None  # one process
    client = type(distributed.global_state).__annotations__["client"]
    assert "DistributedRuntimeClient" in str(client)


def methods_of_the_coordination_service():
    from jaxlib import _jax

    for name in (
        "key_value_set blocking_key_value_get key_value_try_get key_value_dir_get key_value_delete"
    ).split():
        assert callable(getattr(_jax.DistributedRuntimeClient, name))


def preemption_service():
    from jax._src import distributed
    from jaxlib import _jax

    assert distributed.global_state.preemption_sync_manager is None  # one process
    assert callable(_jax.PreemptionSyncManager.reached_sync_point)
    assert not internals.call_at_preemption_poll(lambda: None)


def lowered_programs():
    options = {"xla_cpu_enable_fast_math": True}
    lowered = jax.jit(lambda x: x, compiler_options=options).lower(1.0)
    assert lowered_program.compiler_options_of(lowered) == options
    assert lowered_program.devices_of(lowered) == jax.devices()[:1]
    x = jax.ShapeDtypeStruct((3,), np.float32)
    jitted = jax.jit(lambda a, b, c: (b + 1, c["v"] + 1), donate_argnums=(0, 1))
    inputs = lowered_program.inputs_of(jitted.lower(x, x, {"u": x, "v": x}))
    assert [(x.name, x.shape, x.donated) for x in inputs] == [
        ("b", (3,), True),
        ("c['v']", (3,), False),
    ]


def settings_of_traces():
    before = internals.settings_of_traces()
    with jax.default_matmul_precision("highest"):
        assert internals.settings_of_traces() != before
    assert internals.settings_of_traces() == before != ()


def key_of_trace_caches():
    calls = []
    count = jax.jit(lambda x: (calls.append(0), x)[1])
    for apart in (False, False, True, True, False):
        with trace_caches.separate() if apart else contextlib.nullcontext():
            jax.jit(lambda x: count(x))(1.0)
    assert len(calls) == 3


def text_of_an_hlo_module():
    text = jax.jit(jnp.sin).lower(1.0).compile().as_text()
    assert internals.expand_hlo(text).startswith("HloModule jit_sin")


def evaluation_of_operations():
    names = []

    def evaluate(evaluation, primitive, args, params):
        names.append(primitive.name)
        with internals.use_evaluation():
            return primitive.impl(*args, **params)

    evaluation = internals.make_evaluation(evaluate)
    with internals.name_axis("some", 3), internals.use_evaluation(evaluation), jax.disable_jit():
        assert jax.lax.axis_size("some") == 3
        assert float(jax.grad(jnp.sin)(0.0)) == 1
    assert "cos" in names
    assert traces.is_eager()


def settings_of_a_thread():
    with jax.enable_x64(True), jax.default_device(jax.devices()[-1]):
        known = internals.settings_of_thread()
    dtypes = []

    def compute():
        internals.set_in_thread(known)
        dtypes.append((jnp.ones(1).dtype, jnp.ones(1).devices()))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert dtypes == [(jnp.float64, {jax.devices()[-1]})]
    assert jnp.ones(1).dtype == jnp.float32


def devices_in_force():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        with internals.leave_devices():
            assert jax.sharding.get_mesh().empty
            assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
        assert jax.sharding.get_mesh() == mesh


def arrays_of_parts():
    """Without it, `jax.make_array_from_callback` takes twice the time."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "make_array_from_callback", None)
        array = internals.make_array(values.shape, sharding, values.__getitem__)
    expected = jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
    assert (array.sharding, array.aval) == (expected.sharding, expected.aval)
    assert array.committed
    np.testing.assert_array_equal(array, values)


def current_trace():
    read, outermost = internals.trace_reader()
    assert read() is outermost
    traced = []
    jax.jit(lambda x: (traced.append(read()), x)[1])(1.0)
    assert traced[0] is not outermost
    assert read() is outermost


def mesh_of_a_thread():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    swap_abstract, set_abstract, swap_concrete, set_concrete = internals.mesh_setters()
    with jax.set_mesh(mesh):
        as_set = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
    outside = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
    before = swap_abstract(mesh.abstract_mesh), swap_concrete(mesh)
    assert (jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()) == as_set
    set_abstract(before[0])
    set_concrete(before[1])
    assert (jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()) == outside


def values_of_settings():
    for setting in (Setting.DISABLE_JIT, Setting.DEBUG_NANS, Setting.ENABLE_X64):
        assert internals.state_of_setting(setting.jax_name) is not None
    read = Setting.DISABLE_JIT.make_reader()
    with jax.disable_jit():
        assert read()
    assert not read()


def described_devices():
    assert not internals.is_described(jax.devices()[0])
    if topology.importlib.util.find_spec("libtpu"):
        assert internals.is_described(topology.devices("v5e:2x4")[0])


def client_of_callbacks():
    """Without it, a program of emulated devices that prints cannot be lowered for a slice."""
    context = inspect.signature(internals.mlir.ModuleContext.get_backend)
    assert [*context.parameters] == ["self", "optional"]


def jaxpr_and_its_constants():
    captured = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: x + captured)(1.0)
    assert isinstance(closed, core.ClosedJaxpr)
    assert isinstance(jaxprs.open_jaxpr(closed), core.Jaxpr)
    (constant,) = closed.consts
    np.testing.assert_array_equal(constant, captured)
    assert len(jaxprs.open_jaxpr(closed).constvars) == len(jaxprs.open_jaxpr(closed).invars) == 1
    other = core.ClosedJaxpr(closed.jaxpr, [captured + 1])
    np.testing.assert_array_equal(core.jaxpr_as_fun(other)(1.0)[0], captured + 2)


def source_of_an_equation():
    (eqn,) = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).eqns
    assert user_lines.line_of(eqn).startswith(f"{__file__}:")
    (named,) = jax.make_jaxpr(jax.named_call(jnp.sin, name="here"))(1.0).eqns
    assert "here" in str(named.source_info.name_stack)


def token_of_a_trace():
    assert traces.is_eager()
    jax.jit(lambda x: x if not traces.is_eager() else 1 / 0)(1.0)


def event_of_a_compile():
    counter = compile_log.backend_compiles()
    before = counter.num_programs
    jax.jit(lambda x: x * 3 - 7)(np.ones(5, np.float32))
    assert counter.num_programs > before


def events_of_phases():
    phases.listen()
    start = time.perf_counter()
    jax.jit(lambda x: x * 3 - 8)(np.ones(5, np.float32))
    seconds = phases.take(start)
    assert seconds["lowering"] > 0
    assert seconds["XLA"] > 0


def raw_value_of_an_nnx_variable():
    variable = nnx.Param(jnp.ones(3))
    object.__setattr__(variable, "_raw_value", jnp.zeros(3))
    assert variable._raw_value is variable.get_raw_value()
    assert not variable[...].any()


def flat_nnx_graph():
    graphdef, state = nnx.graphlib.flatten((nnx.Linear(2, 3, rngs=nnx.Rngs(0)),), with_paths=True)
    assert {path[-1] for path in state.paths} == {"kernel", "bias"}
    (copy,) = nnx.graphlib.unflatten(graphdef, [x.get_raw_value() for x in state.leaves])
    assert copy.kernel.shape == (2, 3)


def end_of_the_main_thread():
    assert callable(threading._register_atexit)


def out_shardings_of_jax():
    """Without one, `tpudist/programs/out_shardings.py` raises an error."""
    assert out_shardings.list_missing_parts() == []


# What it is, who opens it (under tpudist/), and the test.
DOORS = {
    "jax._src.distributed.global_state.client": ("xla/internals.py", coordination_service),
    "jax._src.distributed.global_state.preemption_sync_manager": (
        "xla/internals.py",
        preemption_service,
    ),
    "jaxlib._jax.DistributedRuntimeClient": (
        "processes/coordination.py",
        methods_of_the_coordination_service,
    ),
    "Lowered._lowering and its parts": ("xla/compiler/lowered_program.py", lowered_programs),
    "jax._src.config.config_ext.Config": ("xla/internals.py", key_of_trace_caches),
    "jax._src.config.trace_context and its names": ("xla/internals.py", settings_of_traces),
    "jaxlib._hlo.hlo_module_from_text": ("xla/internals.py", text_of_an_hlo_module),
    "jax._src.core.EvalTrace": ("xla/internals.py", evaluation_of_operations),
    "jax._src.config.config_states": ("xla/internals.py", settings_of_a_thread),
    "jax._src.sharding_impls.canonicalize_sharding and what takes its result": (
        "xla/internals.py",
        out_shardings_of_jax,
    ),
    "jax._src.sharding_impls._internal_use_concrete_mesh": ("xla/internals.py", devices_in_force),
    "jax._src.core.trace_state_strong_ref and eval_trace": ("xla/internals.py", current_trace),
    "swap_local and set_local of the mesh": ("xla/internals.py", mesh_of_a_thread),
    "the value of a setting in config_states": ("xla/internals.py", values_of_settings),
    "jax._src.interpreters.pxla.batched_device_put": ("xla/internals.py", arrays_of_parts),
    "the class CompileOnlyPyClient": ("xla/internals.py", described_devices),
    "jax._src.interpreters.mlir.ModuleContext.get_backend": (
        "xla/internals.py",
        client_of_callbacks,
    ),
    "jax.extend.core.Jaxpr and ClosedJaxpr": ("programs/jaxprs.py", jaxpr_and_its_constants),
    "JaxprEqn.source_info": ("programs/replica_equality.py", source_of_an_equation),
    "jax.extend.core.get_opaque_trace_state": ("xla/traces.py", token_of_a_trace),
    "the event backend_compile_duration": ("xla/compile_log.py", event_of_a_compile),
    "the event jaxpr_to_mlir_module_duration": ("xla/compiler/phases.py", events_of_phases),
    "nnx.Variable._raw_value": ("state/nnx_binding.py", raw_value_of_an_nnx_variable),
    "nnx.graphlib": ("state/nnx_binding.py", flat_nnx_graph),
    "threading._register_atexit": ("checkpoint/one_save.py", end_of_the_main_thread),
}


def test_without_caches_of_its_own_a_trace_is_refused(monkeypatch):
    monkeypatch.setattr(internals.config, "config_ext", None)
    assert internals.make_key_of_trace_caches() is None
    monkeypatch.setattr(trace_caches, "_KEY", None)
    with pytest.raises(RuntimeError, match="trace a program apart from others, which"):
        with trace_caches.separate():
            pass


@pytest.mark.parametrize("name", DOORS)
def test_the_door_is_open(name):
    file, check = DOORS[name]
    assert (PACKAGE / file).exists()
    try:
        check()
    except Exception as error:
        raise AssertionError(
            f"{VERSIONS} has changed {name}, which tpudist/{file} opens."
        ) from error


# Names with an underscore that are other people's, and the only file that may say them.
OF_OTHERS = {
    "_lowering": "xla/compiler/lowered_program.py",
    "_compiler_options_kvs": "xla/compiler/lowered_program.py",
    "_hlo": "xla/compiler/lowered_program.py",
    "_device_list": "xla/compiler/lowered_program.py",
    "_donated_invars": "xla/compiler/lowered_program.py",
    "_internal_use_concrete_mesh": "xla/internals.py",
    "_update_thread_local_hook": "xla/internals.py",
    "_raw_value": "state/nnx_binding.py",
    "_flatten_metrics_in_order": "keras/keras_internals.py",
    "_ex_iterable": "input/sources/hugging_face.py",
    "_inputs": "input/sources/tf_data.py",
    "_rand": "input/sources/shuffle_seeds.py",  # the global generator of NumPy
    "_bit_generator": "input/sources/shuffle_seeds.py",  # of a `RandomState`
    "_distribute_data": "keras/keras_internals.py",
    "_get_distributed_iterator": "keras/keras_internals.py",
    "_initialize_layout": "keras/keras_internals.py",
    "_initial_epoch": "keras/keras_internals.py",
    "_layout": "keras/keras_internals.py",
    "_symbolic_build": "keras/keras_internals.py",
    "_make_function": "keras/keras_internals.py",
    "_register_atexit": "checkpoint/one_save.py",
    "_ls": "input/storage/filesystems.py",  # of fsspec
    "_ls_real": "input/storage/filesystems.py",  # of its HTTP, without its cache
    "_splash_attention_bwd_dkv": "xla/splash_attention.py",  # see `SplashBlocks.backward`
    "_is_owned": "engine/concurrency.py",  # of `threading.RLock`, for `threading.Condition`
    "_release_save": "engine/concurrency.py",
    "_acquire_restore": "engine/concurrency.py",
    "_glob": "input/storage/filesystems.py",  # coroutines of fsspec
    "_info": "input/storage/filesystems.py",
    "_pipe_file": "input/storage/filesystems.py",
    "_call_s3": "input/storage/filesystems.py",
    "_s3": "input/storage/filesystems.py",
    "_exit": None,  # os._exit, which is public in spite of its name
    "_current_frames": "processes/host.py",  # sys._current_frames, also public
    "_replace": None,  # of named tuples
    "_fields": None,
    "_asdict": None,
}


def underscored_and_defined(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names with one underscore that a file uses from elsewhere, and those it defines.

    The first are `x._name` and `getattr(x, "_name")`.
    """
    reached, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ctx):
                if re.match("_[a-z]", name):
                    reached.add(name)
                if isinstance(ctx, ast.Store) and isinstance(value, ast.Name):
                    defined |= {name} if value.id in ("self", "cls") else set()
            case ast.Call(func=ast.Attribute(attr=function) | ast.Name(id=function), args=args):
                if function in ("getattr", "setattr"):
                    texts = [str(x.value) for x in args if isinstance(x, ast.Constant)]
                    reached |= {text for text in texts if re.match("_[a-z]", text)}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
    return reached, defined


def test_private_names_of_others_are_said_in_one_place_each():
    names = {
        str(file.relative_to(PACKAGE)): underscored_and_defined(ast.parse(file.read_text()))
        for file in sorted(PACKAGE.rglob("*.py"))
    }
    ours = {name for _, defined in names.values() for name in defined}
    found = {
        (name, file)
        for file, (reached, defined) in names.items()
        for name in reached - (ours - set(OF_OTHERS)) - defined
    }
    assert {name for name, _ in found} <= set(OF_OTHERS), found
    assert all(OF_OTHERS[name] in (None, file) for name, file in found), found


def test_settings_of_jax_are_named_in_one_place():
    for file in PACKAGE.rglob("*.py"):
        if file.name != "settings.py":
            assert "jax.config" not in file.read_text(), file


# Supported versions, and installed versions.


def test_the_classifiers_name_the_pythons_that_are_supported():
    text = PROJECT.read_text()
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    assert named == ["3.11", "3.12", "3.13"]
    assert f'requires-python = ">={named[0]}"' in text


def test_jax_is_pinned_nowhere():
    """A pin would decide which Pythons a fresh machine may have: jax 0.11 needs Python 3.12."""
    pinned = re.findall(r'"(?:jax|jaxlib|flax|libtpu)[^"]*==[^"]*"', PROJECT.read_text())
    assert pinned == []


@pytest.mark.libtpu
def test_described_devices_come_from_jax_experimental_topologies():
    """The way in is public; only the class of the client is not."""
    assert callable(topologies.get_topology_desc)


@pytest.mark.parametrize(
    "module", [norm_statistics.linen_normalization, norm_statistics.nnx_normalization]
)
def test_flax_computes_statistics_in_a_function_that_is_known(module):
    """`state/norm_statistics.py` replaces it; otherwise a partial batch gives NaN again."""
    with norm_statistics.weigh_by_rows(()):
        function = module._compute_stats
    assert function.__wrapped__ is not function, VERSIONS
