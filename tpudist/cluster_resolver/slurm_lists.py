"""Slurm's short forms of lists: nodes, and numbers of tasks per node."""

import re
from collections.abc import Iterator


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the nodes of Slurm's short form: n1, n2, m5 for `n[1-2],m5`.

    Raises:
        ValueError: If the text has another form.
    """
    hosts: list[str] = []
    # A part is a prefix with an optional list in brackets: `n[1-2,07]`. Commas inside brackets do
    # not separate parts, so the text cannot simply be split.
    part = r"([^,\[\]]*)(?:\[([^\]]+)\])?"
    if not re.fullmatch(rf"{part}(?:,{part})*", hostlist):
        raise ValueError(f"Invalid hostlist format {hostlist!r}. It looks like 'n[1-2,07],m5'.")
    for prefix, ranges in re.findall(rf"{part}(?:,|$)", hostlist):
        if prefix or ranges:
            hosts += [prefix + number for number in _numbers(hostlist, ranges)]
    return hosts


def _numbers(hostlist: str, ranges: str) -> Iterator[str]:
    """Yields 07, 08, 09, 12 for `07-09,12`; one empty text if there are no ranges."""
    if not ranges:
        yield ""
        return
    for numbers in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers)
        if match is None:
            raise ValueError(f"Invalid hostlist format {hostlist!r}: {numbers!r} is not a range.")
        first, last = match[1], match[2] or match[1]
        # Slurm keeps leading zeros: 07-10 is 07, 08, 09, 10, and those are the host names.
        yield from (str(i).zfill(len(first)) for i in range(int(first), int(last) + 1))


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the numbers of Slurm's short form: 3, 3, 2 for `3(x2),2`.

    Raises:
        ValueError: If the text has another form.
    """
    tasks: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(
                f"Invalid tasks-per-node list format {tasks_per_node!r}. It looks like '3(x2),2'."
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
