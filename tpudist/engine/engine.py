"""What an engine is: eight methods that run actors somewhere, and say when one has died.

An actor is an object that lives in a thread or process of its own and is called from elsewhere: a
worker, or a shard of what parameter servers hold. Who uses an engine decides what to do when one
dies; an engine repeats nothing.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol

from tpudist.engine.concurrency import Concurrency


@dataclasses.dataclass(frozen=True)
class Actor:
    """A handle of an actor, which may be given to other actors.

    Attributes:
        role: What it does, such as `worker` or `ps`.
        index: Which of that role.
        incarnation: How many there were of this role and index before it.
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
        was_made: Whether it has lived; else its factory has raised, as it would again.
    """

    def __init__(self, actor: Actor, why: str, was_made: bool = True):
        """Says why."""
        super().__init__(f"{actor} has died: {why}")
        self.actor, self.why, self.was_made = actor, why, was_made

    def __reduce__(self) -> tuple:
        """For engines that send it."""
        return ActorDied, (self.actor, self.why, self.was_made)


class ResultTimeout(TimeoutError):
    """A result did not arrive in time. The call continues."""


class ActorKilled(BaseException):
    """Raised in an actor that was killed, when it asks the engine for something.

    No `Exception`, so that the functions of users do not take it for one of theirs.
    """


class Future(Protocol):
    """What a call will give; see `Engine.result`."""

    @property
    def actor(self) -> Actor:
        """Who was called."""
        ...


class Ref(Protocol):
    """A value that was put where actors are, to be an argument of calls."""


class Serializer(Protocol):
    """Makes bytes of what is sent to actors, and that of bytes; only for those of one's own run."""

    def dumps(self, value: Any) -> bytes:
        """The bytes of a value; functions may be among it.

        Raises:
            TypeError: Something in it cannot be sent.
        """
        ...

    @property
    def modules_by_value(self) -> Collection[str]:
        """Modules whose functions are sent as they are, and not by their names."""
        ...

    @property
    def loads(self) -> Callable[[bytes], Any]:
        """What makes a value of bytes, and can be sent itself."""
        ...


class Engine(Protocol):
    """Runs actors.

    Attributes:
        concurrency: What who uses the engine has its own threads from.
        serializer: How values are sent; None where actors share them.
        actors_may_hang: Whether an actor may stop as a whole while this program goes on, as a
            process may, and a thread of this one may not.
    """

    concurrency: Concurrency
    serializer: Serializer | None
    actors_may_hang: bool

    def start(self) -> None:
        """Gets ready to spawn actors."""
        ...

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: Any) -> Actor:
        """Starts an actor: the object that `factory(*args)` makes where it lives.

        Returns at once. Should the factory raise, the actor has died, and says why.
        """
        ...

    def call(self, actor: Actor, method: str, *args: Any) -> Future:
        """Calls a method, at most once, after all that the same caller has called before.

        Never waits, and raises nothing if the actor has died: the result does. A `Ref` among the
        arguments stands for its value.
        """
        ...

    def result(self, future: Any, timeout_s: float | None = None) -> Any:
        """What a call has given; as often as it is asked for.

        Raises:
            ActorDied: Its actor died before it had a result.
            ResultTimeout: It takes longer.
            Exception: What the method has raised.
        """
        ...

    def ping(self, actor: Actor) -> Future:
        """Asks an actor whether it is there; it answers None, also in the midst of a call."""
        ...

    def put(self, value: Any) -> Ref:
        """Puts a value where actors are: once, for many calls."""
        ...

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Ends an actor, be it in the midst of a call, or again: nothing it does has effect."""
        ...

    def shutdown(self) -> None:
        """Ends all actors and leaves nothing behind; may be called again."""
        ...
