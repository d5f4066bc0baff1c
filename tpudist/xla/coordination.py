"""What processes tell each other on the host: short texts, through JAX's coordination service.

No device takes part, so any thread may wait here while steps run, in any order relative to them.
Every wait has a name and an end: who is missing is part of the error.

The key-value store of the coordination service has no public door in jax 0.10. This is the one
place that reaches for it, as Orbax does; `tests/test_coordination.py` fails when JAX moves it.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

TIMEOUT_S = 600.0
_SLICE_S = 0.5  # how long one wait in C++ lasts, which neither Ctrl-C nor a closing thread ends


class Cancelled(Exception):
    """A wait was given up because its caller does not want it any more."""


class Channel:
    """Rounds of one text from each process to all; all processes begin them in the same order.

    Each costs about 2 ms between processes of one machine, and nothing where there is one process.
    """

    def __init__(self, name: str):
        """All processes must use the same name, and no other channel of the run may have it."""
        self._name = name
        self._round = 0

    def exchange(
        self,
        text: str,
        *,
        timeout_s: float = TIMEOUT_S,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """The texts of all processes in this round, in the order of their indices.

        Args:
            text: That of this process.
            timeout_s: How long to wait for the others.
            cancelled: Asked about twice a second whether to give up.

        Raises:
            RuntimeError: A process did not come in time; names it.
            Cancelled: As asked for.
        """
        number, self._round = self._round, self._round + 1
        num_processes = jax.process_count()
        if num_processes == 1:
            return [text]
        client, index = _client(), jax.process_index()
        folder = f"tpudist/{self._name}/{number}"
        deadline = time.monotonic() + timeout_s

        def wait_for(key: str, missing: Callable[[], str]) -> str:
            while True:
                left_s = deadline - time.monotonic()
                try:
                    return client.blocking_key_value_get(key, max(1, int(1000 * _SLICE_S)))
                except Exception as error:  # the type varies; the text says what happened
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                if cancelled():
                    raise Cancelled(self._name)
                if left_s <= 0:
                    raise RuntimeError(
                        f"Process {index} waited {timeout_s:g} s at '{self._name}', round "
                        f"{number}, for {missing()}. All processes must do the same things in the "
                        f"same order: see what the others are doing, or whether they ended."
                    )

        client.key_value_set(f"{folder}/{index}", text)
        if index:
            every = wait_for(f"{folder}/all", lambda: self._missing(client, folder))
            return json.loads(every)
        texts = [
            text
            if other == 0
            else wait_for(f"{folder}/{other}", lambda: self._missing(client, folder))
            for other in range(num_processes)
        ]
        client.key_value_set(f"{folder}/all", json.dumps(texts))
        if number:  # all have come to this round, so all have read the one before
            client.key_value_delete(f"tpudist/{self._name}/{number - 1}/")
        return texts

    def _missing(self, client: Any, folder: str) -> str:
        there = {key.rsplit("/", 1)[-1] for key, _ in client.key_value_dir_get(f"{folder}/")}
        absent = [str(i) for i in range(jax.process_count()) if str(i) not in there]
        return f"process {', '.join(absent)}" if absent else "process 0 to answer"


def reached_preemption(call: int) -> bool:
    """Whether all processes agreed to stop at this call, since one of them is to be ended soon.

    A process is told by SIGTERM, which JAX's preemption service catches once several processes are
    connected. All must ask equally often, counting calls from 0; about 10 us each. In one process
    there is no service, and the answer is no.
    """
    if jax.process_count() == 1:
        return False
    return multihost_utils.reached_preemption_sync_point(call)


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None, "several processes without a coordination service"
    return client
