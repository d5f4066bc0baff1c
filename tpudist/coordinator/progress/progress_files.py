"""Files that samples of a run are added to: lines of JSON, and events of TensorBoard."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from pathlib import Path

from tpudist.coordinator.progress.progress_sample import ProgressSample

_numbers = itertools.count()  # of writers of events, as the names of their files are of seconds


class ProgressLines:
    """Adds a line of JSON for each sample to a file, which may have those of earlier runs."""

    def __init__(self, path: str | os.PathLike):
        """Opens nothing yet."""
        self._path = Path(path)
        self._is_cut = True  # whether the last line may have been written in part

    def write(self, sample: ProgressSample) -> None:
        """Adds a sample; each opens the file, so that one that is moved away is begun anew.

        Raises:
            OSError: It cannot be written. The next one is on a line of its own all the same.
        """
        text = json.dumps(sample.as_json()) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as file:
            if self._is_cut and file.tell() and not _ends_line(self._path):
                text = "\n" + text
            self._is_cut = True
            file.write(text.encode())
        self._is_cut = False


class ProgressEvents:
    """Adds scalars to a folder that TensorBoard reads, by tensorboardX and without its thread."""

    def __init__(self, folder: str | os.PathLike):
        """Makes a new file in `folder`.

        Raises:
            OSError: It cannot be written.
        """
        from tensorboardX.event_file_writer import EventsWriter

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Not `SummaryWriter`: its thread ends at the first error, and who adds to it then hangs.
        suffix = f".{os.getpid()}.{next(_numbers)}.tpudist"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self._writer.flush()

    def write(self, sample: ProgressSample) -> None:
        """Adds a sample, at the number of closures that have finished, and flushes.

        Raises:
            OSError: It cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event  # type: ignore
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore

        values = [Summary.Value(tag=k, simple_value=x) for k, x in sample.scalars().items()]
        event = Event(wall_time=sample.time, step=sample.finished, summary=Summary(value=values))
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


def require_tensorboard(folder: str | os.PathLike) -> None:
    """Refuses to write events without the library for it.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        raise ModuleNotFoundError(
            f"progress(tensorboard={str(folder)!r}) requires tensorboardX, which is not "
            f"installed. Install it: pip install tensorboardX. Or use json_lines=FILE."
        )


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
