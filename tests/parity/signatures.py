"""The parameters of everything that can be called in tf.distribute, as `inspect` has them.

A signature is a list of parameters: `name`, `name=` if it has a default, `*name` and `**name`;
after `*` they are keyword-only. `data/surface.json` has the names.
`signatures.json` holds TensorFlow's, and `tests/policy/test_public_api.py` compares ours.
"""

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "signatures.json"
_SURFACE = Path(__file__).parent.parent / "data" / "surface.json"


def of(called: Any) -> list[str] | None:
    """The parameters of a class, function or method, without `self`; None if it is no such."""
    called = getattr(called, "__func__", called)  # of a static or class method
    if inspect.isclass(called):
        # Not `signature(cls)`: a metaclass may say less.
        makers = [vars(cls).get(m) for cls in called.__mro__[:-1] for m in ("__init__", "__new__")]
        called = next((m for m in makers if m is not None), None)
        called = getattr(called, "__func__", called)  # __new__ is a static method
        return [] if called is None else _parameters(called)[1:]
    if not inspect.isroutine(called) and not hasattr(called, "__wrapped__"):
        return None
    parameters = _parameters(called)
    return parameters[1:] if parameters[:1] in (["self"], ["cls"]) else parameters


def _parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        return ["*args", "**kwargs"]
    found, only_keywords = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not only_keywords:
            found.append("*")
        only_keywords |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        found.append(stars + p.name + ("" if p.default is p.empty else "="))
    return found


def violations(ours: list[str], theirs: list[str]) -> list[str]:
    """Returns the reasons why calls that fit `theirs` may not fit `ours`, one per name.

    Theirs come first, in their order and by their names, and none has lost its default. What we
    have beyond them is keyword-only and has a default.
    """
    found = []
    positional, keywords = _split(ours)
    their_positional, their_keywords = _split(theirs)
    names = [p.rstrip("=") for p in positional]
    for i, p in enumerate(their_positional):
        name = p.rstrip("=")
        if p.startswith("**"):
            continue  # what it may hold, we name
        if name not in names[i : i + 1]:
            at = f" ({names[i]} is there)" if i < len(names) else ""
            found.append(f"{name} is not parameter {i}{at}")
        elif p.endswith("=") and not positional[i].endswith("="):
            found.append(f"{name} has no default")
    for p in their_keywords:
        names = {k if p.endswith("=") else k.rstrip("=") for k in keywords + positional}
        if p not in names and not p.startswith("**"):
            found.append(f"keyword {p} is missing, or has no default")
    num_theirs = sum(not p.startswith("**") for p in their_positional)
    for p in positional[num_theirs:]:
        if not p.startswith("*"):
            found.append(f"{p.rstrip('=')} is ours and not keyword-only")
    for p in keywords:
        if not p.endswith("=") and not p.startswith("**") and p not in their_keywords:
            found.append(f"{p} is ours and has no default")
    return found


def _split(parameters: list[str]) -> tuple[list[str], list[str]]:
    """Returns the parameters that may be positional, and the keyword-only ones."""
    for i, p in enumerate(parameters):
        if p == "*":
            return parameters[:i], parameters[i + 1 :]
        if p.startswith("*") and not p.startswith("**"):
            return parameters[: i + 1], parameters[i + 1 :]
    return parameters, []


def surface() -> Iterable[tuple[str, str]]:
    """All names of the specification, as `tpudist` and the path below it."""
    for owner, names in json.loads(_SURFACE.read_text())["surface"].items():
        for name in names:
            yield owner, name


def of_tensorflow() -> dict[str, list[str]]:
    """TensorFlow's, by the name that tpudist has for it. Needs TensorFlow."""
    import tensorflow as tf
    from tensorflow.python.distribute import tpu_strategy

    v1, v2 = tf.compat.v1.distribute, tf.distribute
    homes = {
        "tpudist.PerReplica": [tf.types.experimental.distributed.PerReplica],
        "tpudist.Variable": [tf.Variable],
        "tpudist.VariableAggregation": [tf.VariableAggregation],
        "tpudist.VariableSynchronization": [tf.VariableSynchronization],
        "tpudist.cluster_resolver.ClusterSpec": [tf.train.ClusterSpec],
        "tpudist.Strategy": [v2.Strategy, v1.Strategy],
        "tpudist.StrategyExtended": [
            v2.StrategyExtended,
            v1.StrategyExtended,
            tpu_strategy.TPUExtended,
        ],
        "tpudist": [v2, tf, v1, tf.types.experimental.distributed],
        "tpudist.cluster_resolver": [v2.cluster_resolver, tf.train],
        "tpudist.experimental.partitioners": [v2.experimental.partitioners],
    }
    found = {}
    for owner, name in surface():
        places = homes.get(owner) or [_at(v2, owner.split(".")[1:])]
        symbol = next((getattr(p, name) for p in places if hasattr(p, name)), None)
        if symbol is not None and (signature := of(symbol)) is not None:
            found[f"{owner}.{name}"] = signature
    for name in sorted(n for n in dir(v1) if not n.startswith("_")):
        for owner, symbol in _with_methods(f"tpudist.compat.v1.{name}", getattr(v1, name)):
            if (signature := of(symbol)) is not None:
                found[owner] = signature
    return found


def _with_methods(name: str, symbol: Any) -> Iterable[tuple[str, Any]]:
    yield name, symbol
    if inspect.isclass(symbol):
        for method in dir(symbol):
            if not method.startswith("_"):
                yield f"{name}.{method}", getattr(symbol, method)


def _at(root: Any, path: Iterable[str]) -> Any:
    for name in path:
        root = getattr(root, name, None)
    return root
