"""Published figures of each generation of TPU chips, from which the planner estimates times.

All rates are per chip (a chip of v2, v3 or tpu7x is two JAX devices), per second, in bytes or
operations. G is 10^9 for rates and Gi is 2^30 for memory, as in the documents. If no document has a
figure, the rule next to it applies, which is the same for all chips.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

_GI = 1024**3
_DOCS = "docs.cloud.google.com/tpu/docs"
_BOOK = "jax-ml/scaling-book, tpus.md"
_PAPER = "Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, 2020"
_RECIPES = "AI-Hypercomputer/tpu-recipes, microbenchmarks"

# For v4, 45 of 50 GB/s are usable (scaling-book). The share is the same for every generation.
_USABLE_ICI = 0.9
# Share of the peak that a copy of 32 MB reaches. The only measurement (v6e: 1360 of 1638 GB/s) is
# used for every generation. Source: tpu-recipes, microbenchmarks. Matrix multiplications are in
# `microbenchmarks.MATMULS`.
_HBM_EFFICIENCY = 1360 / 1638
_TPU_INFO = "jax, pallas/mosaic/tpu_info.py"
CALIBRATED = "calibration"
"""Source of a figure that the user measured."""
_HOST_LINK = "PCIe: 15 GB/s per chip is typical, 32 for v6e (scaling-book)"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation of TPU chips.

    Attributes:
        generation: Name as in the names of slices, such as "v5e".
        device_kind: Value of `jax.Device.device_kind`.
        devices_per_chip: Number of JAX devices per chip.
        bf16_flops_per_s: Peak of matrix multiplication in bfloat16.
        narrow_ops_per_s: Peak of matrix multiplication of narrower numbers, by kind: "int8", "fp8",
            "int4"; see `kind_of_products`. A kind that no document has runs at the peak of
            bfloat16, to which XLA converts it.
        cycles_per_s: Clock of XLA's `estimated_cycles`.
        hbm_bytes: Documented memory.
        compiler_hbm_bytes: Memory that libtpu allows one program, which its error calls "available
            HBM"; for all devices of a chip together.
        hbm_bytes_per_s: Peak bandwidth of the memory.
        ici_links: Number of links to neighboring chips.
        ici_bytes_per_s: Usable bandwidth of one link in one direction.
        torus_dims: Number of dimensions of the slice's grid.
        largest: Shape of the largest slice, in chips.
        wraps_from: In 2D, smallest length of an axis that is a ring. In 3D, axes are rings if the
            lengths of all are multiples of it.
        chips_per_host: Largest number of chips per host.
        dcn_bytes_per_s: Bandwidth to other slices over the data-center network: a chip's share of
            its host's bandwidth.
        host_bytes_per_s: Bandwidth between a chip and its host's memory, in one direction.
        hbm_efficiency: Share of the memory's peak bandwidth that a large copy reaches.
        cores_in_name: Amount that one chip adds to the number in a name such as "v5p-128".
        sources: Sources of the figures, by attribute; "ici_link_bytes_per_s" for the documented
            bandwidth of a link.
        matmul_share: Measured share of the peak of a large matrix multiplication; None to use
            published measurements.
    """

    generation: str
    device_kind: str
    devices_per_chip: int
    bf16_flops_per_s: float
    narrow_ops_per_s: Mapping[str, float]
    cycles_per_s: float
    hbm_bytes: int
    compiler_hbm_bytes: int
    hbm_bytes_per_s: float
    ici_links: int
    ici_bytes_per_s: float
    torus_dims: int
    largest: tuple[int, ...]
    wraps_from: int
    chips_per_host: int
    dcn_bytes_per_s: float
    host_bytes_per_s: float
    hbm_efficiency: float
    cores_in_name: int
    sources: Mapping[str, str]
    matmul_share: float | None = None

    def peak_flops_per_s(self, kind: str) -> float:
        """Returns the peak of matrix multiplication of numbers of a kind; "bf16" for wider ones."""
        return self.narrow_ops_per_s.get(kind, self.bf16_flops_per_s)

    def ring_axes(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns whether each axis of a slice of this shape (in chips) is a ring, not a line."""
        # A grid of three dimensions is a torus only if it consists of complete cubes of 4 x 4 x 4.
        # A grid of two dimensions has a ring along each axis that is as long as the pod's.
        # Sources: docs.cloud.google.com/tpu/docs/v5p and v4, scaling-book; the same as `wrap` in
        # AI-Hypercomputer/maxtext, accelerator_to_spec_map.py.
        if self.torus_dims == 3:
            return (all(size % self.wraps_from == 0 for size in shape),) * len(shape)
        return tuple(size >= self.wraps_from for size in shape)


def kind_of_products(operands: Iterable[tuple[int, bool]]) -> str:
    """Returns the kind of numbers that a matrix multiplication multiplies, which decides its peak.

    Args:
        operands: For each operand, the bits of an element, and whether it is a float.
    """
    operands = list(operands)
    widest = max(bits for bits, _ in operands)
    if widest > 8:
        return "bf16"
    if any(is_float for _, is_float in operands):
        return "fp8"
    return "int4" if widest <= 4 else "int8"


def chip_of_device(device: jax.Device) -> Chip | None:
    """Returns the chip of a JAX device; None if it is not a TPU or an unknown one."""
    return next((c for c in CHIPS.values() if c.device_kind == device.device_kind), None)


def _chip(generation: str, *, sources: Mapping[str, str], **facts: Any) -> Chip:
    return Chip(
        generation=generation,
        ici_bytes_per_s=_USABLE_ICI * facts.pop("ici_link_bytes_per_s"),
        hbm_efficiency=_HBM_EFFICIENCY,
        sources={
            "ici_bytes_per_s": "as documented per chip / links / 2 ways, 90% usable (scaling-book)",
            "compiler_hbm_bytes": "the refusal of libtpu 0.0.42.1 for this chip",
            "hbm_efficiency": f"{_RECIPES}: v6e, also for the others",
            "chips_per_host": f"machine types: {_DOCS}",
            "host_bytes_per_s": _HOST_LINK,
            **sources,
        },
        **facts,
    )


# The clock is the peak divided by the FLOPs per cycle: 2 x 128 x 128 per MXU; since v6e,
# 4 x 256 x 256.
CHIPS: Mapping[str, Chip] = {
    chip.generation: chip
    for chip in (
        _chip(
            "v2",
            device_kind="TPU v2",
            devices_per_chip=2,
            cores_in_name=2,
            bf16_flops_per_s=46e12,
            narrow_ops_per_s={},
            cycles_per_s=0.70e9,
            hbm_bytes=16 * _GI,
            compiler_hbm_bytes=2 * int(7.48 * _GI),
            hbm_bytes_per_s=700e9,
            ici_links=4,
            ici_link_bytes_per_s=62e9,
            torus_dims=2,
            largest=(16, 16),
            wraps_from=16,
            chips_per_host=4,
            dcn_bytes_per_s=25e9 / 4,
            host_bytes_per_s=15e9,
            sources={
                "bf16_flops_per_s": f"{_PAPER}; {_DOCS}/v2",
                "cycles_per_s": _PAPER,
                "hbm_bytes": f"{_DOCS}/v2",
                "hbm_bytes_per_s": f"{_PAPER}; {_DOCS}/v2",
                "ici_link_bytes_per_s": f"496 Gbit/s: {_PAPER}",
                "dcn_bytes_per_s": f"25 GB/s per host, as is typical ({_BOOK})",
            },
        ),
        _chip(
            "v3",
            device_kind="TPU v3",
            devices_per_chip=2,
            cores_in_name=2,
            bf16_flops_per_s=123e12,
            narrow_ops_per_s={},
            cycles_per_s=0.94e9,
            hbm_bytes=32 * _GI,
            compiler_hbm_bytes=2 * int(15.48 * _GI),
            hbm_bytes_per_s=900e9,
            ici_links=4,
            ici_link_bytes_per_s=82e9,
            torus_dims=2,
            largest=(32, 32),
            wraps_from=32,
            chips_per_host=4,
            dcn_bytes_per_s=25e9 / 4,
            host_bytes_per_s=15e9,
            sources={
                "bf16_flops_per_s": f"{_PAPER}; {_DOCS}/v3",
                "cycles_per_s": _PAPER,
                "hbm_bytes": f"{_DOCS}/v3",
                "hbm_bytes_per_s": f"{_PAPER}; {_DOCS}/v3",
                "ici_link_bytes_per_s": f"656 Gbit/s: {_PAPER}",
                "dcn_bytes_per_s": f"25 GB/s per host, as is typical ({_BOOK})",
            },
        ),
        _chip(
            "v4",
            device_kind="TPU v4",
            devices_per_chip=1,
            cores_in_name=2,
            bf16_flops_per_s=275e12,
            narrow_ops_per_s={"int8": 275e12},
            cycles_per_s=1.05e9,
            hbm_bytes=32 * _GI,
            compiler_hbm_bytes=int(30.75 * _GI),
            hbm_bytes_per_s=1200e9,
            ici_links=6,
            ici_link_bytes_per_s=50e9,
            torus_dims=3,
            largest=(16, 16, 16),
            wraps_from=4,
            chips_per_host=4,
            dcn_bytes_per_s=25e9 / 4,
            host_bytes_per_s=16e9,
            sources={
                "bf16_flops_per_s": f"{_DOCS}/v4",
                "int8": f"{_DOCS}/v4",
                "cycles_per_s": "275e12 / (8 MXUs x 2 x 128 x 128)",
                "hbm_bytes": f"{_DOCS}/v4",
                "hbm_bytes_per_s": f"{_DOCS}/v4",
                "ici_link_bytes_per_s": _BOOK,
                "dcn_bytes_per_s": f"25 GB/s per host ({_BOOK})",
            },
        ),
        _chip(
            "v5e",
            device_kind="TPU v5 lite",
            devices_per_chip=1,
            cores_in_name=1,
            bf16_flops_per_s=197e12,
            narrow_ops_per_s={"int8": 393e12, "int4": 788e12},
            cycles_per_s=1.503e9,
            hbm_bytes=16 * _GI,
            compiler_hbm_bytes=int(15.75 * _GI),
            hbm_bytes_per_s=819e9,
            ici_links=4,
            ici_link_bytes_per_s=50e9,
            torus_dims=2,
            largest=(16, 16),
            wraps_from=16,
            chips_per_host=8,
            dcn_bytes_per_s=25e9 / 8,
            host_bytes_per_s=15e9,
            sources={
                "bf16_flops_per_s": f"{_DOCS}/v5e",
                "int8": f"{_DOCS}/v5e",
                "int4": _TPU_INFO,
                "cycles_per_s": "197e12 / (4 MXUs x 2 x 128 x 128)",
                "hbm_bytes": f"{_DOCS}/v5e",
                "hbm_bytes_per_s": f"{_DOCS}/v5e",
                "ici_link_bytes_per_s": f"400 GB/s per chip, 4 ports: {_DOCS}/v5e",
                "dcn_bytes_per_s": f"6.4 Tbit/s per pod of 256: {_DOCS}/v5e",
            },
        ),
        _chip(
            "v5p",
            device_kind="TPU v5",
            devices_per_chip=1,
            cores_in_name=2,
            bf16_flops_per_s=459e12,
            narrow_ops_per_s={"int8": 918e12, "int4": 1836e12},
            cycles_per_s=1.75e9,
            hbm_bytes=95 * _GI,  # documented in whole GiB; libtpu allows slightly more
            compiler_hbm_bytes=int(95.74 * _GI),
            hbm_bytes_per_s=2765e9,
            ici_links=6,
            ici_link_bytes_per_s=100e9,
            torus_dims=3,
            largest=(16, 20, 28),
            wraps_from=4,
            chips_per_host=4,
            dcn_bytes_per_s=50e9 / 8,
            host_bytes_per_s=15e9,
            sources={
                "bf16_flops_per_s": f"{_DOCS}/v5p",
                "int8": _TPU_INFO,
                "int4": f"{_TPU_INFO}: twice int8",
                "cycles_per_s": "459e12 / (8 MXUs x 2 x 128 x 128)",
                "hbm_bytes": f"{_DOCS}/v5p",
                "hbm_bytes_per_s": f"{_DOCS}/v5p (jax, tpu_info.py: 2460e9)",
                "ici_link_bytes_per_s": f"1200 GB/s per chip, 6 links: {_DOCS}/v5p",
                "dcn_bytes_per_s": f"50 Gbit/s per chip: {_DOCS}/v5p",
            },
        ),
        _chip(
            "v6e",
            device_kind="TPU v6 lite",
            devices_per_chip=1,
            cores_in_name=1,
            bf16_flops_per_s=918e12,
            narrow_ops_per_s={"int8": 1836e12, "fp8": 918e12, "int4": 3672e12},
            cycles_per_s=1.75e9,
            hbm_bytes=32 * _GI,
            compiler_hbm_bytes=int(31.25 * _GI),
            hbm_bytes_per_s=1638e9,
            ici_links=4,
            ici_link_bytes_per_s=100e9,
            torus_dims=2,
            largest=(16, 16),
            wraps_from=16,
            chips_per_host=8,
            dcn_bytes_per_s=100e9 / 8,
            host_bytes_per_s=32e9,
            sources={
                "bf16_flops_per_s": f"{_DOCS}/v6e",
                "int8": f"{_DOCS}/v6e",
                "fp8": f"as bf16: {_TPU_INFO}",
                "int4": f"{_TPU_INFO}: twice int8",
                "cycles_per_s": "918e12 / (2 MXUs x 4 x 256 x 256)",
                "hbm_bytes": f"{_DOCS}/v6e",
                "hbm_bytes_per_s": f"{_DOCS}/v6e",
                "ici_link_bytes_per_s": f"800 GB/s per chip, 4 ports: {_DOCS}/v6e",
                "dcn_bytes_per_s": f"100 Gbit/s per chip: {_DOCS}/tpu7x",
            },
        ),
        _chip(
            "tpu7x",
            device_kind="TPU7x",
            devices_per_chip=2,
            cores_in_name=2,
            bf16_flops_per_s=2307e12,
            narrow_ops_per_s={"fp8": 4614e12},
            cycles_per_s=2.2e9,
            hbm_bytes=192 * _GI,
            compiler_hbm_bytes=2 * int(94.75 * _GI),
            hbm_bytes_per_s=7380e9,
            ici_links=6,
            ici_link_bytes_per_s=100e9,
            torus_dims=3,
            largest=(16, 24, 24),
            wraps_from=4,
            chips_per_host=4,
            dcn_bytes_per_s=100e9 / 8,
            host_bytes_per_s=32e9,
            sources={
                "bf16_flops_per_s": f"{_DOCS}/tpu7x",
                "fp8": f"{_DOCS}/tpu7x",
                "cycles_per_s": "2307e12 / (4 MXUs x 4 x 256 x 256)",
                "hbm_bytes": f"{_DOCS}/tpu7x",
                "hbm_bytes_per_s": f"{_DOCS}/tpu7x",
                "ici_link_bytes_per_s": f"1200 GB/s per chip: {_DOCS}/tpu7x; 6 links of a 3D torus",
                "dcn_bytes_per_s": f"100 Gbit/s per chip: {_DOCS}/tpu7x",
                "host_bytes_per_s": "not published; as v6e",
            },
        ),
    )
}
