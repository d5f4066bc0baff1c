"""RaySession: uses a running Ray, joins one, or starts one on this machine, with tokens.

Except for the module of Ray's command line, it uses only the public and stable API. Only
`import_ray` imports Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tpudist.engine.process_guard import ProcessGuard
from tpudist.engine.ray.ray_addresses import find_local_ip, split_address

START_S = 120.0
"""Maximum seconds for Ray to start on this machine; it takes 4 s on an idle one."""
_TOKEN_FILE = Path("~/.ray/auth_token")
_TOKEN_PLACES = f"it is in RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or {_TOKEN_FILE}"
_MAX_FOLDER = 40  # characters: Ray's sockets add 66, and the path of a socket may have 107
_log = logging.getLogger("tpudist")


class RaySession:
    """A program's connection to Ray.

    Args:
        address: See `RayEngine`.
        needs_token: See `RayEngine`.
        log_to_driver: See `RayEngine`.
        head: Address at which to start Ray for other machines, if any.
    """

    def __init__(
        self,
        address: str | None,
        *,
        needs_token: bool,
        log_to_driver: bool,
        head: str | None = None,
    ):
        self._address, self._needs_token, self._head = address, needs_token, head
        self._log_to_driver = log_to_driver
        self._lock = threading.RLock()
        self._guard: ProcessGuard | None = None
        self._has_joined = False

    @property
    def has_started_ray(self) -> bool:
        """Whether Ray, with all of its processes, ends with this session."""
        return self._guard is not None

    def connect(self) -> None:
        """Starts or joins Ray, unless the program has done so."""
        require_token(self._needs_token)
        if "ray" in sys.modules and import_ray().is_initialized():
            return
        address = None if self._head else self._address or os.environ.get("RAY_ADDRESS")
        if address == "local":  # Ray's name for a new Ray on this machine
            address = None
        if self._needs_token:
            choose_token(self._head or address, was_imported="ray" in sys.modules)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray = import_ray()
        options: dict[str, Any] = {"log_to_driver": self._log_to_driver, "logging_level": "ERROR"}
        with _restore_process_state():
            try:
                if address:
                    _join(address, options)
                else:
                    folder = self._start()
                    # With `auto` instead of the address, Ray looks for a token even if it was
                    # imported before the token was chosen.
                    ray.init("auto", _temp_dir=str(folder), **options)
                self._has_joined = True
            except BaseException:
                self.disconnect()
                raise

    def _start(self) -> Path:
        host, port = split_address(self._head) if self._head else (None, 0)
        folder = make_folder()
        # Ray makes its folder writable for all users, so it is inside of a private folder.
        inner = folder / "r"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"]
        command += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={inner}"]
        if host is not None and (ip := find_local_ip(host)):
            command.append(f"--node-ip-address={ip}")
        env = {x: value for x, value in os.environ.items() if x != "RAY_ADDRESS"}
        if self._needs_token:
            env["RAY_AUTH_MODE"] = "token"
        self._guard = ProcessGuard(command, folder, env, timeout_s=START_S)
        return inner

    def disconnect(self) -> None:
        """Undoes `connect`; may be called again."""
        with self._lock:
            if self._has_joined:
                import_ray().shutdown()
                self._has_joined = False
            if self._guard is not None:
                self._guard.close()
                self._guard = None


def import_ray() -> ModuleType:
    """Returns the module `ray`.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "Ray is not installed. engine='ray' and servers on several machines require it: pip "
            "install 'tpudist[ray]'.",
            name="ray",
        ) from None
    return ray


def require_token(needs_token: bool) -> None:
    """Checks that Ray requires tokens, if they are needed.

    Raises:
        RuntimeError: If the environment disables them.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if needs_token and mode != "token":
        raise RuntimeError(
            f"RAY_AUTH_MODE={mode!r}: everyone who can reach the ports of Ray could run code in "
            f"your name. Unset it, or pass needs_token=False if nobody else uses the network."
        )


def choose_token(address: str | None, *, was_imported: bool) -> None:
    """Makes Ray use tokens, and checks that there is one.

    Raises:
        RuntimeError: If there is no token for `address`, or Ray was imported without one.
    """
    # Ray reads RAY_AUTH_MODE when it is imported, and keeps its first token. So both stay for the
    # life of this process. The token is not written to a file.
    if not was_imported:
        os.environ["RAY_AUTH_MODE"] = "token"
    elif address and "RAY_AUTH_MODE" not in os.environ:
        raise RuntimeError(
            f"Ray was imported before the engine required a token, so it has none for {address}. "
            f"Set RAY_AUTH_MODE=token, or import Ray after the engine starts."
        )
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = _TOKEN_FILE.expanduser()
    if not file.exists():
        if address:
            raise RuntimeError(f"No token for Ray at {address} was found: {_TOKEN_PLACES}.")
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif file.stat().st_mode & 0o077:
        _log.warning(
            "Other users can read %s, and with it run code in your name where Ray runs. Run "
            "chmod 600 on this file.",
            file,
        )


def _join(address: str, options: dict[str, Any]) -> None:
    try:
        import_ray().init(address, **options)
    except ConnectionError as error:
        raise ConnectionError(
            f"Cannot join Ray at {address}: it does not answer, or it has a different token than "
            f"this program ({_TOKEN_PLACES})."
        ) from error


@contextlib.contextmanager
def _restore_process_state() -> Iterator[None]:
    """Hides RAY_ADDRESS, which `ray.init` prefers to `auto`, and keeps the handler of SIGTERM."""
    before, address = signal.getsignal(signal.SIGTERM), os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        if address is not None:
            os.environ["RAY_ADDRESS"] = address
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def make_folder() -> Path:
    """Returns a new folder with a short name that only this user may enter."""
    parent = tempfile.gettempdir()
    if len(parent) > _MAX_FOLDER - len("/tpudist-ray-xxxxxxxx/r"):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="tpudist-ray-", dir=parent))
