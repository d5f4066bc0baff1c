"""Explains the errors of JAX if a program computes on devices that are only descriptions."""

import contextlib
from collections.abc import Iterator

import jax

from tpudist.context.strategy_base import StrategyBase
from tpudist.xla import internals

# What JAX raises, depending on whether it compiles a program or moves an array first.
_SIGNS = ("'local_devices'", "compile-only client", "not addressable")


def is_sign(error: Exception) -> bool:
    """Returns whether JAX raises such an error if a program uses absent devices."""
    return any(text in str(error) for text in _SIGNS)


@contextlib.contextmanager
def explain_errors(strategy: StrategyBase) -> Iterator[None]:
    """Explains an error in the `with` block that absent devices of `strategy` cause.

    Raises:
        RuntimeError: If the block computed on devices that are only descriptions.
    """
    try:
        yield
    except (AttributeError, ValueError, jax.errors.JaxRuntimeError) as error:
        device = strategy.mesh.devices.flat[0]
        if not internals.is_described(device) or not is_sign(error):
            raise
        raise RuntimeError(
            f"A value was computed in the scope of {strategy!r}, whose {strategy.mesh.size} "
            f"devices ({device.device_kind}) are descriptions: they compile programs and run none. "
            "Create models and optimizers as shapes, which strategy.plan accepts: model = "
            "strategy.create_abstract(lambda: Model(rngs=nnx.Rngs(0))). Or make the strategy on "
            "the devices of this machine, and move it for the plan: strategy.plan(step, args, "
            'topology="v5e-64").'
        ) from error
