"""A Python process that answers requests: started once, reused, and never left behind.

A request and an answer are a JSON object and some bytes, over the process's own pipes. What the
process writes to its output, or is made to write by a library, is kept to be quoted when it dies.

The process ends with the one that started it: when that one ends, asks for something else
(`close`), or is killed (the child looks every second whose child it is). An interrupt from the
keyboard does not reach it; whoever waits for an answer is interrupted, and ends it.
"""

import json
import os
import pathlib
import selectors
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

# Lengths of the JSON object and of the bytes, which follow.
_FRAME = struct.Struct("<QQ")
_TICK_S = 0.5
_PARENT = "TPUDIST_PARENT_PROCESS"

Answer = tuple[dict[str, Any], bytes]


class Died(RuntimeError):
    """The process ended before it answered; `wrote` is what it wrote last."""

    def __init__(self, ending: str, wrote: str):
        """`ending` says how it ended, such as "signal SIGABRT"."""
        super().__init__(f"{ending}: {wrote}")
        self.ending = ending
        self.wrote = wrote


class NotSent(Died):
    """The process had ended before it was asked: the same request may be sent to another one."""


class Child:
    """A running Python process: the module `name`, which calls `serve`.

    Attributes:
        environment: The variables that it was started with.
    """

    def __init__(self, name: str, environment: Mapping[str, str]):
        """Starts it; `environment` is added to that of this process."""
        own = {"PYTHONPATH": os.pathsep.join(_paths()), _PARENT: str(os.getpid())}
        self.environment = {**os.environ, **environment, **own}
        # A file and not a pipe: nobody has to read it for the process to go on.
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            # -P: what lies in the current folder, such as a jax.py, is not meant.
            [sys.executable, "-P", "-m", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=self.environment,
            process_group=0,  # Ctrl-C is for whoever waits, not for this one
        )
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(
        self,
        request: Mapping[str, Any],
        payload: bytes = b"",
        *,
        timeout_s: float | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> Answer:
        """Its answer to a request.

        Args:
            request: What can be written as JSON.
            payload: Bytes that go with it.
            timeout_s: How long to wait for the answer.
            tick: Called about twice a second with the seconds that have passed.

        Raises:
            NotSent: It had ended before.
            Died: It ended instead of answering.
            TimeoutError: It did not answer in time. It is ended, as after any other exception
                while it is waited for: its next answer would be the one to this request.
        """
        try:
            self._send(request, payload)
            started = time.monotonic()
            return self._receive(started, timeout_s, tick)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends it at once."""
        if self._owner == os.getpid():  # a fork holds copies, of which it must only let go
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._output):
            try:
                pipe.close()  # type: ignore[union-attr]
            except OSError:  # flushing what the process no longer reads
                pass

    def _send(self, request: Mapping[str, Any], payload: bytes) -> None:
        assert self._process.stdin is not None
        head = json.dumps(request).encode()
        try:
            self._process.stdin.write(_FRAME.pack(len(head), len(payload)))
            self._process.stdin.write(head)
            self._process.stdin.write(payload)
            self._process.stdin.flush()
        except OSError:
            self._process.wait()
            raise NotSent(self._exit_reason(), self._last_output()) from None

    def _receive(
        self, started: float, timeout_s: float | None, tick: Callable[[float], None] | None
    ) -> Answer:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        waiting = selectors.PollSelector()  # of any number, where select ends at 1024
        waiting.register(pipe, selectors.EVENT_READ)

        def read(num_bytes: int) -> bytes:
            parts, missing = [], num_bytes
            while missing:
                waited = time.monotonic() - started
                left = _TICK_S if timeout_s is None else min(_TICK_S, timeout_s - waited)
                if left <= 0:
                    raise TimeoutError(f"no answer in {timeout_s:g} s")
                if tick:
                    tick(waited)
                if not waiting.select(left):
                    continue
                part = os.read(pipe, min(missing, 1 << 20))
                if not part:
                    # Status 0: it had been idle for too long when it was asked.
                    kind = Died if self._process.wait() else NotSent
                    raise kind(self._exit_reason(), self._last_output())
                parts.append(part)
                missing -= len(part)
            return b"".join(parts)

        head, payload = _FRAME.unpack(read(_FRAME.size))
        return json.loads(read(head)), read(payload)

    def _exit_reason(self) -> str:
        status = self._process.returncode
        if status is not None and status < 0:
            return f"signal {signal.Signals(-status).name}"
        return f"exit status {status}"

    def _last_output(self, num_lines: int = 60) -> str:
        """The last lines it wrote."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - (1 << 16)))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def _paths() -> list[str]:
    """Where a child looks for modules first: where its parent was told to, then at this package."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = str(pathlib.Path(__file__).resolve().parents[3])
    # Installed packages are found anyway, and are not to go before the standard library.
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths.append(root)
    return paths


def serve(answer: Callable[[dict[str, Any], bytes], Answer], *, idle_s: float) -> None:
    """Answers the requests of the process that started this one, until it ends.

    Args:
        answer: Makes the answer of a request and its bytes.
        idle_s: Ends the process after so many seconds without a request.
    """
    parent = int(os.environ[_PARENT])
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # Libraries print to the standard output, which here is the pipe of the answers.
    os.dup2(2, 1)
    waiting = selectors.PollSelector()
    waiting.register(requests, selectors.EVENT_READ)
    # Whoever asks waits for the answer before it asks again: no second request is left in the
    # reader's buffer, where `select` would not see it, and neither end writes while the other does.
    while waiting.select(idle_s):
        frame = requests.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            return
        head, payload = _FRAME.unpack(frame)
        reply, result = answer(
            json.loads(_read_exactly(requests, head)), _read_exactly(requests, payload)
        )
        text = json.dumps(reply).encode()
        answers.write(_FRAME.pack(len(text), len(result)))
        answers.write(text)
        answers.write(result)
        answers.flush()


def _read_exactly(pipe: BinaryIO, num_bytes: int) -> bytes:
    read = pipe.read(num_bytes)
    if len(read) < num_bytes:  # the other end died while it wrote
        sys.exit()
    return read


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)
