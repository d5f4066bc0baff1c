"""Growth of the control plane with the processes, from `simulation.growth`: counts, not times.

Up to 1,024 processes; `python scripts/simulate.py --growth` goes up to 4,096, in minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Figure
from simulation.growth import COUNTS, exponent
from simulation.operations import MEASURES

SUITE = "control plane, simulated"
_MOST = 1024
_QUANTITIES = {
    "messages_0": ("messages at process 0", 1.1),
    "bytes_0": ("bytes at process 0", 1.1),
    "messages": ("messages at another process", 0.25),
    "bytes": ("bytes at another process", 0.25),
}
# Its texts differ, and each process needs all of them.
_QUADRATIC = "exchange of 100 bytes"


def figures() -> Iterator[Figure]:
    """Messages and bytes of each operation for the largest number of processes, and exponents."""
    counts = [n for n in COUNTS if n <= _MOST]
    for subject, measure in MEASURES.items():
        costs = {n: measure(n, measures_cpu=False) for n in counts}
        for name, (quantity, most) in _QUANTITIES.items():
            values = {n: getattr(cost, name) for n, cost in costs.items()}
            yield Figure(SUITE, f"{subject}, {_MOST} processes", quantity, values[_MOST], None)
            growth = exponent(values)
            is_expected = subject == _QUADRATIC
            yield Figure(
                SUITE,
                f"{subject}, {counts[0]} to {_MOST} processes",
                f"exponent of {quantity}",
                growth,
                None,
                "" if is_expected else f"at most {most}",
                None if is_expected else growth <= most,
            )
