"""Values of the names in a module, and where it may show a text: for error_texts.py."""

import ast
from collections import defaultdict
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
_LEAVES = (ast.Name, ast.Constant)


class Place(NamedTuple):
    """A module, and the functions around an expression in it, the innermost last."""

    module: "Module"
    scope: tuple[Function, ...]


Found = tuple[ast.expr, Place]


class Module:
    """Values of names in a module, and the places in it that show a text."""

    def __init__(self, file: str, tree: ast.Module):
        self.file = file
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.returned: dict[Function, list[Found]] = defaultdict(list)
        self.assigned: dict[tuple[Function | None, str], list[Found]] = defaultdict(list)
        self.calls: dict[str, list[tuple[ast.Call, Place]]] = defaultdict(list)
        self.imports: dict[str, tuple[str, str]] = {}
        self.classes: list[ast.ClassDef] = []
        self.shown: list[tuple[ast.AST, Place, str]] = []
        self._visit(tree, Place(self, ()), "")

    def _visit(self, node: ast.AST, place: Place, owner: str) -> None:
        """Notes a node and all below it; `owner` is the class around it."""
        inner = place.scope[-1] if place.scope else None
        match node:
            case ast.Raise() | ast.Dict():
                self.shown.append((node, place, owner))
            case ast.Call():
                self.shown.append((node, place, owner))
                self.calls[last_name(node.func)].append((node, place))
                if last_name(node.func) == "append" and isinstance(node.func, ast.Attribute):
                    self._assign([node.func.value], node.args[0], place)
            case ast.ClassDef():
                self.classes.append(node)
                owner = node.name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                place = Place(self, (*place.scope, node))
                self.functions[node.name].append(node)
            case ast.Return() | ast.Yield() if node.value and inner:
                self.returned[inner].append((node.value, place))
                if inner.name == "__str__":
                    self.shown.append((node, place, owner))
            case ast.Assign():
                self._assign(node.targets, node.value, place)
                if [getattr(x, "attr", "") for x in node.targets] == ["args"]:
                    self.shown.append((node, place, owner))  # of an error: its text is replaced
            case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr() if node.value:
                self._assign([node.target], node.value, place)
            case ast.For() | ast.comprehension():
                self._assign([node.target], node.iter, place)
            case ast.ImportFrom() if (node.module or "").startswith("tpudist"):
                path = (node.module or "").replace(".", "/").removeprefix("tpudist").strip("/")
                self.imports |= {x.asname or x.name: (path, x.name) for x in node.names}
        for name in node._fields:
            value = getattr(node, name)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and child._fields and type(child) not in _LEAVES:
                    self._visit(child, place, owner)

    def _assign(self, targets: list[ast.expr], value: ast.expr, place: Place) -> None:
        inner = place.scope[-1] if place.scope else None
        for target in targets:
            if isinstance(target, ast.Name):
                self.assigned[inner, target.id].append((value, place))
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for each, part in zip(target.elts, value.elts, strict=False):
                    self._assign([each], part, place)
            elif isinstance(target, ast.Tuple):
                self._assign(target.elts, value, place)


def text_of(node: ast.expr) -> str:
    """Returns a string as written, or an empty one for an expression that is not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(x) if isinstance(x, ast.Constant) else "..." for x in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [text_of(node.left), text_of(node.right)]
        return "".join(x or "..." for x in sides) if any(sides) else ""
    return ""


def receiver_name(node: ast.expr) -> str:
    """Returns the last name of `a` in `a.b`; of a call, the name of its function."""
    value = getattr(node, "value", node)
    return "" if value is node else last_name(getattr(value, "func", value))


def last_name(node: ast.expr) -> str:
    """Returns `b` of `a.b`, and "" for an expression that has no name."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return getattr(node, "attr", "") or getattr(node, "id", "")
