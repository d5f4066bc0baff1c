"""Divides arrays into packs that share a collective."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Communicate = Callable[[list[jax.Array]], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Packing:
    """A division of a list of arrays into collectives; by default one for all.

    Attributes:
        bytes_per_pack: Largest number of bytes per collective; a larger array has its own. 0 for no
            limit.
        num_packs: Number of collectives, of about equal bytes, if there is no limit; 0 for one per
            array.
    """

    bytes_per_pack: int = 0
    num_packs: int = 1

    def packs(self, sizes: Sequence[int]) -> list[list[int]]:
        """Returns the positions of the arrays of each collective, in order.

        Args:
            sizes: Bytes of each array.
        """
        if self.bytes_per_pack:
            return _fill_packs(sizes, self.bytes_per_pack)
        if self.num_packs == 0 or self.num_packs >= len(sizes):
            return [[i] for i in range(len(sizes))]
        packs: list[list[int]] = [[] for _ in range(self.num_packs)]
        done, total = 0, max(sum(sizes), 1)
        for i, size in enumerate(sizes):
            # The middle of an array decides, so packs differ by at most half an array.
            middle = int((done + size / 2) * self.num_packs / total)
            packs[min(middle, self.num_packs - 1)].append(i)
            done += size
        return [pack for pack in packs if pack]

    def apply(
        self,
        communicate: Communicate,
        arrays: Sequence[jax.Array],
        join: bool,
    ) -> list[jax.Array]:
        """Calls `communicate` for each pack; returns the results in the order of `arrays`.

        Args:
            communicate: Called with a list of arrays; returns arrays of the same shapes.
            arrays: All arrays.
            join: Whether to join the arrays of a pack to one flat array per dtype. Use this if the
                compiler does not combine collectives.
        """
        results: dict[int, jax.Array] = {}
        for pack in self.packs([num_bytes(x) for x in arrays]):
            sent = [arrays[i] for i in pack]
            received = _join_and_communicate(communicate, sent) if join else communicate(sent)
            results |= zip(pack, received, strict=True)
        return [results[i] for i in range(len(arrays))]

    def compiler_options(self, platform: str) -> dict[str, str | int]:
        """Returns options that keep the compiler from combining separate packs, if it has any."""
        # XLA:CPU combines all all-reduces, XLA:GPU up to a threshold. XLA:TPU has no such option,
        # and combines all-reduces of less than 128 MiB (libtpu 0.0.51).
        if not self.bytes_per_pack and self.num_packs == 1:
            return {}
        if platform == "cpu":
            return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
        if platform in ("gpu", "cuda", "rocm") and self.bytes_per_pack:
            names = ("all_reduce", "all_gather")
            return {f"xla_gpu_{x}_combine_threshold_bytes": self.bytes_per_pack for x in names}
        return {}


def num_bytes(x: jax.Array) -> int:
    """Returns the bytes of an array, which may be traced."""
    return x.size * x.dtype.itemsize


def _join_and_communicate(communicate: Communicate, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    dtypes = {x.dtype: None for x in arrays}
    flat = [jnp.concatenate([x.ravel() for x in arrays if x.dtype == t]) for t in dtypes]
    received = dict(zip(dtypes, communicate(flat), strict=True))
    starts = dict.fromkeys(dtypes, 0)
    results = []
    for x in arrays:
        start = starts[x.dtype]
        starts[x.dtype] += x.size
        results.append(received[x.dtype][start : start + x.size].reshape(x.shape))
    return results


def _fill_packs(sizes: Sequence[int], limit: int) -> list[list[int]]:
    # Greedy, in order. An array above the limit leaves negative room, so no other one joins it.
    packs: list[list[int]] = []
    room = -1
    for i, size in enumerate(sizes):
        if size > room:
            packs.append([])
            room = limit
        packs[-1].append(i)
        room -= size
    return packs
