"""XLA's buffer assignment lists the values that are in memory at its peak."""

from tpudist.xla.hlo import hlo_module, liveness

MODULE = """HloModule jit_step, is_scheduled=true, num_partitions=1

ENTRY %main (p: f32[256], q: f32[64]) -> f32[256] {
  %p = f32[256]{0} parameter(0), metadata={op_name="donated_arrays[0]"}
  %q = f32[64]{0} parameter(1), metadata={op_name="kept_arrays[0]"}
  %cast = bf16[256]{0} convert(%p)
  %dot.1 = f32[256]{0} fusion(%cast), kind=kLoop, calls=%f, metadata={op_name="jit(step)/dot" source_file="/me/train.py" source_line=7}
  %add.2 = f32[256]{0} fusion(%dot.1), kind=kLoop, calls=%f, metadata={op_name="jit(step)/add" source_file="/me/train.py" source_line=8}
  ROOT %copy.3 = f32[256]{0} copy(%add.2)
}
"""  # noqa: E501
BUFFERS = """BufferAssignment:
allocation 0: size 1024, parameter 0, shape |f32[256]| at ShapeIndex {}, maybe-live-out:
 value: <0 p @0> (size=1024,offset=0): f32[256]{0}
 value: <9 copy.3 @0> (size=1024,offset=0): f32[256]{0}
allocation 1: size 512, parameter 1, shape |f32[64]| at ShapeIndex {}:
 value: <1 q @0> (size=512,offset=0): f32[64]{0}
allocation 2: size 512, thread-local:
 value: <2 x @0> (size=512,offset=0): f32[]{:T(128)}
allocation 3: size 3072, preallocated-temp:
 value: <3 cast @0> (size=512,offset=2048): bf16[256]{0}
 value: <4 dot.1 @0> (size=1024,offset=0): f32[256]{0}
 value: <5 add.2 @0> (size=1024,offset=1024): f32[256]{0}
 value: <6 while.7{1} (phi) @0> (size=1024,offset=1024): f32[256]{0}
 value: <7 while.7{} (phi) @0> (size=512,offset=2560): (s32[], f32[256]{0})
allocation 4: size 9999, color 1, preallocated-temp:
 value: <8 fast @1> (size=9999,offset=0): f32[256]{0:T(8,128)S(1)}

HloLiveRange (max 20):
  InstructionSequence:
    0:p
  BufferLiveRange:
    cast{}:1-2
    dot.1{}:2-5
    add.2{}:5-8
    while.7{1}:7-9
    while.7{}:4-9
    fast{}:0-20
  Live ranges at 9 (peak):
    p{}: 1024 bytes (cumulative: 1024 bytes)
"""


def test_an_instruction_needs_its_operands_and_its_result():
    """At position 5, dot.1 is still the operand of add.2, and the tuple while.7{} is in memory."""
    assert liveness.peak(liveness.temporaries(BUFFERS)) == (1024 + 1024 + 512, 5)


def test_values_that_share_memory_count_once():
    values = [x for x in liveness.temporaries(BUFFERS) if x.offset == 1024]
    assert [x.name for x in values] == ["add.2", "while.7"]
    assert liveness.peak(values) == (1024, 5)


def test_memory_spaces_are_separated():
    assert [x.name for x in liveness.temporaries(BUFFERS, memory_space=1)] == ["fast"]
    assert liveness.total_bytes(BUFFERS) == 1024 + 512 + 512 + 3072


def test_the_largest_values_have_the_operation_that_computed_them():
    found = liveness.largest(BUFFERS, hlo_module.parse(MODULE))
    assert [(x.name, x.op_name, x.source) for x in found] == [
        ("dot.1", "jit(step)/dot", "/me/train.py:7"),
        ("add.2", "jit(step)/add", "/me/train.py:8"),
    ]
    assert [x.num_bytes for x in liveness.largest(BUFFERS)] == [1024, 1024]


def test_an_instruction_added_by_the_compiler_has_the_name_of_its_operand():
    early = BUFFERS.replace("cast{}:1-2", "cast{}:1-6")
    found = liveness.largest(early, hlo_module.parse(MODULE), names=["weights", "x"])
    assert (found[-1].name, found[-1].op_name, found[-1].source) == ("cast", "weights", None)


def test_arguments_have_the_users_names():
    found = liveness.arguments(BUFFERS, hlo_module.parse(MODULE), ["weights", "x"])
    assert [(x.name, x.num_bytes) for x in found] == [("weights", 1024), ("x", 512)]
    assert liveness.arguments(BUFFERS)[0].name == "p"


def test_empty_buffers_have_no_values():
    assert liveness.peak(liveness.temporaries("")) == (0, 0)
    assert liveness.largest("") == []
    assert liveness.total_bytes("") == 0
