"""RayNode: this machine as a node of the Ray of a program elsewhere, until that program ends.

Ray's processes, and the actors in them, end with this process, however it ends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from tpudist.engine.process_guard import ProcessGuard
from tpudist.engine.ray.ray_addresses import find_local_ip, is_answered, split_address
from tpudist.engine.ray.ray_cluster import name_resource
from tpudist.engine.ray.ray_session import (
    START_S,
    choose_token,
    import_ray,
    make_folder,
    require_token,
)

_LOOK_S = 0.5  # between two attempts to connect to the program, and to Ray here
_NUM_REFUSED = 3  # consecutive refusals, so that a restart of the network does not count as the end
_SILENT_S = 60.0  # the same limit as Ray's for a head that does not answer
_REPORT_S = 30.0  # between two reports that the program does not answer yet
_log = logging.getLogger("tpudist")


class RayNode:
    """This machine, for the actor with one role and index.

    Waits for the program, and joins its Ray.

    Args:
        head: Address `host:port` at which the program starts Ray.
        role: Role of the actor that will run here.
        index: Index of the actor that will run here.
        address: Address of this machine, `host:port`; Ray uses the port.
        timeout_s: Maximum seconds to wait for the program.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
        RuntimeError: If there is no token, or tokens are disabled.
        TimeoutError: If nothing answers at `head`.
        ConnectionError: If Ray rejects this machine.
    """

    def __init__(self, head: str, role: str, index: int, address: str, *, timeout_s: float):
        self._name, self._head = f"{role} {index}", split_address(head)
        host, port = split_address(address)
        require_token(True)
        choose_token(head, was_imported=False)
        import_ray()  # only for its ModuleNotFoundError
        self._wait_for_head(timeout_s)
        folder = make_folder()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head}"]
        command += [f"--resources={json.dumps({name_resource(role, index): 1})}"]
        command += [f"--node-manager-port={port}", f"--temp-dir={folder / 'r'}"]
        command += ["--disable-usage-stats"]
        if ip := find_local_ip(host):
            command.append(f"--node-ip-address={ip}")
        self._here = (ip or "127.0.0.1", port)
        env = {x: value for x, value in os.environ.items() if x != "RAY_ADDRESS"}
        try:
            self._guard = ProcessGuard(command, folder, env, timeout_s=START_S)
        except RuntimeError as error:
            raise ConnectionError(
                f"{self._name} cannot join Ray at {head}: it is not Ray, it has a different token "
                f"than this program, or another program uses {address}."
            ) from error

    def join(self) -> None:
        """Waits until the program has ended, and ends the processes here.

        Raises:
            RuntimeError: If Ray has ended here, but the program has not.
        """
        try:
            num_refused = num_refused_here = 0
            last_answer = time.monotonic()
            while num_refused < _NUM_REFUSED and time.monotonic() - last_answer < _SILENT_S:
                time.sleep(_LOOK_S)
                answer = is_answered(*self._head)
                num_refused = num_refused + 1 if answer is False else 0
                last_answer = time.monotonic() if answer is not None else last_answer
                here = is_answered(*self._here)
                num_refused_here = num_refused_here + 1 if here is False else 0
                # It needs more refusals than the program, because Ray here also ends by itself soon
                # after the program, which is not an error.
                if num_refused_here > 2 * _NUM_REFUSED and answer:
                    raise RuntimeError(
                        f"Ray of {self._name} ended on this machine, but the program did not. "
                        f"Start the server again. Its state and its work continue there."
                    )
        finally:
            self.close()

    def close(self) -> None:
        """Ends all processes here; may be called again."""
        self._guard.close()

    def _wait_for_head(self, timeout_s: float) -> None:
        start = reported = time.monotonic()
        while not is_answered(*self._head):
            now = time.monotonic()
            if now - start > timeout_s:
                raise TimeoutError(
                    f"{self._name} has waited {timeout_s:g} s for the program of the chief, which "
                    f"does not answer at {':'.join(map(str, self._head))}. That program creates a "
                    f"tpudist.ParameterServerStrategy(cluster_resolver), as task 'chief'. Check "
                    f"that this machine can reach the address."
                )
            if now - reported > _REPORT_S:
                _log.warning("%s is waiting for the program of the chief.", self._name)
                reported = now
            time.sleep(min(_LOOK_S, timeout_s))
