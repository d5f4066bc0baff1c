"""A program that goes on when processes of its run are lost, and when others come.

The supervisor (`tpudist launch`) says which processes there are. When they change, the thread that
runs the program is left where it is, JAX starts anew in the same process, and the program is called
again in another thread, with the newest state that a process has in memory. Where JAX is not known
to start anew, the whole program does, in the place of the old one.
"""

import contextlib
import dataclasses
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax

from tpudist.goodput import goodput
from tpudist.preemption.survival import restart_in_place, state_transfer
from tpudist.preemption.survival.survivor import Copies, Link, StateCopy, Survivor
from tpudist.processes import generations, json_lines, process_state
from tpudist.processes.exit_codes import EXIT_PEER_LOST, EXIT_PREEMPTED
from tpudist.processes.generations import GenerationEnded
from tpudist.processes.json_lines import JsonLines, Listener
from tpudist.xla import emulation
from tpudist.xla.settings import Setting

T = TypeVar("T")
_log = logging.getLogger("tpudist")

CONNECT_S = 60.0
_HOLD_S = {True: 5.0, False: 1.0}  # before an error is told of: a lost process may be its cause
_UNWIND_S = 0.3
_COPY_S = 0.2


def survive(
    train: Callable[[Survivor], T],
    *,
    every: int = 1,
    processes: Collection[int] | None = None,
    in_process: bool | None = None,
) -> T:
    """Calls `train`, and calls it again with other processes when a process fails or joins.

        def train(survivor):
            strategy = tpudist.MultiWorkerMirroredStrategy(deterministic=8)
            state = make_state(strategy)  # a tpudist.TrainState
            survivor.restore(state)
            for batch in state.batches:
                strategy.run(step, (state.model, state.optimizer, batch))
                state.step += 1
                survivor.commit(state)

        tpudist.experimental.survive(train)

    Under `tpudist launch`, the remaining processes continue without a restart, from the newest
    state that one of them has in memory. Everywhere else, `train` is called once.

    Create all objects that use devices (strategies, Variables, models, arrays, distributed
    datasets) in `train`, because each call starts from scratch. `train` runs in its own thread. If
    the thread waits for a lost process, it is abandoned, and its work is discarded.

    Args:
        train: Called with a `Survivor`, to which it reports its state.
        every: Number of commits per copy of the state in host memory. At most this many steps are
            repeated.
        processes: Numbers of processes with which the program can continue, such as (1, 2, 4); by
            default any number. Extra processes wait.
        in_process: Whether JAX restarts in the same process when other processes fail. With False,
            the complete program restarts instead, from its first line, with the state that it had
            in memory: for devices that are released only when a program ends. The default is True
            on CPUs, where it was tested, and False elsewhere.

    Returns:
        The result of `train`, once it has returned in all processes.

    Raises:
        RuntimeError: If JAX has already started its devices.
        ValueError: If `every` or `processes` contains a number below 1, or if this system does not
            support `in_process=False`.
        SystemExit: With code 143 if this process received a request to end (SIGTERM); with code 0
            if it was not needed at the end of the run.
    """
    allowed = None if processes is None else sorted(set(processes))
    if every < 1 or allowed is not None and (not allowed or allowed[0] < 1):
        raise ValueError(
            f"survive(every={every!r}, processes={processes!r}): every and processes must be "
            f"whole numbers of at least 1."
        )
    if in_process is False and (why := restart_in_place.why_not()):
        raise ValueError(f"survive(in_process=False) is not supported: {why}. Omit in_process.")
    supervisor = os.environ.get(generations.SUPERVISOR)
    if supervisor is None:
        return train(Survivor(0, Copies(None), every, Link()))
    if emulation.has_backend():
        raise RuntimeError(
            "survive() was called after JAX started the devices of this process, which would not "
            "be the devices of the run. Create arrays and strategies only inside the function "
            "that survive() calls."
        )
    return _Process(train, every, allowed, in_process, supervisor).run()


class _Generation(Link):
    """One set of processes, as this one sees it."""

    def __init__(self, number: int, commit: int, put: Callable[[Any], None]):
        self.number = number
        self._commit = commit  # the newest that may not be the last one
        self.is_over = False
        self.ends_all = False
        self.has_unwound = False
        self.thread: threading.Thread | None = None
        self.copies: Copies | None = None
        self.error: BaseException | None = None
        self._put = put
        self._pausing = False
        self._last: int | None = None
        self._changed = threading.Condition()

    def is_last(self, commit: int) -> bool:
        with self._changed:
            # What is waited for is known without a step of any process: see `pause`.
            while self._last is None and self._pausing and not self.is_over:
                self._changed.wait(0.2)  # so that this thread can be ended
            self._commit = commit
            return self._last is not None and commit >= self._last

    def pause(self) -> None:
        """Says at which commit this process is; the next one waits for which is to be the last.

        At once, since the process may be in a step that others only come to when they have gone on:
        if each said so at its next commit, one that has come there would let the others wait in the
        step after it.
        """
        with self._changed:
            self._pausing = True
            self._put(_Outgoing({"paused": self.number, "commit": self._commit}))

    def stop_at(self, commit: int, ends_all: bool) -> None:
        """Which commit is the last one."""
        with self._changed:
            self._last, self.ends_all = commit, ends_all
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


@dataclasses.dataclass
class _Joined:
    """What comes of the way into a generation."""

    number: int
    belong: Callable[[], None]
    state: StateCopy | None
    order: Mapping[str, Any]


@dataclasses.dataclass
class _ProgramEnded:
    generation: _Generation
    result: Any = None
    commit: int = 0
    error: BaseException | None = None


@dataclasses.dataclass
class _Outgoing:
    """What the main thread is to send: the program's may be interrupted in the midst of it."""

    message: Mapping[str, Any]


class _Signal:
    """SIGTERM has come."""


class _LineEnded:
    """The supervisor has gone."""


class _Process:
    """This process, from the supervisor's first word to its last."""

    def __init__(
        self,
        train: Callable[[Survivor], Any],
        every: int,
        allowed: list[int] | None,
        in_process: bool | None,
        supervisor: str,
    ):
        self._train, self._every, self._in_process = train, every, in_process
        host, port, self._secret, self._index = supervisor.split()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        kept = restart_in_place.take()
        self._is_again = kept is not None
        self._line: JsonLines = (
            kept.line if kept else json_lines.connect(host, int(port), self._secret, CONNECT_S)
        )
        self._server = Listener(self._line.local_host(), self._secret, self._give_state)
        self._generation: _Generation | None = None
        self._state: StateCopy | None = kept.state if kept else None
        self._given: tuple[int, StateCopy | None] = (-1, None)
        self._result, self._has_result = None, False
        self._order = -1  # the newest generation that was asked for
        self._allowed = allowed

    def run(self) -> Any:
        _use_compile_cache()
        generations.supervise(lambda process, why: self._send(lost=process, why=why))
        before = signal.signal(signal.SIGTERM, lambda *_: self._events.put(_Signal()))
        self._send(
            hello=int(self._index),
            again=self._is_again,
            place=process_state.here(),
            host=self._line.local_host(),
            port=self._server.port,
            allowed=self._allowed,
        )
        threading.Thread(target=self._listen, name="tpudist supervisor", daemon=True).start()
        try:
            while True:
                event = self._events.get()
                if isinstance(event, dict):
                    if "done" in event:
                        if not self._has_result:
                            raise SystemExit(0)  # a spare that was not needed at the end
                        return self._result
                    self._obey(event)
                elif isinstance(event, _Joined):
                    self._begin(event)
                elif isinstance(event, _ProgramEnded):
                    self._on_program_ended(event)
                elif isinstance(event, _Outgoing):
                    self._send(**event.message)
                elif isinstance(event, _Signal):
                    self._send(leaving=True)
                else:
                    self._leave_alone()
        finally:
            signal.signal(signal.SIGTERM, before)
            self._server.close()

    # The supervisor.

    def _send(self, **message: Any) -> None:
        try:
            self._line.send(**message)
        except OSError:  # `_listen` finds out
            pass

    def _listen(self) -> None:
        if self._is_again:
            with contextlib.suppress(OSError):  # else it has ended, which is found out below
                self._line.skip_to("welcome")
        for message in self._line:
            if "pause" in message or "stop_at" in message:  # for the thread of the program
                generation = self._generation
                if generation is not None and generation.number == message["generation"]:
                    if "pause" in message:
                        generation.pause()
                    else:
                        generation.stop_at(message["stop_at"], message["ends_all"])
            else:
                self._events.put(message)
        self._events.put(_LineEnded())

    def _leave_alone(self) -> None:
        print(
            "tpudist: the supervisor of this run ended or is unreachable, so this process ends. "
            "Restart all processes from the last checkpoint.",
            flush=True,
        )
        goodput.flush()
        os._exit(EXIT_PEER_LOST)

    def _obey(self, order: Mapping[str, Any]) -> None:
        if "leave" in order:
            self._end_generation("it received a request to end")  # nobody waits for the others then
            raise SystemExit(EXIT_PREEMPTED)
        if "stop" in order:
            self._order = order["stop"]
            if self._generation is not None and not self._may_go_on(self._generation):
                self._end_program(self._generation, order["why"])
                restart_in_place.restart(self._line, self._state)
            self._end_generation(order["why"])
            self._given = self._order, self._state
            commit = self._state.commit if self._state else -1
            self._send(ready=self._order, commit=commit)
        elif "go" in order and order["go"] == self._order:
            joining = threading.Thread(target=self._join, args=(order,), daemon=True)
            generations.forget(joining)
            joining.start()

    # The way from one generation to the next.

    def _may_go_on(self, generation: _Generation) -> bool:
        """Whether JAX is to start anew in this process; else the whole program is."""
        if self._in_process is not None:
            return self._in_process
        platform = generation.platform or Setting.PLATFORMS.read()
        return platform == "cpu" or bool(restart_in_place.why_not())

    def _end_generation(self, why: str) -> None:
        generation, self._generation = self._generation, None
        self._result, self._has_result = None, False
        if generation is not None:
            generations.leave(self._end_program(generation, why))

    def _end_program(self, generation: _Generation, why: str) -> list[threading.Thread]:
        """Keeps its newest state; the threads that could not be ended."""
        began = time.time()
        generation.end()
        thread = generation.thread
        assert thread is not None
        if thread.is_alive():
            if not generation.has_unwound:
                generations.raise_in(thread, GenerationEnded)
            thread.join(_UNWIND_S)
        assert generation.copies is not None
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

    def _join(self, order: Mapping[str, Any]) -> None:
        """In a thread, since it may wait for one that dies now; then there is a newer order."""
        try:
            state = self._state
            donor = order["donor"]
            if donor is not None and (state is None or state.commit != donor["commit"]):
                state = state_transfer.fetch(
                    donor["host"], donor["port"], self._secret, order["go"]
                )
            belong = generations.connect(order["service"], order["count"], order["rank"])
        except Exception as error:  # the type varies
            time.sleep(_HOLD_S[True])
            if self._order == order["go"]:
                _log.warning("This process cannot join the others: %s", error)
                self._send(failed=order["go"], why=str(error)[:500])
            return
        self._events.put(_Joined(order["go"], belong, state, order))

    def _begin(self, joined: _Joined) -> None:
        if joined.number != self._order:
            return
        joined.belong()
        order = joined.order
        task = {"cluster": {"worker": order["cluster"]}}
        task["task"] = {"type": "worker", "index": order["rank"]}
        os.environ["TF_CONFIG"] = json.dumps(task)
        self._state = joined.state
        commit = joined.state.commit if joined.state else 0
        generation = _Generation(joined.number, commit, self._events.put)
        generation.copies = Copies(joined.state)
        survivor = Survivor(joined.number, generation.copies, self._every, generation)
        generation.thread = threading.Thread(
            target=self._run_thread,
            args=(generation, survivor),
            name=f"tpudist program {joined.number}",
            daemon=True,
        )
        self._generation = generation
        self._send(began=joined.number)
        generations.run_program(generation.thread)

    def _run_thread(self, generation: _Generation, survivor: Survivor) -> None:
        with contextlib.suppress(GenerationEnded):  # raised while it has ended by itself
            self._run_program(generation, survivor)

    def _run_program(self, generation: _Generation, survivor: Survivor) -> None:
        ended = _ProgramEnded(generation)
        try:
            goodput.follow_thread()
            ended.result = self._train(survivor)
            ended.commit = survivor.num_commits
        except GenerationEnded:
            generation.has_unwound = True
            self._events.put(_Outgoing({"stopped": generation.number}))
            return
        except BaseException as error:  # the main thread raises it
            ended.error = error
        self._events.put(ended)

    def _on_program_ended(self, ended: _ProgramEnded) -> None:
        if ended.generation is not self._generation:
            return
        if ended.error is None:
            self._result, self._has_result = ended.result, True
            self._send(finished=ended.generation.number, commit=ended.commit)
            return
        hold_s = _HOLD_S[_may_be_of_another(ended.error)]
        deadline = time.monotonic() + hold_s
        waiting = []
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left_s)
            except queue.Empty:
                break
            if isinstance(event, dict) and "stop" in event:  # it was of a process that was lost
                self._obey(event)
                break
            waiting.append(event)
        for event in waiting:
            self._events.put(event)
        if self._generation is ended.generation:
            raise ended.error

    def _give_state(self, line: JsonLines) -> None:
        asked = line.read()
        number, state = self._given
        if asked is not None and asked.get("generation") == number and state is not None:
            try:
                state_transfer.send(line, state)
            except OSError:  # who asked has gone
                pass
        line.close()


def _may_be_of_another(error: BaseException | None) -> bool:
    """Whether an error may come of a collective, and so of another process."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _use_compile_cache() -> None:
    """What one generation has compiled, another one with as many processes finds."""
    folder = os.environ.get(generations.COMPILE_CACHE)
    if folder and not Setting.COMPILATION_CACHE_DIR.read():
        Setting.COMPILATION_CACHE_DIR.set(folder)
        Setting.MIN_CACHED_COMPILE_TIME.set(0)
