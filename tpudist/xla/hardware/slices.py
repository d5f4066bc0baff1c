"""Parses the names of TPU slices: "v5e-256", "v5p-128", "2xv5e-256", "v5e:16x16", "2xv5e:4x4".

A name is a generation with a hyphen and Google Cloud's number, or with a colon and the shape in
chips. It may begin with the number of slices that the data-center network connects.

- The number counts TensorCores, two per chip, for v2 to v5p (4x4x4 is 128 of them:
  docs.cloud.google.com/tpu/docs/v5p) and tpu7x (GKE calls 2x2x2 "tpu7x-16", as do the repositories
  AI-Hypercomputer/xpk and maxtext). It counts chips for v5e and v6e, which have one core.
- A number means Cloud's default shape, "most similar to a cube"
  (docs.cloud.google.com/tpu/docs/types-topologies). In three dimensions, that is 1x1x1, 2x2x1,
  2x2x2, 2x2x4 or 2x4x4 up to 32 chips, then 4x4x4 cubes combined to the smallest surface. In two
  dimensions, it is a power of two with sides that are equal or 1:2. A colon allows any shape.
"""

import dataclasses
import difflib
import itertools
import math
import re

from tpudist.xla import versions
from tpudist.xla.hardware.announced_chips import ANNOUNCED
from tpudist.xla.hardware.chips import CHIPS, Chip

# Cloud writes "v5litepod", libtpu also "v5" for v5p; people use the other names.
_ALIASES = {"v5litepod": "v5e", "v5": "v5p", "v7x": "tpu7x", "trillium": "v6e", "ironwood": "tpu7x"}
_ANNOUNCED_ALIASES = {"8t": "tpu8t", "v8t": "tpu8t", "8i": "tpu8i", "v8i": "tpu8i"}
_EXAMPLES = '"v5e-8", "v5p-128", "2xv5e-256" or, with the shape in chips, "v5e:2x4"'
_SMALL_3D = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_CUBE = 4


@dataclasses.dataclass(frozen=True)
class Slice:
    """One or several equal TPU slices.

    Attributes:
        name: Name that was parsed.
        generation: Key of `chips.CHIPS`.
        shape: Shape of one slice, in chips.
        num_slices: Number of slices, which the data-center network connects.
    """

    name: str
    generation: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def chip(self) -> Chip:
        """Facts about the chips."""
        return CHIPS[self.generation]

    @property
    def num_chips(self) -> int:
        """Number of chips of all slices."""
        return self.num_slices * math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Number of JAX devices of all slices."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def libtpu_name(self) -> str:
        """Name of one slice for libtpu: "v5e:16x16"."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each axis of the shape is a ring."""
        return self.chip.ring_axes(self.shape)


def parse(name: str) -> Slice:
    """Parses the name of a slice.

    Raises:
        ValueError: If `name` is not the name of an existing slice; lists similar names.
    """
    match = re.fullmatch(
        r"(?:(?P<slices>\d+)x)?(?P<generation>[a-zA-Z]\w*?)"
        r"(?:-(?P<number>\d+)|:(?P<shape>\d+(?:x\d+)*))",
        name.strip() if isinstance(name, str) else "",
    )
    _check_not_announced(name)
    generation = _generation(match["generation"]) if match else None
    if match is None or generation is None:
        raise ValueError(
            f"{name!r} is not a TPU slice. {_suggest_names(str(name))}Give a generation and its "
            f"size, such as {_EXAMPLES}; the generations and their largest slices are "
            f"{_list_names()}."
        )
    num_slices = int(match["slices"] or 1)
    if num_slices < 1:
        raise ValueError(f"{name!r} contains no slice. Use at least 1, such as {_EXAMPLES}.")
    if match["number"]:
        shape = _shape_of(int(match["number"]), generation, name)
    else:
        shape = tuple(map(int, match["shape"].split("x")))
    _check_shape(shape, CHIPS[generation], name)
    return Slice(name=name, generation=generation, shape=shape, num_slices=num_slices)


def _check_not_announced(name: str) -> None:
    """Raises `ValueError` for a slice of an announced chip, for which libtpu cannot compile yet."""
    word = re.split(r"[-:]", str(name).strip().lower())[0]
    word = re.sub(r"^\d+x", "", word)
    chip = ANNOUNCED.get(_ANNOUNCED_ALIASES.get(word, word))
    if chip is None:
        return
    installed = versions.version_of("libtpu")
    here = f"the one here is {installed}" if installed else "none is installed here"
    raise ValueError(
        f"{name!r} is a slice of {chip.device_kind}, a chip that is announced: this libtpu does "
        f"not know it yet ({here}), so no program can be compiled for it. `tpudist topologies` "
        f"shows the published figures of the chip. Plan for one of {', '.join(CHIPS)} meanwhile."
    )


def _generation(word: str) -> str | None:
    word = word.lower()
    word = _ALIASES.get(word, word)
    return word if word in CHIPS else None


def _shape_of(number: int, generation: str, name: str) -> tuple[int, ...]:
    chip = CHIPS[generation]
    num_chips, left_over = divmod(number, chip.cores_in_name)
    shape = None if left_over else default_shape(num_chips, chip.torus_dims)
    if shape is None:
        counted = "TensorCores, 2 per chip" if chip.cores_in_name == 2 else "chips"
        near = sorted(_valid_numbers(chip), key=lambda n: abs(math.log(n / max(number, 1))))[:3]
        raise ValueError(
            f"{name!r} is not a {generation} slice: its number counts {counted}, and Google Cloud "
            "has no such slice. The nearest are "
            f"{', '.join(f'{generation}-{n}' for n in sorted(near))}. Or use a shape in chips, "
            f'such as "{generation}:{_format_shape(default_shape(8, chip.torus_dims))}".'
        )
    return shape


def default_shape(num_chips: int, torus_dims: int) -> tuple[int, ...] | None:
    """Returns Google Cloud's default shape for a number of chips; None if there is none."""
    if num_chips < 1:
        return None
    if torus_dims == 2:
        power = num_chips.bit_length() - 1
        if num_chips != 1 << power or num_chips == 2:  # Cloud offers no slice of 2 chips
            return None
        return (1 << (power // 2), 1 << ((power + 1) // 2))
    if num_chips in _SMALL_3D:
        return _SMALL_3D[num_chips]
    cubes, left_over = divmod(num_chips, _CUBE**3)
    if left_over or not cubes:
        return None
    a, b, c = min(
        (
            (a, b, cubes // (a * b))
            for a, b in itertools.product(_divisors(cubes), repeat=2)
            if cubes % (a * b) == 0 and a <= b <= cubes // (a * b)
        ),
        key=lambda sides: sides[0] * sides[1] + sides[1] * sides[2] + sides[0] * sides[2],
    )
    return (_CUBE * a, _CUBE * b, _CUBE * c)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]


def _check_shape(shape: tuple[int, ...], chip: Chip, name: str) -> None:
    too_large = any(a > b for a, b in zip(sorted(shape), sorted(chip.largest), strict=False))
    if len(shape) != chip.torus_dims or min(shape) < 1 or too_large:
        raise ValueError(
            f'"{name}" is not a shape of a {chip.generation} slice, which has {chip.torus_dims} '
            f"dimensions and at most {math.prod(chip.largest)} chips, as "
            f'"{chip.generation}:{_format_shape(chip.largest)}". For more chips, use several '
            f'slices, such as "2x{chip.generation}:{_format_shape(chip.largest)}". The generations '
            f"and their largest slices are {_list_names()}."
        )


def _valid_numbers(chip: Chip) -> list[int]:
    """Returns the valid numbers after a hyphen, up to the largest slice."""
    largest = math.prod(chip.largest)
    step = _CUBE**3 if chip.torus_dims == 3 else 1
    counts = [*_SMALL_3D, *range(step, largest + 1, step)] if step > 1 else range(1, largest + 1)
    return [chip.cores_in_name * n for n in counts if default_shape(n, chip.torus_dims)]


def _suggest_names(name: str) -> str:
    """Returns a sentence with names that look like this one, or an empty text."""
    # Up to 40 numbers per generation: more make the search slow and are hardly mistyped.
    known = [
        f"{generation}-{n}" for generation, chip in CHIPS.items() for n in _valid_numbers(chip)[:40]
    ]
    known += [f"{chip.generation}:{_format_shape(chip.largest)}" for chip in CHIPS.values()]
    similar = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(similar)}? " if similar else ""


def _list_names() -> str:
    return ", ".join(f"{chip.generation}:{_format_shape(chip.largest)}" for chip in CHIPS.values())


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape or ()))


def usual_slices(generation: str, most_chips: int = 256) -> list[str]:
    """Returns the slices of a generation whose number of chips is a power of two, smallest first.

    Raises:
        ValueError: If there is no such generation.
    """
    found = _generation(generation)
    if found is None:
        raise ValueError(
            f"{generation!r} is not a generation of TPUs. The generations are {', '.join(CHIPS)}."
        )
    chip = CHIPS[found]
    counts = [n // chip.cores_in_name for n in _valid_numbers(chip)]
    powers = [n for n in dict.fromkeys(counts) if n & (n - 1) == 0 and n <= most_chips]
    return [f"{found}-{n * chip.cores_in_name}" for n in sorted(powers)]
