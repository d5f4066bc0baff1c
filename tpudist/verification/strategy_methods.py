"""The method of a strategy that compares a step with one device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import RunOptions
from tpudist.verification.report import VerificationReport
from tpudist.xla import traces
from tpudist.xla.mesh import REPLICA_AXIS, make_mesh


class VerifyMethods(StrategyBase):
    """The verification of a `Strategy`."""

    def verify(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        rows: int | None = None,
    ) -> VerificationReport:
        """Compares a step on all replicas with the same step on one device.

        Args:
            fn: The replica function; or `fit` or `train_on_batch` of a Keras model, with its
                arguments.
            args: Positional arguments, the same as for `run`. Use one batch of your dataset.
            kwargs: Keyword arguments, the same as for `run`.
            options: Options of the compilation, the same as for `run`.
            rows: Largest number of rows of the global batch to use; None for all. Use it if the
                global batch does not fit on one device.

        Returns:
            The report. `report.ok` is True if there are arrays, and all agree up to rounding.

        Raises:
            RuntimeError: If called in a replica function, or in the scope of another strategy.
            ValueError: If `fit` is given data that can be read once, or the model belongs to
                another strategy.
        """
        from tpudist.verification import fit_verification, verifier  # only if it is used

        context.require_scope_or_default(self, "verify")
        if not traces.is_eager():
            raise RuntimeError(
                "verify was called in a function that JAX traces. Call it outside of all functions."
            )
        # All axes inside a replica exist with one device, so annotations that name them stay valid.
        axes = {str(k): 1 for k in self.replica_mesh.mesh.shape if k != REPLICA_AXIS}
        device = next(
            x for x in self.replica_mesh.mesh.devices.flat if x.process_index == jax.process_index()
        )
        mesh = make_mesh([device], axes, axis_name=self.replica_mesh.axis_name)
        if (open_steps := fit_verification.find_opener(fn)) is not None:
            if options is not None:
                raise ValueError(
                    f"verify of {fn.__name__} of a Keras model received RunOptions, which are for "
                    "strategy.run. Omit options."
                )
            call = tuple(args), dict(kwargs or {})
            return fit_verification.verify(open_steps, self, mesh, fn, *call, rows)
        return verifier.verify(self, mesh, fn, tuple(args), dict(kwargs or {}), options, rows)
