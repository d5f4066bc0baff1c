"""Rules of tf.distribute: each has a program, its strategies, and our deliberate differences."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MIRRORED = "mirrored"
MIRRORED_8 = "mirrored of 8"
ONE_DEVICE = "one device"
DEFAULT = "default"
CENTRAL = "central storage"
MULTI_WORKER = "multi worker"
TPU = "tpu"
SERVERS = "parameter servers"
PARTS = "parameter servers with a partitioner"
NUM_TASKS = 2  # number of workers, and number of servers
NUM_PARTS = 5  # number of parts into which the partitioner splits a variable

NUM_REPLICAS = {MIRRORED: 2, MIRRORED_8: 8, ONE_DEVICE: 1, DEFAULT: 1, CENTRAL: 2, TPU: 2}
NUM_REPLICAS |= {MULTI_WORKER: 8, SERVERS: 1, PARTS: 1}
# TensorFlow's TPUStrategy needs a TPU. Ours must match the results of TensorFlow's
# MirroredStrategy.
RECORDED_ON = {TPU: MIRRORED}
MANY = (MIRRORED, TPU, CENTRAL)
SINGLE = (ONE_DEVICE, DEFAULT)

RECORDED = Path(__file__).parent / "recorded"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A deliberate difference between tpudist and TensorFlow.

    Attributes:
        symbol: Symbol of tf.distribute.
        tensorflow: Behavior of TensorFlow.
        tpudist: Behavior of tpudist.
        why: Reason for the difference.
    """

    symbol: str
    tensorflow: str
    tpudist: str
    why: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of tf.distribute and the program that checks it.

    Attributes:
        section: Name of the module in `cases/` that contains it.
        name: The rule, as a sentence.
        program: Called with an API and a strategy; returns the values to compare.
        strategies: Strategies on which it runs.
        differs: For each strategy on which tpudist differs, the reason and its result.
    """

    section: str
    name: str
    program: Callable[[Any, Any], Any]
    strategies: tuple[str, ...]
    differs: Mapping[str, tuple[Difference, Any]]


_rules: dict[str, Rule] = {}


def rule(
    *on: str, differs: Difference | None = None, gives: Any = None, differs_on: Any = None
) -> Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]:
    """Returns a decorator that registers a program as a rule; its name is the rule's sentence.

    Args:
        on: Strategies of the program (default: `MIRRORED`).
        differs: Difference between tpudist and TensorFlow; None if the results must match.
        gives: Result of tpudist where it differs. If it depends on the number of replicas, a
            function of that number.
        differs_on: Strategies on which tpudist differs (default: all of `on`).
    """
    assert differs is not None or (gives is None and differs_on is None), "no difference is given"
    strategies = on or (MIRRORED,)

    def register(program):
        name = program.__name__.replace("_", " ")
        assert name not in _rules, f"two rules are named '{name}'"
        differing = {}
        if differs is not None:
            for strategy in differs_on or strategies:
                result = gives(NUM_REPLICAS[strategy]) if callable(gives) else gives
                differing[strategy] = differs, result
        section = program.__module__.rpartition(".")[2]
        _rules[name] = Rule(section, name, program, strategies, differing)
        return program

    return register


def all_rules() -> list[Rule]:
    """Returns the rules of all modules in `cases/`, by module and then in source order."""
    package = importlib.import_module(f"{__package__}.cases")
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")
    return list(_rules.values())
