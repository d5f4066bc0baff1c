"""OneDeviceStrategy: one replica on one named device."""

import jax

from tpudist.cluster_resolver.separate_models import warn_of_separate_models
from tpudist.strategy.strategy import Strategy
from tpudist.xla.devices import as_devices
from tpudist.xla.mesh import make_mesh


class OneDeviceStrategy(Strategy):
    """Runs on one device, for example to test a program that is written for many.

    Matches `tf.distribute.OneDeviceStrategy`, but raises an error if the device does not exist.

    Args:
        device: JAX device or a name such as `cpu:0`. Default: the first device.
        axis_name: Same as in `MirroredStrategy`.
    """

    variables_have_components = False
    has_one_device = True

    def __init__(self, device: jax.Device | str | None = None, *, axis_name: str | None = None):
        warn_of_separate_models("OneDeviceStrategy")
        # Without a name, `as_devices` returns all devices; the strategy uses only the first.
        devices = as_devices(None if device is None else [device])[:1]
        super().__init__(make_mesh(devices, axis_name=axis_name))
