"""Network: a model of latency, bandwidth, slow links and splits between hosts.

Each host has one link, which sends and receives one byte after the other. Messages between two
hosts arrive in order, as TCP delivers them. While two hosts are split, TCP repeats its packets, so
messages arrive after the split has ended.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection

from simulation.scheduler import Scheduler

_LOCAL_S = 20e-6  # between two sockets of one host


@dataclasses.dataclass(frozen=True)
class Link:
    """Cost of the messages of a host.

    Attributes:
        latency_s: Seconds to another host, in one direction; each message takes 1 to 1.5 times as
            long.
        bytes_per_s: Bandwidth, in each direction.
    """

    latency_s: float = 100e-6
    bytes_per_s: float = 1.25e9


class Network:
    """Delivers messages between hosts, which are numbers.

    Attributes:
        num_messages: Messages that each host has sent and received, by host and purpose.
        num_bytes: The same in bytes.
    """

    def __init__(self, scheduler: Scheduler, link: Link):
        self._scheduler, self._link = scheduler, link
        self._slowness: dict[int, float] = {}
        self._parts: list[frozenset[int]] = []
        self._held: list[tuple[int, int, str, int, Callable[[], None]]] = []
        self._free_to_send_s: dict[int, float] = collections.defaultdict(float)
        self._free_to_receive_s: dict[int, float] = collections.defaultdict(float)
        self._arrived_s: dict[tuple[int, int], float] = {}
        self.num_messages: collections.Counter[tuple[int, str]] = collections.Counter()
        self.num_bytes: collections.Counter[tuple[int, str]] = collections.Counter()

    def send(
        self, source: int, target: int, purpose: str, num_bytes: int, deliver: Callable[[], None]
    ) -> None:
        """Calls `deliver` when a message has arrived."""
        if self.is_split(source, target):
            self._held.append((source, target, purpose, num_bytes, deliver))
            return
        now_s = self._scheduler.now_s
        if source == target:
            arrival_s = now_s + _LOCAL_S
        else:
            slowness = max(self._slowness.get(source, 1.0), self._slowness.get(target, 1.0))
            wire_s = num_bytes * slowness / self._link.bytes_per_s
            sent_s = max(now_s, self._free_to_send_s[source]) + wire_s
            self._free_to_send_s[source] = sent_s
            jitter = 1 + self._scheduler.random.random() / 2
            first_byte_s = sent_s - wire_s + self._link.latency_s * slowness * jitter
            arrival_s = max(first_byte_s, self._free_to_receive_s[target]) + wire_s
            self._free_to_receive_s[target] = arrival_s
            for host in (source, target):
                self.num_messages[host, purpose] += 1
                self.num_bytes[host, purpose] += num_bytes
        # Two messages of the same moment would arrive in any order.
        arrival_s = max(arrival_s, self._arrived_s.get((source, target), 0.0) + 1e-9)
        self._arrived_s[source, target] = arrival_s
        self._scheduler.at(arrival_s, deliver)

    def is_split(self, a: int, b: int) -> bool:
        """Whether nothing reaches one of two hosts from the other."""
        return any((a in part) != (b in part) for part in self._parts)

    def split(self, hosts: Collection[int]) -> frozenset[int]:
        """Splits some hosts from all others; returns the part, for `heal`."""
        self._parts.append(frozenset(hosts))
        return self._parts[-1]

    def heal(self, part: frozenset[int]) -> None:
        """Ends a split."""
        self._parts.remove(part)
        held, self._held = self._held, []
        for message in held:
            self.send(*message)

    def slow_down(self, host: int, slowness: float) -> None:
        """Multiplies the latency of a host, and divides its bandwidth; 1 restores them."""
        self._slowness[host] = slowness

    def has_split(self) -> bool:
        """Whether any hosts are split."""
        return bool(self._parts)
