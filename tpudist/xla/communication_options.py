"""Options of reductions and gathers that mirror `tf.distribute`'s.

An option that the compiler does not support has no effect and causes a warning, once per place.
"""

import dataclasses
import enum
import warnings

from tpudist.xla.packing import Packing

_warned: set[tuple[str, str, object]] = set()


class CommunicationImplementation(enum.Enum):
    """Implementation of collectives.

    Mirrors `tf.distribute.experimental.CommunicationImplementation`. XLA has one implementation per
    platform: NCCL on GPUs, and its own elsewhere.

    Attributes:
        AUTO: The implementation of the platform.
        RING: TensorFlow's own. Has no effect and causes a warning.
        NCCL: NVIDIA's. On platforms other than GPUs, has no effect and causes a warning.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of one reduction or gather.

    Mirrors `tf.distribute.experimental.CommunicationOptions`.

    Attributes:
        bytes_per_pack: Largest number of bytes per collective; a larger array has its own. 0 lets
            XLA decide. Smaller packs can be sent while other values are still being computed. On
            GPUs, the smallest value in a program applies to the whole program. On TPUs it has no
            effect, because XLA chooses how to combine collectives, and causes a warning.
        timeout_seconds: Accepted with a warning: XLA's collectives have no timeouts.
        implementation: Implementation or its name. Causes a warning if the platform lacks it.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self):
        """Checks the values.

        Raises:
            ValueError: If a value is invalid.
        """
        size, implementation = self.bytes_per_pack, self.implementation
        names = CommunicationImplementation.__members__
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"CommunicationOptions(bytes_per_pack={size!r}): `bytes_per_pack` must be an "
                "integer >= 0; 0 lets XLA decide."
            )
        if isinstance(implementation, str) and implementation.upper() in names:
            object.__setattr__(self, "implementation", names[implementation.upper()])
        elif not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                f"CommunicationOptions(implementation={implementation!r}): `implementation` must "
                "be a tpudist.experimental.CommunicationImplementation or its name: "
                f"{', '.join(names)}."
            )

    @property
    def packing(self) -> Packing | None:
        """Division of values into collectives; None if XLA decides."""
        return Packing(bytes_per_pack=self.bytes_per_pack) if self.bytes_per_pack else None


class CollectiveHints(CommunicationOptions):
    """The deprecated name of `CommunicationOptions`.

    Mirrors `tf.distribute.experimental.CollectiveHints`.

    Args:
        bytes_per_pack: Same as in `CommunicationOptions`.
        timeout_seconds: Same as in `CommunicationOptions`.
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None):
        warnings.warn(
            "CollectiveHints is deprecated: use tpudist.experimental.CommunicationOptions.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(bytes_per_pack, timeout_seconds)


def check_options(options: object, place: str, platform: str) -> CommunicationOptions | None:
    """Returns `options`; warns once per place about each option without effect on `platform`.

    Args:
        options: The user's argument.
        place: Start of the call with this argument, such as `all_reduce(options`.
        platform: Platform of the devices: `cpu`, `gpu` or `tpu`.

    Raises:
        ValueError: If `options` is neither None nor `CommunicationOptions`.
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
    implementation = options.implementation
    assert isinstance(implementation, CommunicationImplementation)
    is_nccl_on_gpu = implementation is CommunicationImplementation.NCCL and platform == "gpu"
    if implementation is not CommunicationImplementation.AUTO and not is_nccl_on_gpu:
        why = f"on {platform} devices XLA chooses how replicas communicate"
        _warn_once(place, "implementation", implementation.name, why)
    return options


def _warn_once(place: str, field: str, value: object, why: str) -> None:
    if (place, field, value) not in _warned:
        _warned.add((place, field, value))
        text = f"{place}=CommunicationOptions({field}={value!r})) has no effect: {why}."
        warnings.warn(text, stacklevel=4)  # at the caller of the public function
