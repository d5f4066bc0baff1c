"""The evaluation of JAX operations by one replica that runs eagerly, with its own device.

If replica functions run without being compiled, each replica has a thread, and JAX evaluates its
operations at once. Two things differ from JAX's own evaluation. An array that lives elsewhere, for
example a captured one, moves to the replica's device. In a collective over replicas, the threads
meet, and the values of all are combined on the host.

JAX keeps a bit for each array: whether it is *committed* to its device. Values that replicas share
are not committed, and a replica's own values are; a result is committed if any of its inputs was.
So `depends_on_replica` answers the same question as the proof of a compiled program: whether a
value depends on values that differ, and was not reduced.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpudist.array_types import PyTree
from tpudist.lowering import placement
from tpudist.programs import accumulation, jaxprs, out_shardings
from tpudist.run.eager.host_values import HostValue, are_equal, fetch, to_array
from tpudist.xla import collectives, internals, trace_caches
from tpudist.xla.mesh import ReplicaMesh

# Called with the name of a meeting, a contribution, and a function from the contributions of all
# replicas to their results; returns this replica's result.
Meet: TypeAlias = Callable[[str, Any, Callable[[list[Any]], list[Any]]], Any]

# Not the axis name of compiled programs, for which `jax.lax.psum` takes an array that is not traced
# for a value that all replicas share. Collectives of tpudist are traced before they are evaluated.
_AXIS = "replica, one by one"


class ReplicaEvaluation:
    """The evaluation of one replica.

    Args:
        outside: JAX's settings in the caller's thread: `internals.settings_of_thread`.
        meet: Meets the other replicas.

    Attributes:
        device: The device that computes: the first one of the replica; on CPU, one for all
            replicas, because JAX compiles an operation for each device, and emulated devices share
            their memory.
        knows_origin: Whether `depends_on_replica` works: not if a replica has axes inside, because
            arrays on a mesh are always committed.
        watch: Follows the sums over examples, if there are any.
    """

    def __init__(self, mesh: ReplicaMesh, replica: int, outside: list[Any], meet: Meet):
        self._mesh, self.replica, self._meet = mesh, replica, meet
        self.device = mesh.devices_of(0 if mesh.platform == "cpu" else replica)[0]
        self.knows_origin = not mesh.inner_axes
        self._outside = outside
        self.watch: accumulation.Watch | None = None
        self._evaluation = internals.make_evaluation(self._evaluate)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Evaluates the `with` block, which calls the function, as this replica."""
        with (
            self._use(self._outside),
            self._use_mesh(),
            jax.default_device(self.device),
            jax.disable_jit(),
            collectives.run_over(_AXIS),
            internals.name_axis(_AXIS, self._mesh.num_replicas),
            internals.use_evaluation(self._evaluation),
            out_shardings.apply_out_shardings(),
            # A function that JAX traces for itself (jax.checkpoint) may read Variables.
            trace_caches.separate(),
        ):
            yield

    @contextlib.contextmanager
    def leave(self) -> Iterator[None]:
        """Restores the caller's settings for the `with` block, inside of `enter`."""
        with self._use(self._outside), trace_caches.share_with_all():
            yield

    def put(self, value: HostValue, *, own: bool) -> jax.Array:
        """Moves a host value to the replica's device.

        Args:
            value: The value; see `host_values.fetch`.
            own: Whether it belongs to this replica. If not, all replicas share it.
        """
        with internals.use_evaluation(), trace_caches.share_with_all(), jax.disable_jit(False):
            array = to_array(value)
            if not self.knows_origin:
                return jax.device_put(array, NamedSharding(self._inner_mesh(), PartitionSpec()))
            # `device_put` to a device commits the array to it: that marks a replica's own value.
            return jax.device_put(array, self.device) if own else array

    def depends_on_replica(self, array: jax.Array) -> bool:
        """Whether an array depends on values that differ between replicas; False if unknown."""
        return self.knows_origin and array.committed

    @contextlib.contextmanager
    def _use(self, settings: list[Any]) -> Iterator[None]:
        before = internals.settings_of_thread()
        internals.set_in_thread(settings)
        try:
            yield
        finally:
            internals.set_in_thread(before)

    def _use_mesh(self) -> contextlib.AbstractContextManager:
        """Uses no mesh; if a replica has axes inside, a mesh of one device with these names."""
        return placement.without_mesh() if self.knows_origin else jax.set_mesh(self._inner_mesh())

    def _inner_mesh(self) -> Mesh:
        names = self._mesh.inner_axes
        grid = np.asarray([self.device], dtype=object).reshape((1,) * len(names))
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))

    # The hooks of JAX's evaluation. `primitive` is a `Primitive` of JAX.

    def _evaluate(
        self, evaluation: object, primitive: Any, args: list[Any], params: dict
    ) -> PyTree:
        result = self._evaluate_one(evaluation, primitive, args, params)
        if self.watch is not None:
            results = result if primitive.multiple_results else [result]
            self.watch.note(primitive.name, args, results)
        return result

    def _evaluate_one(
        self, evaluation: object, primitive: Any, args: list[Any], params: dict
    ) -> PyTree:
        if _is_over_replicas(params):
            return self._communicate(primitive, args, params)
        # A primitive with a program inside (jax.checkpoint) may have collectives in it, so its
        # operations come back to this evaluation. All others are evaluated by JAX.
        programs = (jaxprs.Jaxpr, jaxprs.ClosedJaxpr)
        has_program = any(isinstance(x, programs) for x in params.values())
        if has_program:
            with internals.use_evaluation(evaluation):
                return primitive.impl(*map(self._bring, args), **params)
        with internals.use_evaluation(), trace_caches.share_with_all():
            return primitive.impl(*map(self._bring, args), **params)

    def _bring(self, x: object) -> object:
        """Moves an array to this replica's device; one from elsewhere is shared by all replicas."""
        if not isinstance(x, jax.Array) or x.sharding.device_set == {self.device}:
            return x
        return self.put(fetch(x), own=False)

    def _communicate(self, primitive: Any, args: list[Any], params: dict) -> PyTree:
        if primitive.name == "axis_index":
            return self.put(np.asarray(self.replica, np.int32), own=True)
        hosts = [fetch(x) for x in args]
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in args)
        results = self._meet(
            f"{primitive.name} of {shapes}",
            hosts,
            lambda contributions: _combine(primitive, params, contributions),
        )
        outputs = [self.put(host, own=own) for host, own in results]
        return outputs if primitive.multiple_results else outputs[0]


def _is_over_replicas(params: dict[str, Any]) -> bool:
    axes = params.get("axes", params.get("axis_name", ()))
    return axes == _AXIS or (isinstance(axes, tuple) and _AXIS in axes)


def _combine(
    primitive: Any, params: dict, contributions: list[list[HostValue]]
) -> list[list[tuple[HostValue, bool]]]:
    """Returns for each replica the results of a collective, each with whether it is its own."""
    count = len(contributions)
    if primitive.name == "ppermute":
        return _permute(params["perm"], contributions)
    groups = params.get("axis_index_groups") or [list(range(count))]
    params = {**params, "axis_index_groups": None} if "axis_index_groups" in params else params
    # On the host, a collective is a `vmap` over the stacked contributions of each group. A result
    # is shared if it is equal on all replicas, to the last bit.
    results: list[Any] = [None] * count
    for group in groups:
        arrays = zip(*(map(to_array, contributions[i]) for i in group), strict=True)
        stacked = [jnp.stack(list(x)) for x in arrays]
        out = jax.vmap(lambda *x: primitive.bind(*x, **params), axis_name=_AXIS)(*stacked)
        parts = [fetch(x) for x in (out if primitive.multiple_results else [out])]
        for position, replica in enumerate(group):
            results[replica] = [x[position] for x in parts]
    differs = [not are_equal([r[k] for r in results]) for k in range(len(results[0]))]
    return [list(zip(r, differs, strict=True)) for r in results]


def _permute(
    pairs: Sequence[tuple[int, int]], contributions: list[list[HostValue]]
) -> list[list[tuple[HostValue, bool]]]:
    """Returns the values that each replica receives: zeros if no replica sends to it."""
    # Each counts as the replica's own, also if all are equal here.
    source_of = {target: source for source, target in pairs}
    return [
        [
            (contributions[source_of[i]][k] if i in source_of else np.zeros_like(x), True)
            for k, x in enumerate(own)
        ]
        for i, own in enumerate(contributions)
    ]
