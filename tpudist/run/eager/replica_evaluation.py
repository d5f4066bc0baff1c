"""How one replica computes by itself, eagerly: on its own device, and with the others' help.

Where replica functions run without being compiled, each replica has a thread, and JAX evaluates its
operations at once. What is different from JAX's own evaluation is in here: an array that lives
elsewhere (one that the function captures) is brought to the replica's device, and a collective over
the replicas is a meeting of the threads, at which the values of all are combined on the host.

Whether a value is the same on all replicas shows in a bit that JAX keeps of each array: whether it
is *committed* to its device. What replicas share is not, what is a replica's own is; what is
computed is committed if any of its inputs was. So `depends_on_replica` says of a result what the
proof of a compiled program says: whether it depends on what differs, and was not reduced.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpudist.lowering import placement
from tpudist.programs import accumulation, jaxprs, out_shardings
from tpudist.xla import collectives, internals, traces
from tpudist.xla.mesh import ReplicaMesh

# What replicas do at a meeting: named by the first, done with what all have brought.
Meet = Callable[[str, Any, Callable[[list[Any]], list[Any]]], Any]


class ReplicaEvaluation:
    """The evaluation of one replica.

    Attributes:
        replica: Its number.
        device: Where it computes: its device, or the first of them; on CPU, one for all replicas.
        knows_origin: Whether `depends_on_replica` can be told: not where a replica has axes inside,
            as what is placed on a mesh is committed in any case.
        watch: Follows what becomes of the sums over examples, if there are any.
    """

    def __init__(self, mesh: ReplicaMesh, replica: int, outside: list[Any], meet: Meet):
        """Of a replica of `mesh`, which meets the others by `meet`.

        Args:
            mesh: All replicas.
            replica: Which of them.
            outside: The settings of JAX in the caller's thread: `internals.settings_of_thread`.
            meet: Given what for, what this replica brings, and what is done with what all have
                brought, it gives what this replica takes away.
        """
        self._mesh, self.replica, self._meet = mesh, replica, meet
        # JAX compiles an operation for each device. Those that are emulated share their memory.
        self.device = mesh.devices_of(0 if mesh.platform == "cpu" else replica)[0]
        self.knows_origin = not mesh.inner_axes
        self._outside = outside
        self.watch: accumulation.Watch | None = None
        self._evaluation = internals.make_evaluation(self._evaluate)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Where the replica's function is called, in a thread of its own or in the caller's."""
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
            traces.separate_caches(),
        ):
            yield

    @contextlib.contextmanager
    def leave(self) -> Iterator[None]:
        """What holds outside, where the caller is, in the midst of the function."""
        with self._use(self._outside), traces.common_caches():
            yield

    def put(self, value: Any, *, own: bool) -> Any:
        """A host value (see `fetch`) on the replica's device: its own, or one that all share."""
        with internals.use_evaluation(), traces.common_caches(), jax.disable_jit(False):
            array = to_array(value)
            if not self.knows_origin:
                where = NamedSharding(self._inner_mesh(), PartitionSpec())
                return jax.device_put(array, where)
            return jax.device_put(array, self.device) if own else array

    def depends_on_replica(self, array: jax.Array) -> bool:
        """Whether an array depends on what differs between replicas, as far as can be told."""
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
        """No mesh; where a replica has axes inside, one of these names and a single device."""
        return placement.without_mesh() if self.knows_origin else jax.set_mesh(self._inner_mesh())

    def _inner_mesh(self) -> Mesh:
        names = self._mesh.inner_axes
        grid = np.asarray([self.device], dtype=object).reshape((1,) * len(names))
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))

    def _evaluate(self, evaluation: Any, primitive: Any, args: list[Any], params: dict) -> Any:
        result = self._evaluate_one(evaluation, primitive, args, params)
        if self.watch is not None:
            results = result if primitive.multiple_results else [result]
            self.watch.note(primitive.name, args, results)
        return result

    def _evaluate_one(self, evaluation: Any, primitive: Any, args: list[Any], params: dict) -> Any:
        if _is_over_replicas(params):
            return self._communicate(primitive, args, params)
        # What holds a program (jax.checkpoint) may hold collectives, which are for this evaluation.
        programs = (jaxprs.Jaxpr, jaxprs.ClosedJaxpr)
        holds_program = any(isinstance(x, programs) for x in params.values())
        if holds_program:
            with internals.use_evaluation(evaluation):
                return primitive.impl(*map(self._bring, args), **params)
        with internals.use_evaluation(), traces.common_caches():
            return primitive.impl(*map(self._bring, args), **params)

    def _bring(self, x: Any) -> Any:
        """An array on this replica's device: one from elsewhere is the same for all replicas."""
        if not isinstance(x, jax.Array) or x.sharding.device_set == {self.device}:
            return x
        return self.put(fetch(x), own=False)

    def _communicate(self, primitive: Any, args: list[Any], params: dict) -> Any:
        if primitive.name == "axis_index":
            return self.put(np.int32(self.replica), own=True)
        hosts = [fetch(x) for x in args]
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in args)
        results = self._meet(
            f"{primitive.name} of {shapes}",
            (primitive.name, params, [(x.shape, x.dtype) for x in args], hosts),
            lambda brought: _combine(primitive, params, [x[-1] for x in brought]),
        )
        outputs = [self.put(host, own=own) for host, own in results]
        return outputs if primitive.multiple_results else outputs[0]


# Not that of compiled programs: `jax.lax.psum` of an array that is not traced takes it for one that
# all replicas share. Collectives of tpudist are traced before they are evaluated.
_AXIS = "replica, one by one"


def _is_over_replicas(params: dict[str, Any]) -> bool:
    axes = params.get("axes", params.get("axis_name", ()))
    return axes == _AXIS or (isinstance(axes, tuple) and _AXIS in axes)


def _combine(primitive: Any, params: dict, brought: list[list[Any]]) -> list[Any]:
    """For each replica what a collective gives it, and whether that is its own."""
    count = len(brought)
    if primitive.name == "ppermute":
        return _permute(params["perm"], brought)
    groups = params.get("axis_index_groups") or [list(range(count))]
    params = {**params, "axis_index_groups": None} if "axis_index_groups" in params else params
    results: list[Any] = [None] * count
    for group in groups:
        arrays = zip(*(map(to_array, brought[i]) for i in group), strict=True)
        stacked = [jnp.stack(list(x)) for x in arrays]
        out = jax.vmap(lambda *x: primitive.bind(*x, **params), axis_name=_AXIS)(*stacked)
        parts = [fetch(x) for x in (out if primitive.multiple_results else [out])]
        for position, replica in enumerate(group):
            results[replica] = [x[position] for x in parts]
    same = [are_equal([r[k] for r in results]) for k in range(len(results[0]))]
    return [[(x, not s) for x, s in zip(r, same, strict=True)] for r in results]


def _permute(pairs: Sequence[tuple[int, int]], brought: list[list[Any]]) -> list[Any]:
    """What each replica has got of another one: zeros, if nobody sends it anything."""
    source = {target: source for source, target in pairs}
    return [
        [
            (brought[source[i]][k] if i in source else np.zeros_like(x), True)
            for k, x in enumerate(own)
        ]
        for i, own in enumerate(brought)
    ]


# Arrays in the host's memory, where threads exchange them: those of NumPy's, and random keys.


def fetch(array: Any) -> Any:
    """An array as a host value: NumPy's; random keys as an array of keys."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return HostKeys(np.asarray(jax.random.key_data(array)), jax.random.key_impl(array))
    return np.asarray(array)


class HostKeys:
    """Random keys in the host's memory."""

    def __init__(self, data: np.ndarray, impl: Any):
        """Of the data of keys, and by which algorithm they are."""
        self.data, self.impl = data, impl

    def __getitem__(self, index: Any) -> "HostKeys":
        return HostKeys(self.data[index], self.impl)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the keys."""
        return self.data.shape[:-1]


def stack_values(values: Sequence[Any]) -> Any:
    """Host values of one shape as one, with a leading dim."""
    if isinstance(values[0], HostKeys):
        return HostKeys(np.stack([x.data for x in values]), values[0].impl)
    return np.stack(values)


def are_equal(values: Sequence[Any]) -> bool:
    """Whether host values are the same to the last bit, shapes and dtypes included."""
    numbers = [x.data if isinstance(x, HostKeys) else np.asarray(x) for x in values]
    first = numbers[0]
    return all(
        x.shape == first.shape and x.dtype == first.dtype and x.tobytes() == first.tobytes()
        for x in numbers[1:]
    )


def to_array(value: Any) -> jax.Array:
    """A host value as an array that shares no memory with it."""
    if isinstance(value, HostKeys):
        return jax.random.wrap_key_data(jnp.array(value.data), impl=value.impl)
    with internals.place_explicitly():
        return jnp.array(value)
