"""A loop that copies a cache which it only updates is found, with its bytes and seconds."""

import pytest

import hlo_programs
from hlo_programs import V5E
from tpudist.xla.estimate import instruction_time, loop_copies, timeline

CACHE, LAYER, NEW = (
    f"bf16[{dims}]{{2,1,0:T(8,128)}}" for dims in ("8,4096,128", "1,4096,128", "1,8,128")
)
STATE = f"(s32[], {CACHE}, {CACHE}, {NEW})"
BYTES = 4096 * 128 * 2
UPDATE = 'metadata={op_name="jit(f)/while/body/scatter" source_file="/a/decode.py" source_line=9}'

# As XLA compiles a scan with a cache among its inputs and outputs.
COPIES = f"""  %part = {LAYER} dynamic-slice(%in, %i, %i, %i), dynamic_slice_sizes={{1,4096,128}}
  %moved = {LAYER} copy(%part)
  %new = {LAYER} dynamic-update-slice(%moved, %row, %i, %i, %i), {UPDATE}
  %read = {LAYER} negate(%new)
  %done = {CACHE} dynamic-update-slice(%out, %new, %i, %i, %i)
"""
# With the cache in the carry: the update is in place.
IN_PLACE = f"""  %done = {CACHE} dynamic-update-slice(%out, %row, %i, %i, %i), {UPDATE}
  %read = {LAYER} fusion(%done, %i), kind=kLoop, calls=%negated
"""
# In the carry, but in another layout, because each update is one row of a tile.
MOVED = CACHE.replace("2,1,0", "1,2,0")
TRANSPOSED = f"""  %in_place = {MOVED} dynamic-update-slice(%in, %row, %i, %i, %i), {UPDATE}
  %part = {LAYER} dynamic-slice(%in_place, %i, %i, %i), dynamic_slice_sizes={{1,4096,128}}
  %read = {LAYER} negate(%part)
  %done = {CACHE} bitcast(%in_place)
"""


def _find(body, outside="%after = f32[] constant(0)"):
    module = hlo_programs.program(
        f"%cache = {CACHE} parameter(0)",
        f"%before = {CACHE} copy(%cache)",
        f"%new_row = {NEW} parameter(1)",
        "%zero = s32[] constant(0)",
        f"%state = {STATE} tuple(%zero, %before, %before, %new_row)",
        f"%loop = {STATE} while(%state), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"8"}}',
        f"%updated = {CACHE} get-tuple-element(%loop), index=2",
        outside,
        computations=f"""%cond (s: s32[]) -> pred[] {{
  %s = {STATE} parameter(0)
  ROOT %go = pred[] constant(true)
}}

%negated (a: s32[], n: s32[]) -> s32[] {{
  %a = {CACHE} parameter(0)
  %n = s32[] parameter(1)
  %inner = {LAYER} dynamic-slice(%a, %n, %n, %n), dynamic_slice_sizes={{1,4096,128}}
  ROOT %negative = {LAYER} negate(%inner)
}}

%body (s: s32[]) -> s32[] {{
  %b = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %in = {CACHE} get-tuple-element(%b), index=1
  %out = {CACHE} get-tuple-element(%b), index=2
  %row = {NEW} get-tuple-element(%b), index=3
{body}  ROOT %t = {STATE} tuple(%i, %in, %done, %row)
}}
""",
    )
    return loop_copies.find(
        module, timeline.simulate(module, hlo_programs.OneDevice(), V5E), ["model.cache"]
    )


def _seconds(num_bytes):
    return 2 * num_bytes / (V5E.hbm_bytes_per_s * V5E.hbm_efficiency)


def test_a_loop_that_copies_what_it_only_updates_is_found():
    (found,) = _find(COPIES)
    assert (found.source, found.names, found.is_carried) == (
        "/a/decode.py:9",
        ("model.cache",),
        False,
    )
    # Three copies of each layer, and one of the argument.
    assert found.num_bytes == (8 * 3 + 8) * BYTES
    waits_s = (8 * 3 + 1) * 2 * instruction_time.COPYING_STEP_S
    assert found.seconds == pytest.approx(_seconds(found.num_bytes) + waits_s)


def test_an_update_in_another_layout_copies_before_and_after_the_loop_and_to_read():
    (found,) = _find(TRANSPOSED, f"%after = {CACHE} copy(%updated)")
    assert (found.names, found.is_carried) == (("model.cache",), True)
    assert found.num_bytes == 3 * 8 * BYTES


def test_an_update_in_place_copies_nothing_in_the_loop():
    (found,) = _find(IN_PLACE)
    assert found.num_bytes == 8 * BYTES  # of an argument that is not donated
