"""Board: texts that processes leave for each other in JAX's coordination service.

No device takes part, so any thread may read and write at any time.
"""

from tpudist.processes.coordination import KeyValueClient
from tpudist.processes.host import this_host


class Board:
    """Texts that processes leave for each other, each under a key and written once.

    Only `wait_for` waits. A call costs about 1 ms between processes of one machine. In a run of one
    process the board is a dict.

    Args:
        name: Name of the board, the same in all processes and unique in the run.
    """

    def __init__(self, name: str):
        self._folder = f"tpudist/{name}"
        # Each text is in a list of its own, by whose identity `post` knows that it wrote it.
        self._local_texts: dict[str, list[str]] = {}
        self.num_processes = this_host().process_count()

    def post(self, key: str, text: str) -> bool:
        """Writes `text` under `key` unless the key exists; returns whether it wrote.

        Raises:
            ConnectionError: If the service cannot be reached, as at the end of a run.
        """
        if self.num_processes == 1:
            # Atomic between threads, and without a lock, which a signal handler could wait for
            # in the thread that holds it.
            entry = [text]
            return self._local_texts.setdefault(key, entry) is entry
        try:
            self._client().key_value_set(f"{self._folder}/{key}", text)
        except Exception as error:  # jaxlib's type varies; the text has the status
            if "ALREADY_EXISTS" in str(error):
                return False
            raise ConnectionError(str(error)) from error
        return True

    def read(self, key: str) -> str | None:
        """Returns the text under `key`, or None if there is none.

        Raises:
            ConnectionError: If the service cannot be reached.
        """
        if self.num_processes == 1:
            entry = self._local_texts.get(key)
            return None if entry is None else entry[0]
        try:
            return self._client().key_value_try_get(f"{self._folder}/{key}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise ConnectionError(str(error)) from error

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Returns the text under `key`, or None if there is none after `timeout_s`.

        Only between several processes. It is two requests, where a loop of `read` would be many.

        Raises:
            ConnectionError: If the service cannot be reached.
        """
        try:
            name = f"{self._folder}/{key}"
            return self._client().blocking_key_value_get(name, int(1000 * timeout_s))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise ConnectionError(str(error)) from error
        # The answer is lost if it needs longer than the limit on its way. A look has no limit.
        return self.read(key)

    def read_all(self, folder: str) -> dict[str, str]:
        """Returns all texts whose key begins with `folder/`, by the rest of their key.

        Raises:
            ConnectionError: If the service cannot be reached.
        """
        if self.num_processes == 1:
            start = f"{folder}/"
            texts = [(key, text) for key, [text] in list(self._local_texts.items())]
        else:
            start = f"{self._folder}/{folder}/"
            try:
                texts = self._client().key_value_dir_get(start)
            except Exception as error:
                raise ConnectionError(str(error)) from error
        return {key.removeprefix(start): text for key, text in texts if key.startswith(start)}

    def remove(self, folder: str) -> None:
        """Deletes all texts whose key begins with `folder/`.

        Raises:
            ConnectionError: If the service cannot be reached.
        """
        if self.num_processes == 1:
            for key in [x for x in list(self._local_texts) if x.startswith(f"{folder}/")]:
                self._local_texts.pop(key, None)
            return
        try:
            self._client().key_value_delete(f"{self._folder}/{folder}/")
        except Exception as error:
            raise ConnectionError(str(error)) from error

    def _client(self) -> KeyValueClient:
        client = this_host().coordination_client()
        if client is None:
            raise ConnectionError("This process has left the others.")
        return client
