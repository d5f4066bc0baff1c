"""The addresses of the processes of a generation, in messages that do not grow with their number.

The launcher starts each process with the cluster of the run in TF_CONFIG. A message to each of n
processes with all addresses would be n * n addresses. So it has the numbers of the members as
ranges, and only the addresses that are not in that cluster: of spares and replacements.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypedDict

Runs: TypeAlias = Sequence[Sequence[int]]
"""First and last of each range of numbers in sequence."""


class Members(TypedDict):
    """The members of a generation, for a process that knows a part of the cluster.

    Attributes:
        numbers: Numbers of the members, in the order of their ranks.
        others: Number of each member that the process does not know -> its address.
    """

    numbers: Runs
    others: dict[str, str]


def to_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Returns numbers as ranges, in their order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def from_runs(runs: Runs) -> list[int]:
    """Returns the numbers in ranges."""
    return [number for first, last in runs for number in range(first, last + 1)]


def digest_of(cluster: Sequence[str]) -> str:
    """Returns a text that two processes have in common if they know the same cluster."""
    return hashlib.sha256(json.dumps(list(cluster)).encode()).hexdigest()[:16]


def encode(members: Iterable[tuple[int, str]], num_known: int) -> Members:
    """Returns (number, address) of each member, for a process that knows the first addresses."""
    members = list(members)
    others = {str(i): address for i, address in members if i >= num_known}
    return {"numbers": to_runs(i for i, _ in members), "others": others}


def decode(members: Members, known: Sequence[str]) -> list[str]:
    """Returns the address of each member, in the order of their ranks."""
    others = members["others"]
    return [others.get(str(i)) or known[i] for i in from_runs(members["numbers"])]


def read_tf_config(text: str) -> list[str]:
    """Returns the cluster that a launcher wrote to TF_CONFIG; empty if there is none."""
    try:
        workers = json.loads(text)["cluster"]["worker"]
        return [str(address) for address in workers]
    except (ValueError, KeyError, TypeError):  # the program has set another one, or none
        return []
