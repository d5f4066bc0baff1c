"""The end of the path of a file, as the code of a program shows it."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from tpudist.port.analysis.nodes import function_name
from tpudist.port.analysis.program import Program

_JOINS = ("os.path.join", "posixpath.join", "tensorflow.io.gfile.join")
_PATHS = ("pathlib.Path", "pathlib.PurePath", "pathlib.PosixPath")
_SAME = ("os.fspath", "os.path.abspath", "os.path.expanduser", "os.path.normpath")
# The checkpoints of `tf.train` are several files with a common prefix.
_CHECKPOINTS = ("tensorflow.train.latest_checkpoint", "tpudist.checkpoint.latest_checkpoint")
_DEPTH = 9  # number of expressions that are followed, which also ends recursion
# A format of a number (`d`, `.2f`), whose text cannot be a file extension.
_NUMBER = re.compile(r"[^a-z]*[dfi]")
# Values that an operator or a callback inserts: `{epoch}`, `%02d`, `%(epoch)02d`.
_INSERTED = re.compile(r"\{[^{}]*\}|%(?:\([^)]*\))?[^%a-zA-Z]*[a-zA-Z]")


@dataclasses.dataclass(frozen=True)
class PathEnd:
    """The known end of a path.

    | path                | `text`      | `is_name` | `start` | `literals`      |
    | ------------------- | ----------- | --------- | ------- | --------------- |
    | `"a/m{}.h5"`        | `a/m{}.h5`  | True      |         | `m`, `.h5`      |
    | `f"{folder}/m.h5"`  | `/m.h5`     | True      |         | `m.h5`          |
    | `f"a{b}/m-{c}.h5"`  | `.h5`       | False     | `m-`    | `m-`, `.h5`     |
    | `f"a{b}/m-{c:02d}"` | `0`         | False     | `m-`    | `m-` and empty  |

    Attributes:
        text: The last characters of the path. A digit stands for a number that an f-string inserts;
            `%d` and `{}` of other formats stay.
        node: The node that contains them; None if the program does not contain them.
        is_name: Whether `text` contains the whole name of the file.
        start: The known beginning of the name, if `text` does not contain it.
        variables: Variables that were followed, from the outside in.
    """

    text: str
    node: cst.SimpleString | cst.FormattedString | cst.FormattedStringText | None
    is_name: bool
    start: str = ""
    variables: tuple[cst.Name, ...] = ()

    @property
    def name(self) -> str:
        """The name of the file, or the known end of it."""
        return self.text.rstrip("/").rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The folder of the file, or the known end of it."""
        return self.text.rstrip("/").rpartition("/")[0]

    @property
    def literals(self) -> list[str]:
        """The known parts of the name, between inserted values."""
        if isinstance(self.node, cst.FormattedString):
            return [self.start, ""]  # it ends in a number
        parts = _INSERTED.split(self.name)
        return parts if self.is_name else [self.start, *parts]

    def with_suffix(self, suffix: str, replaces: tuple[str, ...]) -> PathEnd | None:
        """Returns the end with a new file extension; None if that is not certain.

        Args:
            suffix: The new file extension.
            replaces: File extensions that it replaces. It is appended to other names.
        """
        node = self.node
        if isinstance(node, cst.FormattedString):
            new = node.with_changes(parts=[*node.parts, cst.FormattedStringText(suffix)])
            return dataclasses.replace(self, text=self.text + suffix, node=new)
        if node is None or self.name in ("", ".", ".."):
            return None
        old = next((x for x in replaces if self.name.endswith(x)), "")
        # "saved/" is the folder of a SavedModel: the slash goes with the old extension.
        slashes = self.text[len(self.text.rstrip("/")) :]
        dropped = old + slashes
        text = self.text.removesuffix(dropped) + suffix
        raw = node.raw_value if isinstance(node, cst.SimpleString) else node.value
        # `raw` is the text in the source, with its escapes. If it ends differently from the value,
        # an edit of the source is not certain to give the value.
        if not raw.endswith(dropped) or (self.is_name and self.name == old):
            return None
        value = raw.removesuffix(dropped) + suffix
        if isinstance(node, cst.SimpleString):
            value = f"{node.prefix}{node.quote}{value}{node.quote}"
        return dataclasses.replace(self, text=text, node=node.with_changes(value=value))


def read_end(program: Program, value: cst.BaseExpression, depth: int = 0) -> PathEnd | None:
    """Returns the end of the path that an expression computes; None if it is unknown."""
    if depth > _DEPTH:
        return None
    match value:
        case cst.SimpleString():
            text = value.evaluated_value
            return PathEnd(text, value, True) if isinstance(text, str) else None
        case cst.FormattedString():
            return _end_of_format(value)
        case (
            cst.ConcatenatedString(right=last) | cst.BinaryOperation(operator=cst.Add(), right=last)
        ):
            end = read_end(program, last, depth + 1)
            # In `folder + "/model.h5"` the last part has the whole name; in `name + ".h5"` only its
            # end.
            return end and dataclasses.replace(end, is_name="/" in end.text.rstrip("/"), start="")
        case cst.BinaryOperation(operator=cst.Divide(), right=last):
            return read_end(program, last, depth + 1)
        case cst.BinaryOperation(operator=cst.Modulo(), left=cst.SimpleString() as text):
            return _end_of_template(text, r"%(?:\([^)]*\))?([^%a-zA-Z]*[a-zA-Z])$")
        case cst.Name():
            values = program.values(value)
            if len(values) != 1:
                return None
            end = read_end(program, values[0], depth + 1)
            return end and dataclasses.replace(end, variables=(value, *end.variables))
        case cst.Call():
            return _end_of_call(program, value, depth)
    return None


def _end_of_call(program: Program, call: cst.Call, depth: int) -> PathEnd | None:
    name, function = program.callee(call), call.func
    if name in _CHECKPOINTS:
        # The checkpoints are named ckpt-1, ckpt-2, ...: an example is enough to see that Keras 3
        # does not accept the extension.
        return PathEnd("ckpt-1", None, False)
    if not call.args or any(arg.star for arg in call.args):
        return None
    is_str = function_name(call) == "str" and not name
    if name in _JOINS or name in _PATHS or name in _SAME or is_str:
        return read_end(program, call.args[-1].value, depth + 1)
    if not isinstance(function, cst.Attribute):
        return None
    if function.attr.value == "format" and isinstance(function.value, cst.SimpleString):
        return _end_of_template(function.value, r"\{([^{}]*)\}$")
    if function.attr.value == "joinpath":
        return read_end(program, call.args[-1].value, depth + 1)
    return None


def _end_of_format(value: cst.FormattedString) -> PathEnd | None:
    """Returns the end of an f-string."""
    if not value.parts:
        return None
    last, start = value.parts[-1], ""
    for i, part in enumerate(value.parts[:-1]):
        # The name begins at the start of the f-string, or after its last slash.
        if isinstance(part, cst.FormattedStringText) and (i == 0 or "/" in part.value):
            start = part.value.rpartition("/")[2]
    if isinstance(last, cst.FormattedStringText):
        is_name = len(value.parts) == 1 or "/" in last.value.rstrip("/")
        return PathEnd(last.value, last, is_name, start)
    assert isinstance(last, cst.FormattedStringExpression)
    parts = last.format_spec or ()
    spec = "".join(x.value for x in parts if isinstance(x, cst.FormattedStringText))
    return PathEnd("0", value, False, start) if _NUMBER.fullmatch(spec) else None


def _end_of_template(text: cst.SimpleString, last: str) -> PathEnd | None:
    """Returns the end of a string into which an operator inserts values."""
    value = text.evaluated_value
    if not isinstance(value, str):
        return None
    found = re.search(last, value)
    if found is not None and not _NUMBER.fullmatch(found[1]):
        return None
    return PathEnd(value, text, True)
