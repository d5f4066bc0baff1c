"""Which values share a collective."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a list of arrays is divided into collectives; by default all travel in one.

    Attributes:
        bytes_per_pack: Bytes of one collective at most, but an array is not cut; 0 for no limit.
        num_packs: How many collectives, of about as many bytes each, if there is no limit of bytes;
            0 for one per array.
    """

    bytes_per_pack: int = 0
    num_packs: int = 1

    def packs(self, sizes: Sequence[int]) -> list[list[int]]:
        """Positions of the arrays of each collective, in order.

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
            # By its middle, so that packs differ by half an array at most.
            middle = int((done + size / 2) * self.num_packs / total)
            packs[min(middle, self.num_packs - 1)].append(i)
            done += size
        return [pack for pack in packs if pack]

    def apply(
        self,
        communicate: Callable[[list[Any]], Sequence[Any]],
        arrays: Sequence[jax.Array],
        join: bool,
    ) -> list[Any]:
        """Calls `communicate` on each pack; the results in the order of `arrays`.

        Args:
            communicate: Of a list of arrays, of the shapes that it keeps.
            arrays: All of them.
            join: Whether to make one flat array of those of a pack, so that they share a collective
                though the compiler does not combine any.
        """
        results: list[Any] = [None] * len(arrays)
        for pack in self.packs([num_bytes(x) for x in arrays]):
            some = [arrays[i] for i in pack]
            received = _join_and_communicate(communicate, some) if join else communicate(some)
            for i, y in zip(pack, received, strict=True):
                results[i] = y
        return results

    def compiler_options(self, platform: str) -> dict[str, Any]:
        """What keeps the compiler from combining what is divided here, as far as it can be told.

        XLA:CPU combines all all-reduces, XLA:GPU up to a threshold. XLA:TPU takes no such option,
        and combines all-reduces of less than 128 MiB (libtpu 0.0.51).
        """
        if not self.bytes_per_pack and self.num_packs == 1:
            return {}
        if platform == "cpu":
            return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
        if platform in ("gpu", "cuda", "rocm") and self.bytes_per_pack:
            names = ("all_reduce", "all_gather")
            return {f"xla_gpu_{x}_combine_threshold_bytes": self.bytes_per_pack for x in names}
        return {}


def num_bytes(x: Any) -> int:
    """Bytes of an array."""
    return x.size * x.dtype.itemsize


def _join_and_communicate(
    communicate: Callable[[list[Any]], Sequence[Any]], arrays: Sequence[jax.Array]
) -> list[Any]:
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
    packs: list[list[int]] = []
    room = -1
    for i, size in enumerate(sizes):
        if size > room:
            packs.append([])
            room = limit
        packs[-1].append(i)
        room -= size
    return packs
