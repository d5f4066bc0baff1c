"""Published figures of TPU chips that no libtpu compiles for yet.

They have the units of `chips`. A test fails when libtpu supports a chip. Then make it a
`chips.Chip` with the figures that are not published today: links, clock, hosts, and the memory that
the compiler leaves.
"""

import dataclasses
from collections.abc import Mapping

_GI = 1024**3


@dataclasses.dataclass(frozen=True)
class AnnouncedChip:
    """An announced generation of TPU chips.

    Attributes:
        generation: Expected name in libtpu and Cloud, such as "tpu8t".
        device_kind: Value of `jax.Device.device_kind`.
        devices_per_chip: Number of JAX devices per chip.
        bf16_flops_per_s: Peak of matrix multiplication in bfloat16.
        fp8_flops_per_s: Peak of matrix multiplication in 8-bit floats.
        hbm_bytes: Memory.
        hbm_bytes_per_s: Peak bandwidth of the memory.
        num_chips: Number of chips of the largest slice; None if it is not published.
        sources: Sources of the figures, by attribute.
    """

    generation: str
    device_kind: str
    devices_per_chip: int
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    num_chips: int | None
    sources: Mapping[str, str]


_JAX_0_12 = "jax 0.12, tpu_info.py"
_NEXT_26 = "Google Cloud Next, April 2026"
_SOURCES = {
    "devices_per_chip": f"TensorCores per chip: {_JAX_0_12}",
    "bf16_flops_per_s": _JAX_0_12,
    "fp8_flops_per_s": _JAX_0_12,
    "hbm_bytes": f"{_JAX_0_12}; 216 and 288 GiB: {_NEXT_26}",
    "hbm_bytes_per_s": _JAX_0_12,
}

# For both, libtpu 0.0.50.1 fails with "Invalid TPU external name"; tests/xla/test_topology.py
# checks that.
ANNOUNCED: Mapping[str, AnnouncedChip] = {
    chip.generation: chip
    for chip in (
        AnnouncedChip(
            generation="tpu8t",
            device_kind="TPU8t",
            devices_per_chip=1,
            bf16_flops_per_s=996.1e12,
            fp8_flops_per_s=5976.9e12,
            hbm_bytes=216 * _GI,
            hbm_bytes_per_s=6400e9,
            num_chips=9600,
            sources={**_SOURCES, "num_chips": f"9,600 in a superpod: {_NEXT_26}"},
        ),
        AnnouncedChip(
            generation="tpu8i",
            device_kind="TPU8i",
            devices_per_chip=2,
            bf16_flops_per_s=1101e12,
            fp8_flops_per_s=8808e12,
            hbm_bytes=288 * _GI,
            hbm_bytes_per_s=8600e9,
            num_chips=None,
            sources=_SOURCES,
        ),
    )
}
