"""Runs a Python process that answers requests: started once, reused, and never left behind.

Requests and answers are a JSON object and bytes, over the process's standard input and output. The
process's other output goes to a file, and is quoted if the process dies.

The child ends when its parent closes it, ends, or is killed: once per second the child checks that
its parent is still the same process. Ctrl-C does not reach the child; it interrupts the parent,
which then ends the child.
"""

import contextlib
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

# A message is this frame (the lengths of the JSON object and of the bytes), the object, the bytes.
_FRAME = struct.Struct("<QQ")
_PARENT_VARIABLE = "TPUDIST_PARENT_PROCESS"  # has the parent's process id
_MAX_READ_BYTES = 1 << 20  # at a time, so that ticks continue during a large answer
# In the error about a dead process.
_MAX_LINES, _MAX_BYTES = 60, 1 << 16

Request = Mapping[str, Any]  # what JSON can represent
Answer = tuple[dict[str, Any], bytes]


class Died(RuntimeError):
    """The process ended before it answered.

    Args:
        ending: Reason of the end, such as "signal SIGABRT".
        wrote: The last lines of its output.
    """

    def __init__(self, ending: str, wrote: str):
        super().__init__(f"{ending}: {wrote}")
        self.ending = ending
        self.wrote = wrote


class NotSent(Died):
    """The process ended before it read the request, which you may send to another process."""


class Child:
    """A running Python process.

    Args:
        module: Module that the process runs, which calls `serve`.
        environment: Additional environment variables.

    Attributes:
        environment: All environment variables of the process.
    """

    def __init__(self, module: str, environment: Mapping[str, str]):
        own = {"PYTHONPATH": os.pathsep.join(_paths()), _PARENT_VARIABLE: str(os.getpid())}
        self.environment = {**os.environ, **environment, **own}
        # A file and not a pipe, which would block the child when it is full.
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            # -P: do not import from the current folder, which may have a jax.py.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=self.environment,
            process_group=0,  # Ctrl-C interrupts only the parent
        )
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and belongs to this process, not to the parent of a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(
        self,
        request: Request,
        payload: bytes = b"",
        *,
        tick: Callable[[float], None] | None = None,
        tick_s: float = 0.5,
    ) -> Answer:
        """Sends a request and waits for the answer. Any exception ends the process.

        Args:
            request: JSON object of the request.
            payload: Bytes of the request.
            tick: Called with the seconds since the request, again and again.
            tick_s: Seconds between two calls of `tick`.

        Raises:
            NotSent: If the process ended before it read the request.
            Died: If the process ended instead of answering.
        """
        try:
            self._send(request, payload)
            return self._receive(tick, tick_s)
        except BaseException:
            # The next answer of this process would belong to this request, so end it.
            self.close()
            raise

    def close(self) -> None:
        """Ends the process immediately."""
        # In a fork the process belongs to the parent: only close the copies of its pipes.
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._output):
            assert pipe is not None
            with contextlib.suppress(OSError):  # flushing data that the process no longer reads
                pipe.close()

    def _send(self, request: Request, payload: bytes) -> None:
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

    def _receive(self, tick: Callable[[float], None] | None, tick_s: float) -> Answer:
        assert self._process.stdout is not None
        started = time.monotonic()
        pipe = self._process.stdout.fileno()
        selector = selectors.PollSelector()  # `select` fails for file descriptors from 1024 on
        selector.register(pipe, selectors.EVENT_READ)

        def read(num_bytes: int) -> bytes:
            parts, missing = [], num_bytes
            while missing:
                if tick:
                    tick(time.monotonic() - started)
                if not selector.select(tick_s):
                    continue
                part = os.read(pipe, min(missing, _MAX_READ_BYTES))
                if not part:
                    # Status 0: the child reached its idle limit while the request was sent.
                    error = Died if self._process.wait() else NotSent
                    raise error(self._exit_reason(), self._last_output())
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

    def _last_output(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _MAX_BYTES))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_MAX_LINES:])


def _paths() -> list[str]:
    """Returns the child's PYTHONPATH: the parent's, then the folder of this package."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = str(pathlib.Path(__file__).resolve().parents[3])
    # Python finds installed packages without it, and they must not precede the standard library.
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths.append(root)
    return paths


def serve(answer: Callable[[dict[str, Any], bytes], Answer], *, idle_s: float) -> None:
    """Answers the requests of the parent process until it ends.

    Args:
        answer: Called with the JSON object and the bytes of a request; returns the answer's.
        idle_s: Seconds without a request after which this process ends.
    """
    parent = int(os.environ[_PARENT_VARIABLE])
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # The standard output is the pipe of the answers. Redirect it, because libraries print there.
    os.dup2(2, 1)
    selector = selectors.PollSelector()
    selector.register(requests, selectors.EVENT_READ)
    # The parent sends a request only after the previous answer. So the reader's buffer never has a
    # second request, which `select` would not see, and the two ends never write at the same time.
    while selector.select(idle_s):
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
    while os.getppid() == parent:  # an orphan gets another parent
        time.sleep(1)
    os._exit(0)
