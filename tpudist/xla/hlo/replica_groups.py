"""Parses the groups of devices of a collective, in HLO's three syntaxes."""

import itertools
import math
import re

import numpy as np


def count_devices(text: str) -> int:
    """Returns the number of devices that the program `text` was compiled for."""
    header = text.partition("\n")[0]
    counts = (re.search(rf"\b{name}=(\d+)", header) for name in ("replica_count", "num_partitions"))
    return math.prod(int(count[1]) for count in counts if count)


def groups_of(line: str, num_devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the groups in `replica_groups`, or the pairs in `source_target_pairs`, of a line."""
    match = re.search(r"\b(?:replica_groups|source_target_pairs)=", line)
    if match is None:
        return None
    value = line[match.end() :]
    if value.startswith("{{"):  # {{0,2},{1,3}}
        groups = re.findall(r"[\d,]+(?=\})", value[: value.index("}}") + 1])
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    if value.startswith("{}"):  # one group of all devices
        return (tuple(range(num_devices)),)
    if value.startswith("mesh"):
        ids = _mesh_groups(value)
    else:  # [2,4]<=[4,2]T(1,0)
        shape, iota = value.split("<=", 1)
        ids = _iota(iota).reshape(_ints(shape))
    return tuple(map(tuple, ids.tolist()))


def _mesh_groups(value: str) -> np.ndarray:
    """Parses `mesh['a'=4,'b'=2] {'b'}`, which may have `, device_ids=(...)` and parts of axes.

    In a part `'a':(2)4` of an axis, 2 is the product of the sizes before it and 4 is its size.
    Syntax: openxla/xla, xla/hlo/ir/mesh_and_axis.cc.
    """
    match = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", value)
    assert match, value
    sizes = {axis: int(size) for axis, size in re.findall(r"'?([^',=]+)'?=(\d+)", match[1])}
    grouped = [
        (axis, int(before or 1), int(before or 1) * int(size or sizes[axis]))
        for axis, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", match[3])
    ]
    # Split every axis into dims where a grouped part begins or ends, so that each part is a product
    # of complete dims. Axis a=8 with the part 'a':(2)2 becomes the dims 2, 2, 2, and the part is
    # the second. The groups are then a transpose of the array of device ids.
    dims: list[int] = []
    dims_of_part: dict[tuple[str, int, int], list[int]] = {part: [] for part in grouped}
    for axis, size in sizes.items():
        cuts = sorted({1, size} | {cut for name, *ends in grouped if name == axis for cut in ends})
        for begin, end in itertools.pairwise(cuts):
            for part in grouped:
                if part[0] == axis and part[1] <= begin and end <= part[2]:
                    dims_of_part[part].append(len(dims))
            dims.append(end // begin)
    grouped_dims = [dim for part in grouped for dim in dims_of_part[part]]
    other_dims = [dim for dim in range(len(dims)) if dim not in grouped_dims]
    ids = _device_ids(match[2], math.prod(dims)).reshape(dims).transpose(other_dims + grouped_dims)
    return ids.reshape(-1, math.prod(dims[dim] for dim in grouped_dims))


def _device_ids(value: str | None, num_devices: int) -> np.ndarray:
    """Parses the `device_ids` of a mesh: absent, `0,2,1,3` or `[4,16]T(1,0)`."""
    if value is None:
        return np.arange(num_devices)
    return _iota(value) if value.startswith("[") else np.array(_ints(value))


def _iota(value: str) -> np.ndarray:
    """Parses `[4,2]T(1,0)`: 0, 1, 2, ... in this shape, then transposed to this order of dims."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", value)
    assert match, value
    shape = _ints(match[1])
    order = _ints(match[2]) if match[2] else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def _ints(value: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", value)]
