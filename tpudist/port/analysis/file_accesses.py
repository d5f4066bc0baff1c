"""Calls of a program that save or load Keras models and weights."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from tpudist.port.analysis.file_paths import PathEnd, read_end
from tpudist.port.analysis.keras_objects import is_model
from tpudist.port.analysis.nodes import code_of, keyword_name
from tpudist.port.analysis.program import Program

MODEL, WEIGHTS = "model", "weights"
_CHECKPOINT = "keras.callbacks.ModelCheckpoint"
_WEIGHTS_ONLY = 4  # position of `save_weights_only`
# File extensions that Keras 3 accepts: by kind and whether it loads.
_ACCEPTED = {
    (MODEL, False): (".keras", ".h5", ".hdf5"),
    (MODEL, True): (".keras", ".h5", ".hdf5"),
    (WEIGHTS, False): (".weights.h5",),
    (WEIGHTS, True): (".keras", ".h5", ".hdf5", ".weights.json"),
}
_ACCEPTED_BY_CHECKPOINT = (".keras", ".h5")
# Arguments of Keras 2 that raise an exception in Keras 3.
_REMOVED = {"load_weights_on_restart", "options", "period", "save_traces", "signatures"}
# Arguments for other forms of files; the port leaves such calls.
_OTHER_FORMS = {"max_shard_size", "zipped"}

# Libraries whose objects have other methods of the same name.
_OTHERS = ("flax.", "jax.", "optax.", "sklearn.", "tensorflow.train.", "torch.", "tpudist.")


@dataclasses.dataclass(frozen=True)
class _Method:
    """A function or method that accesses a file.

    Attributes:
        kind: `MODEL` or `WEIGHTS`.
        place: Position of the path.
        is_load: Whether it loads.
        is_certain: Whether the kind is certain, and Keras performs the call.
        is_callback: Whether it is a callback that saves models.
    """

    kind: str
    place: int
    is_load: bool
    is_certain: bool = True
    is_callback: bool = False

    @property
    def accepted(self) -> tuple[str, ...]:
        """File extensions that Keras 3 accepts."""
        by_kind = _ACCEPTED[self.kind, self.is_load]
        return _ACCEPTED_BY_CHECKPOINT if self.is_callback else by_kind


_FUNCTIONS = {
    f"keras.{module}.{name}": method
    for module in ("models", "saving")
    for name, method in (
        ("save_model", _Method(MODEL, 1, False)),
        ("load_model", _Method(MODEL, 0, True)),
    )
}
_METHODS = {
    "save": _Method(MODEL, 0, False),
    "save_weights": _Method(WEIGHTS, 0, False),
    "load_weights": _Method(WEIGHTS, 0, True),
}


@dataclasses.dataclass(frozen=True, eq=False)
class FileAccess:
    """A call that saves or loads a model or weights.

    Attributes:
        call: The call.
        kind: `MODEL` or `WEIGHTS`.
        is_load: Whether it loads.
        is_certain: Whether the kind is certain, and Keras performs the call.
        code: Code of the path.
        end: End of the path; None if it is unknown.
        is_wrong: Whether Keras 3 rejects the path.
        removed: Arguments that Keras 3 rejects.
    """

    call: cst.Call
    kind: str
    is_load: bool
    is_certain: bool
    code: str
    end: PathEnd | None
    is_wrong: bool
    removed: tuple[str, ...]

    def has(self, argument: str) -> bool:
        """Returns whether the call has a keyword argument."""
        return any(keyword_name(arg) == argument for arg in self.call.args)

    def is_same(self, other: FileAccess) -> bool:
        """Returns whether two calls certainly access the same file."""
        if self.end is None or other.end is None:
            return False
        if self.code == other.code or (self.end.node and self.end.node is other.end.node):
            return True
        if not self.end.is_name or not other.end.is_name or self._has_other_folder(other.end):
            return False
        is_equal = self.end.name == other.end.name
        return is_equal or _matches(self.end, other.end) or _matches(other.end, self.end)

    def is_doubtfully_same(self, other: FileAccess) -> bool:
        """Returns whether two calls may access the same file, but not certainly."""
        if self.end is None or other.end is None or self.is_same(other):
            return False
        if self._has_other_folder(other.end):
            return False
        left, right = self.end.literals, other.end.literals
        if self.end.is_name and other.end.is_name and 1 in (len(left), len(right)):
            return False  # `is_same` has compared the complete names
        starts = left[0].startswith(right[0]) or right[0].startswith(left[0])
        return starts and (left[-1].endswith(right[-1]) or right[-1].endswith(left[-1]))

    def _has_other_folder(self, other: PathEnd) -> bool:
        """Returns whether the folders of two paths certainly differ."""
        assert self.end is not None
        left, right = self.end.folder, other.folder
        is_known = self.end.is_name and other.is_name and "{" not in left + right
        return is_known and not (left.endswith(right) or right.endswith(left))


def find_accesses(program: Program) -> list[FileAccess]:
    """Returns the calls of a program that save or load models and weights, in order."""
    uses_keras = program.imports("keras") or any(map(program.uses, ("keras.", "tensorflow.keras.")))
    if not uses_keras:
        return []
    finder = _AccessFinder(program)
    accesses = [finder.read(node) for node in program.nodes(cst.Call)]
    return [x for x in accesses if x is not None and not finder.is_defined(x.call)]


def _matches(pattern: PathEnd, end: PathEnd) -> bool:
    """Returns whether `end` is `pattern` with numbers in place of its inserted values."""
    # An epoch or a loss, such as 12 or -0.5.
    return re.fullmatch(r"[-\d.]+".join(map(re.escape, pattern.literals)), end.name) is not None


class _AccessFinder:
    def __init__(self, program: Program):
        self._program = program
        # The functions that the program defines itself.
        self._defined = {node.name.value for node in program.nodes(cst.FunctionDef)}

    def is_defined(self, call: cst.Call) -> bool:
        """Returns whether the program may define the method of a call itself."""
        return (
            isinstance(call.func, cst.Attribute)
            and call.func.attr.value in self._defined
            and not self._program.callee(call)
            and not is_model(self._program, call.func.value)
        )

    def read(self, node: cst.Call) -> FileAccess | None:
        """Returns a call as a file access; None for other calls."""
        if any(arg.star for arg in node.args) or (method := self._find_method(node)) is None:
            return None
        value = self._argument(node, method.place, "filepath")
        if value is None:
            return None
        end = read_end(self._program, value)
        if end is not None and end.text.startswith("hf://"):
            return None
        # `name + "5"` may end in ".h5": unknown rather than wrong.
        if end is not None and not end.is_name and _may_have(end.text, method.accepted):
            end = None
        keywords = {arg.keyword.value for arg in node.args if arg.keyword}
        if keywords & _OTHER_FORMS:
            return None
        removed = keywords & _REMOVED
        # `save` of Keras 3 still accepts it, with a warning; `save_weights` does not.
        if method.kind == WEIGHTS and "save_format" in keywords:
            removed |= {"save_format"}
        return FileAccess(
            node,
            method.kind,
            method.is_load,
            method.is_certain,
            code_of(value),
            end,
            is_wrong=end is not None and not end.text.endswith(method.accepted),
            removed=tuple(sorted(removed)),
        )

    def _find_method(self, call: cst.Call) -> _Method | None:
        """Returns the method that a call accesses a file with; None for other calls."""
        name = self._program.callee(call).removeprefix("tensorflow.")
        if name == _CHECKPOINT:
            only = self._argument(call, _WEIGHTS_ONLY, "save_weights_only")
            if isinstance(only, cst.Name) and only.value == "True":
                return _Method(WEIGHTS, 0, False)
            is_model = only is None or (isinstance(only, cst.Name) and only.value == "False")
            return _Method(MODEL, 0, False, is_certain=is_model, is_callback=True)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name]
        if name or not isinstance(call.func, cst.Attribute):
            return None
        if (method := _METHODS.get(call.func.attr.value)) is None:
            return None
        if method.kind == WEIGHTS or self._is_model(call.func.value):
            return method
        may_be_model = self._may_be_model(call.func.value)
        return dataclasses.replace(method, is_certain=False) if may_be_model else None

    def _is_model(self, owner: cst.BaseExpression) -> bool:
        """Returns whether an object, or an attribute of objects, is certainly a Keras model."""
        name = owner.attr.value if isinstance(owner, cst.Attribute) else ""
        values = self._program.attribute_values(name)
        is_stored = bool(values) and all(is_model(self._program, value) for value in values)
        return is_stored or is_model(self._program, owner)

    def _may_be_model(self, owner: cst.BaseExpression) -> bool:
        """Returns whether an object has a name like a model, and no other library created it."""
        values = self._program.values(owner)
        name = owner.attr if isinstance(owner, cst.Attribute) else owner
        return (
            isinstance(name, cst.Name)
            and name.value.lower().rstrip("_0123456789").endswith("model")
            and not any(self._program.callee(x).startswith(_OTHERS) for x in values)
        )

    def _argument(self, call: cst.Call, place: int, name: str) -> cst.BaseExpression | None:
        positional = [arg.value for arg in call.args if arg.keyword is None]
        if place < len(positional):
            return positional[place]
        return next((x.value for x in call.args if keyword_name(x) == name), None)


def _may_have(text: str, accepted: tuple[str, ...]) -> bool:
    """Returns whether the unknown beginning of a path may complete a file extension."""
    return not text.startswith(".") and any(suffix.endswith(text) for suffix in accepted)
