"""Finds the texts of errors, warnings and log lines in sources, which it parses and never imports.

A text is often put together far from the statement that raises it. So this follows names: to what
they are assigned, to what functions of the package return, and to what callers pass.
"""

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from error_sources import Found, Function, Module, Place, last_name, receiver_name, text_of

REASON = "reason"
LOG = "log"
_LOGGERS = re.compile(r"_?(log|logger|logging)")
_LEVELS = ("warning", "error", "exception", "critical")
_PRINTS = ("say", "print_error")
# Records whose text other processes print.
_RECORDS = ("Verdict",)
_FILTERS = ("filterwarnings", "simplefilter", "isinstance", "issubclass", "suppress")
# Keys of dicts that go to another process, which shows the value.
_KEYS = ("message", "error")
_PLACEHOLDERS = re.compile(r"%(?:\.\d)?[sdrgf]|\{\w*\}")
_COMPUTED = re.compile(r"(?:\.\.\.){2,}")
# Functions and methods that give back a text that they are given, or one of several.
_PASSES = set("str join format strip rstrip dedent replace next items values get sorted".split())
_ERRORS = {
    name
    for name, it in vars(builtins).items()
    if isinstance(it, type) and issubclass(it, BaseException)
}


class Text(NamedTuple):
    """One text: the class that has it, or "reason" or "log", and the file that has the text."""

    name: str
    text: str
    file: str


class Sources:
    """The modules of a package."""

    def __init__(self, package: Path):
        self._modules = [
            Module(path.relative_to(package).as_posix(), ast.parse(path.read_text()))
            for path in sorted(package.rglob("*.py"))
        ]
        self.errors = set(_ERRORS)
        self.classes = [x for module in self._modules for x in module.classes]
        while new := {c.name for c in self.classes if self.is_error(c)} - self.errors:
            self.errors |= new
        self._by_path = {
            x.file.removesuffix(".py").removesuffix("__init__").rstrip("/"): x
            for x in self._modules
        }
        self._owners: dict[str, list[Module]] = defaultdict(list)
        for module in self._modules:
            for name in module.functions:
                self._owners[name].append(module)

    def is_error(self, node: ast.ClassDef) -> bool:
        """Returns whether a class is one of errors or warnings."""
        return any(last_name(base) in self.errors for base in node.bases)

    def texts(self) -> Iterator[Text]:
        """Yields the texts of all modules, each file from the top; a text may come twice."""
        for module in self._modules:
            for node, place, owner in module.shown:
                for name, whole, value in self._shown(node, owner):
                    for text, file in self._follow(value, place, set(), whole):
                        yield Text(name, text, file)

    def _shown(self, node: Any, owner: str) -> Iterator[tuple[str, bool, ast.expr]]:
        """Yields the expressions whose text a user sees, with the class, and whether it is all."""
        if isinstance(node, ast.Return | ast.Yield):
            if owner in self.errors and node.value:
                yield owner, True, node.value
        elif isinstance(node, ast.Assign):
            yield REASON, True, node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in _KEYS:
                    yield REASON, True, value
        elif isinstance(node, ast.Raise):
            # A function that creates the error has no name that helps a reader.
            if isinstance(node.exc, ast.Call) and last_name(node.exc.func) not in self.errors:
                name = last_name(node.exc.func)
                name = name if name[:1].isupper() else REASON
                yield from ((name, True, x) for x in node.exc.args)
        else:
            name, values = self._kind(node, owner), [*node.args, *(x.value for x in node.keywords)]
            whole = name != LOG or not values or _num_words(text_of(values[0])) < 2
            for i, value in enumerate(values if name else ()):
                yield name, whole or i == 0, value

    def _kind(self, call: ast.Call, owner: str) -> str:
        """Returns the class of the error that a call makes or reports, or "" if it does not."""
        name, receiver = last_name(call.func), receiver_name(call.func)
        if name in _FILTERS:
            return ""
        if name in self.errors and not name.startswith("_"):
            return name
        if name in ("refuse", "add_note", *_RECORDS) or name in self.errors:
            return REASON
        first = text_of(call.args[0]) if call.args else ""
        if name in _PRINTS or (name == "_write" and first.startswith("tpudist")):
            return LOG
        if name in _LEVELS and _LOGGERS.fullmatch(receiver):
            return LOG
        if name == "__init__" and receiver == "super" and owner in self.errors:
            return owner
        values = [*call.args, *(x.value for x in call.keywords)]
        named = [x for x in map(last_name, values) if x in self.errors and x.endswith("Warning")]
        return named[0] if named else "UserWarning" if receiver == "warnings" else ""

    def _follow(
        self, node: ast.expr, place: Place, seen: set[int], whole: bool
    ) -> Iterator[tuple[str, str]]:
        """Yields texts that an expression may have, and their files; parts of one have `...`."""
        if id(node) in seen or len(seen) > 400:
            return
        seen.add(id(node))
        text = _COMPUTED.sub("...", _PLACEHOLDERS.sub("...", text_of(node)))
        text = " ".join(text.split())
        if text.startswith("<"):  # a page, whose file is named in a log line
            return
        # Two words are a text where they are given to an error; elsewhere, they are mostly a name.
        if _num_words(text) >= ((2 if len(seen) == 1 else 3) if whole else 5):
            yield text if whole else f"... {text.strip('. ')} ...", place.module.file
        whole = whole and _num_words(text) < 2
        for part, where in self._parts(node, place):
            yield from self._follow(part, where, seen, whole)

    def _parts(self, node: Any, place: Place) -> list[Found]:
        """Returns the expressions from which the text of another comes."""
        match node:
            case ast.JoinedStr():
                found = [x.value for x in node.values if isinstance(x, ast.FormattedValue)]
            case ast.BinOp():
                found = [node.left, node.right]
            case ast.IfExp():
                found = [node.body, node.orelse]
            case ast.BoolOp() | ast.Dict():
                found = node.values
            case ast.Tuple() | ast.List():
                found = node.elts
            case ast.ListComp() | ast.GeneratorExp():
                found = [node.elt]
            case ast.Starred() | ast.NamedExpr() | ast.Subscript():
                found = [node.value]
            case ast.Name():
                return self._assigned(node.id, place)
            case ast.Call():
                return self._called(node, place)
            case ast.Attribute():  # a property
                return self._returned(node, place)
            case _:
                found = []
        return [(x, place) for x in found]

    def _assigned(self, name: str, place: Place) -> list[Found]:
        """Returns the values of a variable, a parameter or a constant."""
        module, scope = place
        for function in (*reversed(scope), None):
            if found := module.assigned.get((function, name)):
                return found
            if function is None:
                break
            parameters = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
            names = [x for x in parameters if x not in ("self", "cls")]
            if name in (*names, *(x.arg for x in function.args.kwonlyargs)):
                i = names.index(name) if name in names else len(names)
                return [
                    (value, where)
                    for call, where in self._calls_of(function, module)
                    for value in (
                        *call.args[i : i + 1],
                        *(x.value for x in call.keywords if x.arg == name),
                    )
                ]
        path, imported = module.imports.get(name, ("", ""))
        source = self._by_path.get(path) if imported else None
        return source.assigned.get((None, imported), []) if source else []

    def _calls_of(self, function: Function, module: Module) -> list[tuple[ast.Call, Place]]:
        """Returns the calls of a function: in all modules, if no other has its name."""
        name = function.name
        alone = len(self._owners[name]) == 1
        return [x for m in (self._modules if alone else [module]) for x in m.calls.get(name, ())]

    def _called(self, call: ast.Call, place: Place) -> list[Found]:
        """Returns the values of a call: of a function of the package, or a method of text."""
        if last_name(call.func) in _PASSES:
            receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
            return [(x, place) for x in (*receiver, *call.args)]
        return self._returned(call.func, place)

    def _returned(self, function: ast.expr, place: Place) -> list[Found]:
        """Returns what a function returns: of this module, or of a module that it imports."""
        module, name = place.module, last_name(function)
        receiver = getattr(getattr(function, "value", None), "id", "")
        if isinstance(function, ast.Name) and name in module.imports:
            path, name = module.imports[name]
            module = self._by_path.get(path, module)
        elif receiver in module.imports:
            path = "/".join(filter(None, module.imports[receiver]))
            module = self._by_path.get(path, module)
        elif isinstance(function, ast.Attribute) and name not in module.functions:
            owners = self._owners.get(name, ())  # a method of another module
            module = owners[0] if len(owners) == 1 else module
        return [x for f in module.functions.get(name, ()) for x in module.returned.get(f, ())]


def _num_words(text: str) -> int:
    return len(text.replace("...", " ").split())
