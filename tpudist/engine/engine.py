"""Engine: runs actors in threads or processes, and reports deaths.

An actor is an object with a thread or process of its own that others call: a worker, or a shard of
the parameter servers. An engine repeats no call and replaces no actor: its user decides that.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol

from tpudist.engine.concurrency import Concurrency


@dataclasses.dataclass(frozen=True)
class Actor:
    """A reference to an actor, which may be sent to other actors.

    Attributes:
        role: Role of the actor, such as `worker` or `ps`.
        index: Number of the actor in its role.
        incarnation: Number of earlier actors with this role and index.
    """

    role: str
    index: int
    incarnation: int

    def __str__(self) -> str:
        again = f" (incarnation {self.incarnation})" if self.incarnation else ""
        return f"{self.role} {self.index}{again}"


class ActorDied(RuntimeError):
    """An actor died, so its calls have no results.

    Attributes:
        actor: The actor.
        why: Description of the cause.
        was_created: Whether the actor was created. If not, its factory raised an error, as it would
            again.
    """

    def __init__(self, actor: Actor, why: str, was_created: bool = True):
        super().__init__(f"{actor} has died: {why}")
        self.actor, self.why, self.was_created = actor, why, was_created

    def __reduce__(self) -> tuple[object, ...]:  # an exception is pickled by its message otherwise
        return ActorDied, (self.actor, self.why, self.was_created)


class ResultTimeout(TimeoutError):
    """A result did not arrive in time. The call continues."""


class ActorKilled(BaseException):
    """Raised in a killed actor when it calls the engine.

    It is not an `Exception`, so that users' functions do not catch it as one of their own errors.
    """


class Future(Protocol):
    """The future result of a call; see `Engine.result`."""

    @property
    def actor(self) -> Actor:
        """The called actor."""
        ...


class Ref(Protocol):
    """A value that was sent to where actors are, as an argument of later calls."""


class Serializer(Protocol):
    """Serializes messages to actors. It trusts its peers: use it within one run only."""

    def dumps(self, value: object) -> bytes:
        """Returns the bytes of a value, which may contain functions.

        Raises:
            TypeError: If a part of the value cannot be sent.
        """
        ...

    @property
    def modules_by_value(self) -> Collection[str]:
        """Modules whose functions are serialized completely, and not by name."""
        ...

    @property
    def loads(self) -> Callable[[bytes], Any]:
        """Function that returns the value of bytes, and can be sent itself."""
        ...


class Engine(Protocol):
    """Runs actors.

    Every engine keeps this contract (`tests/engine/test_engine_contract.py`):

    - The calls of one caller to one actor run in order.
    - A call runs at most once.
    - After the death of an actor, each outstanding result raises `ActorDied`.
    - `kill` and `shutdown` may be repeated, also `kill` after `shutdown`.

    Attributes:
        concurrency: Provides threads and time for the users of the engine.
        serializer: Serializes values; None if actors share them with the program.
        actors_may_hang: Whether an actor may stop while this program continues, as a process may
            and a thread may not.
    """

    concurrency: Concurrency
    serializer: Serializer | None
    actors_may_hang: bool

    def start(self) -> None:
        """Prepares to spawn actors."""
        ...

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: object) -> Actor:
        """Starts an actor: the object that `factory(*args)` returns in its thread or process.

        Returns at once. If the factory raises an error, the actor has died, with that cause.
        """
        ...

    def call(self, actor: Actor, method: str, *args: object) -> Future:
        """Calls a method, at most once, after all earlier calls of the same caller.

        Never waits. If the actor has died, `result` raises the error. A `Ref` among the arguments
        is replaced by its value.
        """
        ...

    def result(self, future: Any, timeout_s: float | None = None) -> Any:
        """Waits for the result of a call. It may be requested several times.

        Raises:
            ActorDied: If the actor died before it had a result.
            ResultTimeout: If the call takes longer than `timeout_s`.
            Exception: If the method raised it.
        """
        ...

    def ping(self, actor: Actor) -> Future:
        """Asks an actor whether it is alive; it answers None, even during a call."""
        ...

    def put(self, value: object) -> Ref:
        """Sends a value to where actors are: once, for many calls."""
        ...

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Ends an actor, even during a call. What it does afterwards has no effect on others."""
        ...

    def shutdown(self) -> None:
        """Ends all actors and leaves nothing behind; may be called again."""
        ...
