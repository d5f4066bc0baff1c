"""SupervisedProcess: leads a process through the generations of its run, by order of a supervisor.

`supervisor/generation_control.py` lists the messages. Four kinds of threads take part:

- The main thread (`run`) handles events one by one. It never blocks in JAX.
- A listening thread turns messages of the supervisor into events.
- One thread per generation runs the program. If it waits for a lost process in C++, it is left
  behind, and is never joined.
- One thread per generation connects to its coordination service, which may wait for a process that
  dies meanwhile. Then a newer order arrives, and the result of this thread is ignored.

So no death costs a timeout: whatever waits is in a thread that a newer generation overtakes.
"""

import contextlib
import dataclasses
import json
import logging
import queue
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tpudist.goodput import goodput
from tpudist.preemption.survival import restart_in_place, state_transfer
from tpudist.preemption.survival.held_error import HeldError
from tpudist.preemption.survival.program_generation import ProgramGeneration
from tpudist.preemption.survival.survivor import Copies, StateCopy, Survivor
from tpudist.processes import (
    cluster_addresses,
    generations,
    json_lines,
    process_state,
    supervisor_variables,
)
from tpudist.processes.exit_codes import EXIT_PEER_LOST, EXIT_PREEMPTED
from tpudist.processes.generations import GenerationEnded
from tpudist.processes.host import Queue, Thread, this_host
from tpudist.processes.json_lines import JsonConnection, Listener
from tpudist.processes.process_exit import exit_now, print_error
from tpudist.xla.settings import Setting

_log = logging.getLogger("tpudist")

CONNECT_S = 60.0
_HOLD_JOIN_S = 5.0  # for an error of a process that joins; see `held_error`
# For the program to reach a line of Python, which ends it. Otherwise its thread is left behind.
# Usually that thread waits for the lost process, so most losses of a process cost this time.
_UNWIND_S = 0.1
_COPY_S = 0.2  # for copies of the state that are on their way to the host

Message: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Joined:
    """The thread that connects to a generation is done; `belong` makes this process a member."""

    order: Message
    belong: Callable[[], None]
    state: StateCopy | None


@dataclasses.dataclass(frozen=True)
class _ProgramEnded:
    """The program has returned, or raised an error."""

    generation: ProgramGeneration
    result: Any = None
    commit: int = 0
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class _Received:
    """A message of the supervisor."""

    message: Message


@dataclasses.dataclass(frozen=True)
class _Outgoing:
    """A message for the supervisor, which the main thread sends.

    The program's thread never sends itself, because `generations.raise_in` may end it within a
    line. The watch, whose thread nobody ends, sends lost processes itself.
    """

    message: Message


class _TerminationRequested:
    """SIGTERM arrived."""


class _SupervisorLost:
    """The connection to the supervisor ended."""


class SupervisedProcess:
    """This process, from the first message of the supervisor to the last.

    Args:
        train: Called with a `Survivor` in each generation.
        commits_per_copy: Number of commits per copy of the state.
        allowed: Numbers of processes with which the program can run; None for any number.
        in_process: Whether JAX restarts in this process; None for the default of the platform.
        supervisor: Address of the supervisor: host, port, secret, and number of this process.
    """

    def __init__(
        self,
        train: Callable[[Survivor], Any],
        commits_per_copy: int,
        allowed: list[int] | None,
        in_process: bool | None,
        supervisor: str,
    ):
        self._train, self._in_process = train, in_process
        self._commits_per_copy = commits_per_copy
        self._allowed = allowed
        host, port, self._secret, self._index = supervisor.split()
        self._events: Queue = this_host().queue()
        # As the launcher has set it. A restart in this process begins with it again.
        self._tf_config = this_host().environ.get("TF_CONFIG")
        self._cluster = cluster_addresses.read_tf_config(self._tf_config or "")
        previous = restart_in_place.take_previous()
        self._is_restarted = previous is not None
        self._connection: JsonConnection = (
            previous.connection
            if previous
            else json_lines.connect(host, int(port), self._secret, CONNECT_S)
        )
        self._server = Listener(self._connection.local_host(), self._secret, self._serve_state)
        self._generation: ProgramGeneration | None = None
        self._state: StateCopy | None = previous.state if previous else None
        # Generation and state that other processes may fetch. Fixed when a generation begins, so
        # that all members get the same state.
        self._offer: tuple[int, StateCopy | None] = (-1, None)
        self._result, self._has_result = None, False  # a result may be None
        self._ordered_generation = -1  # the newest one
        self._held: HeldError | None = None

    def run(self) -> Any:
        """Runs the program through all generations; returns its result.

        Raises:
            SystemExit: If this process is not needed any more, or received a request to end.
        """
        _use_compile_cache()
        before = this_host().set_signal_handler(
            signal.SIGTERM, lambda *_: self._events.put(_TerminationRequested())
        )
        self._send(
            hello=int(self._index),
            again=self._is_restarted,
            place=process_state.here(),
            host=self._connection.local_host(),
            port=self._server.port,
            allowed=self._allowed,
            cluster=cluster_addresses.digest_of(self._cluster),
        )
        this_host().start_thread(self._listen, name="tpudist supervisor")
        try:
            while True:
                match self._next_event():
                    case _Received({"done": _}):
                        if not self._has_result:
                            raise SystemExit(0)  # a spare that was not needed
                        return self._result
                    case _Received({"no_loss": _}):
                        if self._held is not None:
                            self._held.waits_for_answer = False
                    case _Received(message):
                        self._obey(message)
                    case _Joined() as joined:
                        self._begin(joined)
                    case _ProgramEnded() as ended:
                        self._on_program_ended(ended)
                    case _Outgoing(message):
                        self._send(**message)
                    case _TerminationRequested():
                        self._send(leaving=True)
                    case _SupervisorLost():
                        if self._held is not None:  # says more than the loss
                            raise self._held.error
                        self._end_alone()
        finally:
            this_host().set_signal_handler(signal.SIGTERM, before)
            # Nobody fetches a state now: "done" means that all processes have finished, and a
            # process that ends for another reason is lost to the others anyway.
            self._server.close()

    def _next_event(self) -> object:
        """Waits for an event; raises the error of the program if its time has come."""
        held = self._held
        if held is None or held.waits_for_answer:
            return self._events.get()
        if held.left_s > 0:
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=held.left_s)
        if held.must_ask:
            held.must_ask, held.waits_for_answer = False, True
            self._send(asks=True)
            return self._events.get()
        if not isinstance(held.error, SystemExit):
            self._send(raised=f"{type(held.error).__name__}: {held.error}"[:500])
        raise held.error

    # The supervisor.

    def _send(self, **message: Any) -> None:
        try:
            self._connection.send(**message)
        except OSError:  # `_listen` notices the end
            pass

    def _listen(self) -> None:
        if self._is_restarted:
            with contextlib.suppress(OSError):  # if it has ended, the loop below ends at once
                self._connection.skip_to("welcome")
        for message in self._connection:
            generation = self._generation
            # These are for the thread of the program. The main thread may be busy for some time.
            if "pause" in message or "stop_at" in message:
                if generation is not None and generation.number == message["generation"]:
                    if "pause" in message:
                        generation.pause()
                    else:
                        generation.stop_at(message["stop_at"], message["ends_all"])
            else:
                self._events.put(_Received(message))
        self._events.put(_SupervisorLost())

    def _end_alone(self) -> None:
        print_error(
            "tpudist: the supervisor of this run ended or is unreachable, so this process ends. "
            "Restart all processes from the last checkpoint."
        )
        exit_now(EXIT_PEER_LOST)

    def _obey(self, order: Message) -> None:
        if "leave" in order:
            self._end_generation("it received a request to end")
            raise SystemExit(EXIT_PREEMPTED)
        if "stop" in order:
            self._ordered_generation = order["stop"]
            if self._generation is not None and not self._may_restart_jax(self._generation):
                self._end_program(self._generation, order["why"])
                if self._tf_config is not None:
                    this_host().environ["TF_CONFIG"] = self._tf_config
                restart_in_place.restart(self._connection, self._state)
            self._end_generation(order["why"])
            self._offer = self._ordered_generation, self._state
            commit = self._state.commit if self._state else -1  # the supervisor's "none"
            self._send(ready=self._ordered_generation, commit=commit)
        elif "go" in order and order["go"] == self._ordered_generation:
            joining = this_host().thread(self._join, order, name="tpudist joining")
            generations.forget(joining)  # it may never return
            joining.start()

    # From one generation to the next.

    def _may_restart_jax(self, generation: ProgramGeneration) -> bool:
        """Whether JAX restarts in this process; otherwise the whole program restarts."""
        if self._in_process is not None:
            return self._in_process
        platform = generation.platform or Setting.PLATFORMS.read()
        return platform == "cpu" or bool(restart_in_place.why_not_supported())

    def _end_generation(self, why: str) -> None:
        generation, self._generation = self._generation, None
        self._result, self._has_result, self._held = None, False, None
        if generation is not None:
            generations.leave(self._end_program(generation, why))

    def _end_program(self, generation: ProgramGeneration, why: str) -> list[Thread]:
        """Stores the program's newest state; returns the threads that are left behind."""
        began = time.time()
        generation.end()
        thread = generation.thread
        assert thread is not None
        if thread.is_alive():
            if not generation.has_unwound:
                generations.raise_in(thread, GenerationEnded)
            thread.join(_UNWIND_S)
        self._state = generation.copies.end(_COPY_S)
        left_behind = [x for x in (thread, generation.copies.thread) if x.is_alive()]
        goodput.note(
            "generation",
            number=generation.number,
            began=began,
            why=why,
            left_behind=bool(left_behind),
        )
        return left_behind

    def _join(self, order: Message) -> None:
        """Fetches the state and connects to the new generation, in a thread of its own."""
        try:
            state = self._state
            donor = order["donor"]
            if donor is not None and (state is None or state.commit != donor["commit"]):
                state = state_transfer.fetch(
                    donor["host"], donor["port"], self._secret, order["go"]
                )
            belong = generations.connect(order["service"], order["count"], order["rank"])
        except Exception as error:  # of the network, or of jaxlib, whose type varies
            # As for an error of the program: if a member was lost meanwhile, a newer order arrives,
            # and this failure does not matter.
            this_host().sleep(_HOLD_JOIN_S)
            if self._ordered_generation == order["go"]:
                _log.warning("This process cannot join the others: %s", error)
                self._send(failed=order["go"], why=str(error)[:500])
            return
        self._events.put(_Joined(order, belong, state))

    def _begin(self, joined: _Joined) -> None:
        """Becomes a member of a generation, and starts the program."""
        order, number = joined.order, joined.order["go"]
        if number != self._ordered_generation:
            return
        joined.belong()
        task = {"type": "worker", "index": order["rank"]}
        workers = cluster_addresses.decode(order["members"], self._cluster)
        this_host().environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": task}
        )
        self._state = joined.state
        commit = joined.state.commit if joined.state else 0  # the number of steps that are done
        generation = ProgramGeneration(
            number,
            commit,
            lambda message: self._events.put(_Outgoing(message)),
            Copies(joined.state),
        )
        survivor = Survivor(number, generation.copies, self._commits_per_copy, generation)
        generation.thread = this_host().thread(
            self._run_thread, generation, survivor, name=f"tpudist program {number}"
        )
        self._generation = generation
        self._send(began=number)

        def report_lost(process: int, why: str) -> None:
            self._send(lost=process, generation=number, why=why)

        generations.run_program(generation.thread, report_lost)

    # The program.

    def _run_thread(self, generation: ProgramGeneration, survivor: Survivor) -> None:
        # `GenerationEnded` is raised from another thread, and may arrive at any line, even after
        # the program has returned.
        with contextlib.suppress(GenerationEnded):
            self._run_program(generation, survivor)

    def _run_program(self, generation: ProgramGeneration, survivor: Survivor) -> None:
        try:
            goodput.follow_thread()
            result = self._train(survivor)
            ended = _ProgramEnded(generation, result, survivor.num_commits)
        except GenerationEnded:
            generation.has_unwound = True
            self._events.put(_Outgoing({"stopped": generation.number}))
            return
        except BaseException as error:  # the main thread raises it
            ended = _ProgramEnded(generation, error=error)
        self._events.put(ended)

    def _on_program_ended(self, ended: _ProgramEnded) -> None:
        if ended.generation is not self._generation:
            return
        if ended.error is None:
            self._result, self._has_result = ended.result, True
            self._send(finished=ended.generation.number, commit=ended.commit)
            return
        self._held = HeldError(ended.error)

    def _serve_state(self, connection: JsonConnection) -> None:
        """Sends the state to another member of the same generation."""
        request = connection.read()
        number, state = self._offer
        if request is not None and request.get("generation") == number and state is not None:
            try:
                state_transfer.send(connection, state)
            except OSError:  # the other process has gone
                pass
        connection.close()


def _use_compile_cache() -> None:
    """Shares compiled programs between generations with equally many processes."""
    folder = this_host().environ.get(supervisor_variables.COMPILE_CACHE_VARIABLE)
    if folder and not Setting.COMPILATION_CACHE_DIR.read():
        Setting.COMPILATION_CACHE_DIR.set(folder)
        Setting.MIN_CACHED_COMPILE_TIME.set(0)
