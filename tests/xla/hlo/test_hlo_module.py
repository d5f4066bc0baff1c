import inspect

import jax
import jax.numpy as jnp
import pytest

import hlo_programs
from tpudist.xla import user_code
from tpudist.xla.compiler import jax_cache
from tpudist.xla.hlo import hlo_module, shapes


def _module(function, *arguments):
    return hlo_module.parse(jax.jit(function).lower(*arguments).compile().as_text())


def _counts(module, opcode):
    """Returns the execution count of each instruction with this opcode."""
    return [count for run, count in hlo_programs.executions(module) if run.opcode == opcode]


def _matrix(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


# The text of a program as another compiler would write it.

LOOP = """HloModule jit_step, is_scheduled=true, num_partitions=4

FileNames
1 "train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add_one (p.0: s32[]) -> s32[] {
  %p.0 = s32[] parameter(0)
  %one = s32[] constant(STEP)
  ROOT %next = s32[] add(%p.0, %one)
}

%is_less (p.1: s32[], p.2: s32[]) -> pred[] {
  %p.1 = s32[] parameter(0)
  %p.2 = s32[] parameter(1)
  ROOT %compare = pred[] compare(%p.1, %p.2), direction=DIRECTION
}

%body (state: (s32[], f32[8,128], s32[])) -> (s32[], f32[8,128], s32[]) {
  %state = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %copied = s32[] copy(%i)
  %limit = s32[] get-tuple-element(%state), index=2
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %double = f32[8,128]{1,0:T(8,128)} add(%x, %x), metadata={op_name="jit(step)/while/body/add" \
stack_frame_id=1}, backend_config={"window_config":{"estimated_cycles":"90"}}
  %i.1 = s32[] fusion(%copied), kind=kLoop, calls=%add_one
  ROOT %tuple = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) tuple(%i.1, %double, %limit)
}

%condition (state.1: (s32[], f32[8,128], s32[])) -> pred[] {
  %state.1 = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%state.1), index=0
  %limit.1 = s32[] get-tuple-element(%state.1), index=2
  ROOT %less = pred[] fusion(OPERANDS), kind=kLoop, calls=%is_less
}

ENTRY %main (x.1: f32[8,128], n: s32[]) -> f32[8,128] {
  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %n = s32[] parameter(1)
  %start = s32[] constant(START)
  %stop = s32[] constant(STOP)
  %init = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) tuple(%start, %x.1, LIMIT)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) while(%init), condition=%condition, \
body=%body, metadata={op_name="jit(step)/while"}
  ROOT %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def _loop(start=0, stop=6, step=1, direction="LT", *, mirrored=False, limit="%stop", **kwargs):
    operands = "%limit.1, %i.2" if mirrored else "%i.2, %limit.1"
    text = LOOP.replace("START", str(start)).replace("STOP", str(stop)).replace("STEP", str(step))
    text = text.replace("DIRECTION", direction).replace("OPERANDS", operands)
    return hlo_module.parse(text.replace("LIMIT", limit), **kwargs)


def test_instructions_are_parsed_completely():
    module = _loop()
    assert (module.name, module.num_devices, module.entry.name) == ("jit_step", 4, "main")
    assert list(module.computations) == ["add_one", "is_less", "body", "condition", "main"]
    double = module.computations["body"].instructions["double"]
    assert (double.opcode, double.operands) == ("add", ("x", "x"))
    assert double.op_name == "jit(step)/while/body/add"
    assert double.stack == ("train.py:7",)
    assert double.source == "train.py:7"
    assert double.cycles == 90
    assert [array.num_bytes for array in double.arrays] == [4096]
    loop = module.entry.instructions["loop"]
    assert dict(loop.called) == {"condition": "condition", "body": "body"}
    assert [i.name for i in module.operands_of(loop)] == ["init"]
    assert loop.cycles is None
    assert module.entry.root.name == "out"
    assert module.entry.root.attribute("index") == "1"
    assert sorted(module.entry.parameters) == [0, 1]


def test_instructions_without_a_cycle_estimate_have_no_cycles():
    """The compiler writes the largest integer for work that runs on SparseCores."""
    text = LOOP.replace('"estimated_cycles":"90"', f'"estimated_cycles":"{2**63 - 1}"')
    module = hlo_module.parse(text)
    assert module.computations["body"].instructions["double"].cycles is None


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (dict(), 6),
        (dict(start=2), 4),
        (dict(step=4), 2),
        (dict(direction="LE"), 7),
        (dict(start=9, stop=0, step=-1, direction="GT"), 9),
        (dict(start=9, stop=0, step=-2, direction="GE"), 5),
        (dict(direction="NE", step=2), 3),
        (dict(direction="GT", mirrored=True), 6),
        (dict(start=6), 0),
    ],
)
def test_trip_counts_follow_from_start_step_and_limit(loop, trips):
    module = _loop(**loop)
    assert module.trip_counts == {"loop": trips}
    assert module.unknown_trip_counts == ()
    counts = {run.name: count for run, count in hlo_programs.executions(module)}
    assert counts["double"] == trips
    assert counts["loop"] == 1
    assert "next" not in counts


@pytest.mark.parametrize(
    "loop",
    [
        dict(limit="%n"),  # known at run time only
        dict(step=-1),  # infinite
        dict(direction="NE", step=5),
        dict(direction="EQ"),
    ],
)
def test_a_loop_of_unknown_length_counts_once_and_is_reported(loop):
    module = _loop(**loop)
    assert module.unknown_trip_counts == ("jit(step)/while",)
    assert _counts(module, "add") == [1]


def test_text_without_a_program_is_rejected():
    with pytest.raises(ValueError, match="ENTRY computation.*compiled.as_text"):
        hlo_module.parse("stablehlo.add")


def test_an_instruction_may_span_several_lines():
    """The metadata of Pallas kernels contains line breaks."""
    module = hlo_module.parse(
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        "  %k = f32[8]{0} custom-call(%p), frontend_attributes={kernel_metadata={\n"
        '"block": "{512}"\n}}, metadata={op_name="kernel[\\\'w\\\']"}\n'
        "  ROOT %q = f32[8]{0} negate(%k)\n}\n"
    )
    assert list(module.entry.instructions) == ["p", "k", "q"]
    assert module.entry.instructions["k"].op_name == "kernel['w']"


@pytest.mark.parametrize(
    "operands",
    [
        "%p, %q.1",
        "p, q.1",
        "f32[8,16]{1,0:T(8,128)} %p, f32[8,16]{1,0} %q.1",
        "f32[8,16]{1,0:T(8,128)} p, (f32[8,16]{1,0}, s32[]) q.1",
    ],
)
def test_operands_have_no_shape_and_no_percent_sign(operands):
    module = hlo_module.parse(
        "HloModule m\n\nENTRY %main (p: f32[8,16]) -> f32[8,16] {\n"
        f"  ROOT %s = f32[8,16]{{1,0}} add({operands})\n}}\n"
    )
    assert module.entry.root.operands == ("p", "q.1")


# Programs compiled by this process.


def test_nested_scan_counts_multiply():
    def step(x):
        inner = lambda x, _: (jnp.sin(x @ x), None)  # noqa: E731
        outer = lambda x, _: jax.lax.scan(inner, x, None, length=5)  # noqa: E731
        return jax.lax.scan(outer, x, None, length=3)[0]

    module = _module(step, _matrix(16, 16))
    assert sorted(module.trip_counts.values()) == [3, 5]
    dots = _counts(module, "dot") or [
        count for run, count in hlo_programs.executions(module) if "dot_general" in run.op_name
    ]
    assert max(dots) == 15


def test_a_loop_bounded_by_an_argument_has_no_trip_count():
    module = _module(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: x * 2, x), _matrix(8), 3)
    assert len(module.unknown_trip_counts) == 1


def test_source_lines_are_in_the_users_code():
    def step(x):
        return x @ x

    with jax_cache.bypass():  # it has the lines of the run that compiled the program
        module = _module(step, _matrix(64, 64))
    line = inspect.getsourcelines(step)[1] + 1
    (source,) = {
        run.source for run, _ in hlo_programs.executions(module) if run.opcode == "dot"
    } or {module.entry.root.source}
    assert source == f"{__file__}:{line}"


# Shapes.


@pytest.mark.parametrize(
    ("shape", "num_bytes", "padded_bytes"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096, 4096),
        ("f32[4,128]{1,0:T(8,128)}", 2048, 4096),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 30, 2048),
        ("bf16[5,3]{0,1:T(8,128)(2,1)}", 30, 2048),
        ("f32[2,9,130]{2,1,0:T(8,128)}", 9360, 32768),
        ("f32[9,2,130]{2,0,1:T(8,128)}", 9360, 32768),
        ("s32[]{:T(128)}", 4, 512),
        ("pred[7]{0}", 7, 7),
        ("f32[6,128]{1,0:T(2,128)S(1)}", 3072, 3072),
    ],
)
def test_padded_bytes_include_full_tiles(shape, num_bytes, padded_bytes):
    (array,) = shapes.arrays(shape)
    assert (array.num_bytes, array.padded_bytes) == (num_bytes, padded_bytes)


def test_memory_spaces_are_parsed():
    shape = "(f32[8]{0}, f32[8]{0:T(128)S(1)}, bf16[2,8]{1,0:T(8,128)(2,1)S(5)}, token[])"
    spaces = [array.memory_space for array in shapes.arrays(shape)]
    assert spaces == [shapes.HBM, shapes.VMEM, shapes.HOST, shapes.HBM]


def test_the_origin_of_a_loop_value_is_in_the_previous_iteration():
    """Other values of the loop do not change the origin."""
    module = hlo_module.parse(
        "HloModule m\n\n%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
        "  %s = (s32[], f32[8]{0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        "  %x = f32[8]{0} get-tuple-element(%s), index=1\n"
        "  %b = f32[8]{0} bitcast(%x)\n"
        '  %n = f32[8]{0} negate(%b), metadata={op_name="neg" source_file="a.py" source_line=3}\n'
        "  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %n)\n}\n\n"
        "%condition (q: (s32[], f32[8])) -> pred[] {\n"
        "  %q = (s32[], f32[8]{0}) parameter(0)\n  ROOT %c = pred[] constant(false)\n}\n\n"
        "ENTRY %main (p: (s32[], f32[8])) -> f32[8] {\n"
        "  %p = (s32[], f32[8]{0}) parameter(0)\n"
        "  %w = (s32[], f32[8]{0}) while(%p), condition=%condition, body=%body\n"
        "  ROOT %r = f32[8]{0} get-tuple-element(%w), index=1\n}\n"
    )
    body = module.computations["body"]
    assert module.origin(module.entry.root).name == "n"
    assert module.origin(body.instructions["b"]).name == "n"
    assert module.origin(body.instructions["i"]).name == "i"  # an endless cycle


def test_the_origin_of_an_added_instruction_is_its_operand():
    module = hlo_module.parse(
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        '  %n = f32[8]{0} negate(%p), metadata={op_name="neg" source_file="a.py" source_line=3}\n'
        "  %b = f32[8]{0} bitcast(%n)\n"
        "  ROOT %c = f32[8]{0} copy(%b)\n}\n"
    )
    copy = module.entry.root
    assert module.origin(copy).name == "n"
    assert module.origin(module.entry.instructions["p"]).name == "p"
    assert copy.source is None


def test_the_origin_of_a_gathered_parameter_is_its_user():
    module = hlo_module.parse(
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[64] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        '  %g = f32[64]{0} all-gather(%p), dimensions={0}, metadata={op_name="args[0]"}\n'
        "  %b = f32[64]{0} bitcast(%g)\n"
        '  ROOT %n = f32[64]{0} negate(%b), metadata={op_name="neg" source_file="a.py" '
        "source_line=3}\n}\n"
    )
    assert module.origin(module.entry.instructions["g"]).name == "n"


def test_the_layers_of_models_that_are_not_the_users_code_exist():
    files = {file.name for file in user_code._MODELS.rglob("*.py")}
    assert files.issuperset(user_code._LAYERS_OF_MODELS)


def test_the_command_that_plans_is_not_a_source_line():
    """`python -m tpudist plan` runs below `<frozen runpy>`."""
    own = f"{user_code.__file__}:3"
    assert user_code.users_line((own, "<frozen runpy>:88")) is None
    assert user_code.users_line((own, "/a/bin/tpudist:8")) is None
    assert user_code.users_line((own, "/a/train.py:7", "<frozen runpy>:88")) == "/a/train.py:7"
