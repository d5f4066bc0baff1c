"""Explains the errors of JAX if a program computes on devices that are only descriptions."""

import contextlib
from collections.abc import Iterator

import jax

from tpudist.context.strategy_base import StrategyBase
from tpudist.xla import internals
from tpudist.xla.compiler.visible_devices import means_absent_devices


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
        if not internals.is_described(device) or not means_absent_devices(error):
            raise
        raise RuntimeError(
            f"A value was computed in the scope of {strategy!r}, whose {strategy.mesh.size} "
            f"devices ({device.device_kind}) are descriptions: they compile programs and run none. "
            "Create models and optimizers as shapes, which strategy.plan accepts: model = "
            "strategy.create_abstract(lambda: Model(rngs=nnx.Rngs(0))). Or make the strategy on "
            "the devices of this machine, and move it for the plan: strategy.plan(step, args, "
            'topology="v5e-64").'
        ) from error
