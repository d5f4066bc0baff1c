"""How replicas communicate, as far as users choose it: options of reductions, as `tf.distribute`'s.

What the compiler cannot be told has no effect, which is said once for each place that asks for it.
"""

import dataclasses
import enum
import warnings
from typing import Any

from tpudist.xla.packing import Packing

_warned: set[tuple[str, str, Any]] = set()


class CommunicationImplementation(enum.Enum):
    """Who carries values between devices.

    As `tf.distribute.experimental.CommunicationImplementation`. XLA has one implementation for each
    platform: NCCL on GPUs, and its own elsewhere.

    Attributes:
        AUTO: What the platform has.
        RING: TensorFlow's own. It has no effect, which is a warning.
        NCCL: NVIDIA's. It has no effect but on GPUs, which is a warning.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How one reduction or gather communicates.

    As `tf.distribute.experimental.CommunicationOptions`.

    Attributes:
        bytes_per_pack: Bytes that travel in one collective at most; an array that is larger travels
            alone. 0 lets XLA decide. Smaller packs can travel while others are still computed. On
            GPUs the smallest that is asked for in a program holds for all of it. On TPUs XLA
            combines collectives as it likes, and this is a warning.
        timeout_seconds: Accepted with a warning: XLA's collectives have no timeouts of their own.
        implementation: Which one, or its name. What the platform does not have is a warning.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self):
        """Checks the values.

        Raises:
            ValueError: Negative bytes, or no implementation.
        """
        size, asked = self.bytes_per_pack, self.implementation
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"CommunicationOptions(bytes_per_pack={size!r}): `bytes_per_pack` must be an "
                "integer >= 0; 0 lets XLA decide."
            )
        if isinstance(asked, str) and asked.upper() in CommunicationImplementation.__members__:
            object.__setattr__(self, "implementation", CommunicationImplementation[asked.upper()])
        elif not isinstance(asked, CommunicationImplementation):
            raise ValueError(
                f"CommunicationOptions(implementation={asked!r}): `implementation` must be a "
                "tpudist.experimental.CommunicationImplementation or its name: "
                f"{', '.join(CommunicationImplementation.__members__)}."
            )

    @property
    def packing(self) -> Packing | None:
        """Which values share a collective; None if XLA decides."""
        return Packing(bytes_per_pack=self.bytes_per_pack) if self.bytes_per_pack else None


class CollectiveHints(CommunicationOptions):
    """The old name of `CommunicationOptions`, deprecated.

    As `tf.distribute.experimental.CollectiveHints`.
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None):
        """As `CommunicationOptions`."""
        warnings.warn(
            "CollectiveHints is deprecated: use tpudist.experimental.CommunicationOptions.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(bytes_per_pack, timeout_seconds)


def check_options(options: Any, place: str, platform: str) -> CommunicationOptions | None:
    """`options`, of which each that has no effect on `platform` is a warning, once for each place.

    Args:
        options: What a user gave.
        place: The call that was given it, such as `all_reduce(options`.
        platform: Of the devices: `cpu`, `gpu` or `tpu`.

    Raises:
        ValueError: It is something else.
    """
    if options is None:
        return None
    if not isinstance(options, CommunicationOptions):
        raise ValueError(
            f"{place}={options!r}) received a {type(options).__name__}. It must be a "
            "tpudist.experimental.CommunicationOptions, or None."
        )
    if options.timeout_seconds is not None:
        _warn_once(place, "timeout_seconds", options.timeout_seconds, "collectives have no timeout")
    if options.bytes_per_pack and platform == "tpu":
        why = "on tpu devices XLA decides how to combine collectives"
        _warn_once(place, "bytes_per_pack", options.bytes_per_pack, why)
    asked = options.implementation
    assert isinstance(asked, CommunicationImplementation)
    have_nccl = asked is CommunicationImplementation.NCCL and platform == "gpu"
    if asked is not CommunicationImplementation.AUTO and not have_nccl:
        why = f"on {platform} devices XLA chooses how replicas communicate"
        _warn_once(place, "implementation", asked.name, why)
    return options


def _warn_once(place: str, field: str, value: Any, why: str) -> None:
    if (place, field, value) not in _warned:
        _warned.add((place, field, value))
        warnings.warn(
            f"{place}=CommunicationOptions({field}={value!r})) has no effect: {why}.", stacklevel=4
        )
