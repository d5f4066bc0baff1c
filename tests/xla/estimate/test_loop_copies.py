"""A loop that copies a cache which it only updates is found, with its bytes and seconds."""

import numpy as np
import pytest

import hlo_programs
from tpudist.xla.estimate import loop_copies, timeline
from tpudist.xla.hardware import chips

V5E = chips.CHIPS["v5e"]
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
  %part = {LAYER} dynamic-slice(%done, %i, %i, %i), dynamic_slice_sizes={{1,4096,128}}
  %read = {LAYER} negate(%part)
"""


def _find(body):
    module = hlo_programs.program(
        f"%state = {STATE} parameter(0)",
        f"%loop = {STATE} while(%state), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"8"}}',
        computations=f"""%cond (s: s32[]) -> pred[] {{
  %s = {STATE} parameter(0)
  ROOT %go = pred[] constant(true)
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
    return loop_copies.find(module, timeline.simulate(module, _OneDevice(), V5E))


class _Device:
    coords = (0, 0, 0)


class _OneDevice:
    devices = np.array([_Device()], dtype=object)
    axis_names = ("replica",)


def test_a_loop_that_copies_what_it_only_updates_is_found():
    (found,) = _find(COPIES)
    assert found.source == "/a/decode.py:9"
    assert found.num_bytes == 8 * 3 * BYTES
    rate = V5E.hbm_bytes_per_s * V5E.hbm_efficiency
    assert found.seconds == pytest.approx(8 * 3 * 2 * BYTES / rate)


def test_an_update_in_place_copies_nothing():
    assert _find(IN_PLACE) == []
