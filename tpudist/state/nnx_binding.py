"""How NNX objects hold arrays: the one file that knows.

`Binding` finds the Variables of NNX objects once, and then reads and writes their raw values
directly: for 300 Variables that takes tens of microseconds, where splitting and merging takes tens
of milliseconds. A binding is used again as long as every object still holds the very same
attributes.
"""

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpudist.options import ALL_COLLECTIONS, shorten
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.state import nnx_contents, value_keys
from tpudist.values.per_replica import is_per_replica

_NO_RULES: Mapping[str, str] = {}


class Structure:
    """All of some NNX objects but their values: one object for all that are alike."""

    __slots__ = ("__weakref__",)


# A structure lives as long as a binding or a compiled step that has it, and what is static in its
# objects (functions, arrays of NumPy) no longer than that.
_structures: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()
_structures_lock = threading.Lock()  # strategies may run in threads of their own


class Binding:
    """The Variables of a tuple of NNX objects, in a fixed order.

    Attributes:
        variables: The Variables; None where an object holds a bare array instead.
        paths: Where each is, such as `('layer', 'kernel')`, below its object.
        structure: The same object for two bindings if and only if all but the values is equal.
    """

    def __init__(self, objects: Sequence[Any]):
        """Finds the Variables of `objects`."""
        graph = list(nnx.iter_graph(tuple(objects)))
        self._graphdef, self.paths, leaves = _flatten(tuple(objects), graph)
        self.variables = [x if isinstance(x, nnx.Variable) else None for x in leaves]
        self._bare = [None if isinstance(x, nnx.Variable) else x for x in leaves]
        self.kinds = tuple(type(x) for x in leaves)
        nodes = [x for _, x in graph if isinstance(x, nnx.Pytree)]
        self.summed = _ids_of_summed_metrics(nodes)
        # Holding the attribute dicts, not the objects: a binding must not keep a model alive.
        self._attributes = [vars(node) for node in nodes]
        self._seen = [tuple(attributes.values()) for attributes in self._attributes]
        self._roots = [_reference(x) for x in objects]
        self._settings = MutableSettings(self._attributes)
        self._value_structure = jax.tree.structure(self.values())
        static = _GraphKey(self._graphdef), self._value_structure, self._settings.keys
        with _structures_lock:
            self.structure = _structures.setdefault(static, Structure())

    def has_same_values(self) -> bool:
        """Whether the values are nested as before, with a PerReplica where there was one."""
        return jax.tree.structure(self.values()) == self._value_structure

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Whether this is the binding of `objects`, and nothing but values has changed in them."""
        if len(objects) != len(self._roots):
            return False
        for root, x in zip(self._roots, objects, strict=True):
            if root() is not x:
                return False
        for attributes, seen in zip(self._attributes, self._seen, strict=True):
            if len(attributes) != len(seen) or not all(
                map(operator.is_, attributes.values(), seen)
            ):
                return False
        return not self._settings.have_changed()

    def objects(self) -> list[Any]:
        """The objects themselves."""
        return [root() for root in self._roots]

    def values(self) -> list[Any]:
        """The raw values, in the order of `variables`."""
        return [
            x if v is None else v._raw_value
            for v, x in zip(self.variables, self._bare, strict=True)
        ]

    def write_value(self, index: int, value: Any) -> None:
        """Replaces one raw value, in place."""
        variable = self.variables[index]
        if variable is not None:
            write([variable], [value])
            return
        node, *parts = self.paths[index]
        _set_at(self._roots[node](), parts, value)
        self._bare[index] = value

    def aggregation(
        self, index: int, rules: Mapping[str, str] = _NO_RULES
    ) -> VariableAggregation | ReduceOp | None:
        """How a Variable that differs between replicas becomes one; None if it must not differ.

        Args:
            index: The number of the Variable.
            rules: See `RunOptions.aggregation`.
        """
        variable = self.variables[index]
        if variable is None:
            return None
        rule = rules.get(ALL_COLLECTIONS, rules.get(self.kinds[index].__name__))
        if rule is not None:
            return _parse_aggregation(rule, variable)
        asked = variable.get_metadata().get("aggregation")
        if asked is not None:
            return _parse_aggregation(asked, variable)
        if isinstance(variable, nnx.BatchStat):
            return VariableAggregation.MEAN
        return VariableAggregation.SUM if id(variable) in self.summed else None

    def is_average(self, index: int) -> bool:
        """Whether a Variable is summed only because it belongs to an average of NNX."""
        variable = self.variables[index]
        if variable is None or id(variable) not in self.summed:
            return False
        return "aggregation" not in variable.get_metadata()

    def is_random_key(self, index: int) -> bool:
        """Whether a Variable is the key of an NNX random stream."""
        return isinstance(self.variables[index], nnx.RngKey)

    def name(self, index: int) -> str:
        """The kind and path of a Variable, for people."""
        return f"{self.kinds[index].__name__} '{_name_of(self.paths[index])}'"

    def copy_with(self, values: Sequence[Any]) -> tuple:
        """New objects of the same structure that hold `values` (tracers, as a rule)."""
        return nnx.graphlib.unflatten(self._graphdef, list(values))

    def values_of(self, copies: tuple) -> list[Any] | None:
        """The values that copies made by `copy_with` hold now; None if their structure changed."""
        graphdef, _, leaves = _flatten(copies, nnx.iter_graph(copies))
        if _GraphKey(graphdef) != _GraphKey(self._graphdef):
            return None
        # In tree mode the leaves are the Variables themselves.
        return [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in leaves]

    def describe_changes(self, copies: tuple) -> str:
        """Which Variables and arrays copies have, or miss, of those that the objects have."""
        _, paths, leaves = _flatten(copies, nnx.iter_graph(copies))
        now = dict(zip(paths, leaves, strict=True))
        new = [f"{type(now[p]).__name__} '{_name_of(p)}'" for p in now if p not in self.paths]
        gone = [f"'{_name_of(p)}'" for p in self.paths if p not in now]
        found = [f"{', '.join(new[:4])} was added"] if new else []
        found += [f"{', '.join(gone[:4])} was removed"] if gone else []
        return " and ".join(found) or "an attribute that is not an array was changed"


def _flatten(
    objects: tuple, graph: Iterable[tuple[tuple, Any]]
) -> tuple[Any, list[tuple], list[Any]]:
    """The graphdef, paths and leaves of objects; a PerReplica without a Variable is a leaf.

    Args:
        objects: The objects.
        graph: Their nodes with paths, of `nnx.iter_graph`.
    """
    graphdef, state = nnx.graphlib.flatten(objects, with_paths=True)
    paths, leaves = list(state.paths), list(state.leaves)
    parts = {path: x for path, x in graph if is_per_replica(x)}
    positions = [i for i, path in enumerate(paths) if path[:-1] in parts]
    if positions:  # to NNX it is a pytree of one array
        values = [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in leaves]
        copies = nnx.graphlib.unflatten(graphdef, values)
        for i in positions:
            paths[i] = paths[i][:-1]
            leaves[i] = parts[paths[i]]
            _set_at(copies, paths[i], leaves[i].array)
        graphdef, _ = nnx.graphlib.flatten(copies, with_paths=False)
    return graphdef, paths, leaves


class _GraphKey:
    """A graphdef, whatever its static attributes are: what is mutable in them counts elsewhere."""

    __slots__ = ("_graphdef", "_hash")

    def __init__(self, graphdef: Any):
        self._graphdef = graphdef
        try:
            self._hash = hash(graphdef)
        except TypeError:
            self._hash = hash((len(graphdef.nodes), graphdef.num_leaves))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _GraphKey) or self._hash != other._hash:
            return False
        try:
            return bool(self._graphdef == other._graphdef)
        except ValueError:  # an array in a static attribute: not known to be equal
            return self._graphdef is other._graphdef


class MutableSettings:
    """What objects hold beside arrays, and what can be changed in place: configurations, mostly.

    A program is made for what they hold now. Of values that are hashed by what they are nothing
    can change.
    """

    def __init__(self, attributes: Sequence[dict[str, Any]]):
        """Looks for them among the attributes of some objects.

        Raises:
            TypeError: One can be changed, and cannot be looked into.
        """
        found = {id(x): x for held in attributes for x in held.values() if _is_mutable(x)}
        self._values = list(found.values())
        self.keys = tuple(value_keys.key_of(x) for x in self._values)

    def have_changed(self) -> bool:
        """Whether one of them holds something else now."""
        values = self._values
        return bool(values) and tuple(value_keys.key_of(x) for x in values) != self.keys


def _is_data(value: Any) -> bool:
    return isinstance(value, (*nnx_contents.OBJECT_TYPES, jax.Array, np.ndarray))


def _is_mutable(value: Any) -> bool:
    if type(value) in _IMMUTABLE or _is_data(value):
        return False
    if isinstance(value, type):
        return False
    try:
        hash(value)
        if callable(value):
            return False
    except TypeError:
        leaves = jax.tree.leaves(value, is_leaf=_is_data)
        return not any(map(_is_data, leaves))  # a part of the graph, otherwise
    return type(value).__hash__ is object.__hash__ and value_keys.attributes_of(value) is not None


_IMMUTABLE = frozenset((str, bytes, bool, int, float, complex, type(None)))


def _name_of(path: tuple) -> str:
    return ".".join(map(str, path[1:]))


def _set_at(node: Any, path: Sequence[Any], value: Any) -> None:
    """Replaces what is at a path below an object."""
    for part in path[:-1]:
        node = getattr(node, part) if _is_attribute(node, part) else node[part]
    if _is_attribute(node, path[-1]):
        setattr(node, path[-1], value)
    else:
        node[path[-1]] = value


def _is_attribute(node: Any, part: Any) -> bool:
    """Whether a part of a path is an attribute: the items of an `nnx.List` have numbers."""
    return isinstance(node, nnx.Pytree) and isinstance(part, str)


def _parse_aggregation(aggregation: Any, variable: nnx.Variable) -> VariableAggregation | ReduceOp:
    if isinstance(aggregation, VariableAggregation):
        return aggregation
    if aggregation in (ReduceOp.MAX, ReduceOp.MIN):
        return aggregation
    names = {**VariableAggregation.__members__, "MAX": ReduceOp.MAX, "MIN": ReduceOp.MIN}
    if not isinstance(aggregation, str) or aggregation.upper() not in names:
        raise ValueError(
            f"{type(variable).__name__}(aggregation={shorten(aggregation)}): aggregation must be a "
            f"tpudist.VariableAggregation or its name: {', '.join(names).lower()}."
        )
    return names[aggregation.upper()]


def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Makes each Variable hold the value, without the checks of an assignment."""
    # Variables have slots; this is what their own set_raw_value does after its checks.
    for variable, value in zip(variables, values, strict=True):
        object.__setattr__(variable, "_raw_value", value)


class Bindings:
    """The bindings of one strategy, found again by their objects."""

    def __init__(self):
        """Empty."""
        self._by_id: dict[tuple[int, ...], Binding] = {}

    def find(self, objects: Sequence[Any], *, careful: bool = True) -> Binding:
        """The binding of `objects`: the known one if it still holds, or a new one.

        A Variable that holds another kind of value now is noticed if the look is `careful`.
        """
        key = tuple(map(id, objects))
        binding = self._by_id.get(key)
        if (
            binding is None
            or not binding.is_of(objects)
            or (careful and not binding.has_same_values())
        ):
            known = binding is not None
            binding = Binding(objects)
            if any(isinstance(x, nnx.Variable) for x in objects):
                return binding  # nobody would say when a Variable is gone, and its id another's
            self._by_id[key] = binding
            # The id of an object that is gone may be another's, so its keys go with it. For a key
            # that was known this has been seen to.
            if not known:
                for x in objects:
                    weakref.finalize(x, self._by_id.pop, key, None).atexit = False
        return binding


def _reference(x: Any) -> Callable[[], Any]:
    """A weak reference; a strong one to a Variable, which has slots and takes no weak ones."""
    return (lambda: x) if isinstance(x, nnx.Variable) else weakref.ref(x)


_UPDATES_THAT_SUM = (nnx.metrics.Average.update, nnx.metrics.Accuracy.update)


def _ids_of_summed_metrics(nodes: Sequence[Any]) -> set[int]:
    """Ids of the Variables whose value is a sum over examples: those of NNX's averages.

    What a subclass does in an `update` of its own is not known to be a sum.
    """
    averages = [
        x
        for x in nodes
        if isinstance(x, nnx.metrics.Average)
        and type(x).update in _UPDATES_THAT_SUM
        and "update" not in vars(x)
    ]
    return {id(v) for x in averages for v in (x.total, x.count)}
