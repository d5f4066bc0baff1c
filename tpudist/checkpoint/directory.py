"""The directory of a run: one subdirectory per step, and the remains of unfinished saves.

Names in it, where 7 is the number of a step:

    7/                          a step; in an object store, only if it has `commit_success.txt`
    7.orbax-checkpoint-tmp/     a step that is being written or removed, or that a crash left
    7.damaged/                  a step that failed verification
"""

import os
import time
from collections.abc import Iterator, Sequence

from etils import epath

from tpudist.checkpoint import manifest
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import TEMPORARY_SUFFIX
from tpudist.options import shorten

DAMAGED_SUFFIX = ".damaged"
_STORE = "gs://"
_COMMITTED = "commit_success.txt"


class Directory:
    """The steps below a path.

    Args:
        path: Local path, or a path in Google Cloud Storage such as `gs://bucket/run`. It may be
            missing.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If `path` is empty, or in another object store.
    """

    def __init__(self, path: str | os.PathLike):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"CheckpointManager(directory={shorten(path)}): directory must be a path, such as "
                f"'runs/a' or a pathlib.Path."
            )
        text = os.fspath(path)
        if not text:
            raise ValueError(
                "CheckpointManager(directory=''): an empty path would mean the current "
                "directory. Pass a path such as 'runs/a', or '.' for the current directory."
            )
        self.is_remote = manifest.is_remote(text)
        if self.is_remote and not text.startswith(_STORE):
            # Before anything is deleted: Orbax would fail during a save, because it renames
            # directories in these stores, and makes `s3:/bucket` of their paths.
            raise ValueError(
                f"Checkpoints cannot be written to {text} or read from it: Orbax supports local "
                f"paths and {_STORE} only. Mount the bucket and pass a path in it, or save to a "
                f"local directory and copy the steps that are complete."
            )
        if not self.is_remote:
            text = os.path.abspath(os.path.expanduser(text))
        self.path = epath.Path(text)
        # Steps of an object store that are known to be committed: each look is a request. Only
        # their removal ends that, and verification does not accept a step that is written again.
        self._committed: set[int] = set()

    def __str__(self) -> str:
        return str(self.path)

    def steps(self) -> list[int]:
        """Returns the numbers of the committed steps, ascending."""
        return [*self.newest_first()][::-1]

    def newest_first(self) -> Iterator[int]:
        """Yields the numbers of the committed steps, descending.

        The directory is listed once. In an object store each step that is yielded takes one more
        request, so the newest step is found fast among thousands.
        """
        names = (name for name, is_folder in self._list() if is_folder and name.isdecimal())
        for number in sorted((int(x) for x in names if str(int(x)) == x), reverse=True):
            if self._is_committed(number):
                yield number

    def has(self, number: int) -> bool:
        """Whether a step is committed."""
        return self.step(number).is_dir() and self._is_committed(number)

    def names(self) -> list[str]:
        """Returns the names of everything in the directory."""
        return [name for name, _ in self._list()]

    def step(self, number: int) -> epath.Path:
        """Returns the path of a step."""
        return self.path / str(number)

    def make(self, number: int) -> None:
        """Checks that a step can be written, and deletes the remains of an earlier attempt.

        Raises:
            CheckpointError: If it cannot be written.
        """
        try:
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError("it is a file")
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.is_remote:
                # A full or read-only disk raises here, in the caller, not in the background.
                trial = self._temporary_path(number)
                _remove_patiently(trial)
                trial.mkdir()
                trial.rmdir()
        except OSError as error:
            raise CheckpointError(
                f"Cannot save step {number}: cannot write to the directory {self.path} ({error}). "
                f"Pass a writable directory to CheckpointManager, or free disk space."
            ) from error

    def remove(self, number: int) -> None:
        """Deletes a step."""
        # A local step is renamed first: another program never finds a step with some files missing.
        # `rmtree` refuses a symbolic link; its error is the message.
        self._committed.discard(number)
        if self.is_remote or os.path.islink(self.step(number)):
            self.step(number).rmtree()
            return
        doomed = self._temporary_path(number)
        doomed.rmtree(missing_ok=True)
        self.step(number).rename(doomed)
        doomed.rmtree()

    def set_aside(self, number: int) -> epath.Path:
        """Renames a damaged step so that its number can be used again; returns its new path."""
        self._committed.discard(number)
        aside = self.path / f"{number}{DAMAGED_SUFFIX}"
        if aside.exists():
            aside.rmtree()
        return self.step(number).rename(aside)

    def remove_unfinished(self) -> Sequence[str]:
        """Deletes the remains of unfinished saves; returns their names."""
        removed = []
        # Only names that this package and Orbax use: a user may keep other files in the directory.
        for name in self.names():
            number, _, rest = name.partition(TEMPORARY_SUFFIX)
            temporary = name != number and number.isdecimal() and not rest
            unfinished = self.is_remote and name.isdecimal() and not self._is_committed(int(name))
            if temporary or unfinished:
                try:
                    (self.path / name).rmtree(missing_ok=True)
                except OSError:  # it does no harm
                    continue
                removed.append(name)
        return removed

    def _temporary_path(self, number: int) -> epath.Path:
        return self.path / f"{number}{TEMPORARY_SUFFIX}"

    def _list(self) -> list[tuple[str, bool]]:
        """Returns the name of each entry, and whether it is a directory."""
        if self.is_remote:  # to ask whether it is one would take a request for each
            return [(x.name, True) for x in self.path.iterdir()] if self.path.is_dir() else []
        try:
            # Without a call of the system for each entry: a run may have ten thousand steps.
            with os.scandir(self.path) as entries:
                return [(x.name, x.is_dir()) for x in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _is_committed(self, number: int) -> bool:
        # A rename commits a local step; in object stores a file does, which comes last.
        if not self.is_remote or number in self._committed:
            return True
        if not (self.step(number) / _COMMITTED).exists():
            return False
        self._committed.add(number)
        return True


def _remove_patiently(path: epath.Path) -> None:
    # Waits 1.4 s in all; the error of the last attempt is raised.
    for wait_s in (0.1, 0.3, 1.0):
        try:
            return path.rmtree(missing_ok=True)
        except OSError:  # after Ctrl-C, threads of Orbax may still write their last files into it
            time.sleep(wait_s)
    path.rmtree(missing_ok=True)
