"""Files to which samples are appended: lines of JSON, and events for TensorBoard."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from pathlib import Path

from tpudist.coordinator.progress.progress_sample import ProgressSample

_numbers = itertools.count()  # tensorboardX names files by the second, so two could be equal


class ProgressLines:
    """Appends each sample as a line of JSON to a file, which may contain lines of earlier runs."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._may_be_cut = True  # whether the last line may be incomplete, as after a full disk

    def write(self, sample: ProgressSample) -> None:
        """Appends a sample. It opens the file each time, so you may move the file away.

        Raises:
            OSError: If the file cannot be written. The next sample still starts on a new line.
        """
        text = json.dumps(sample.as_json()) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as file:
            if self._may_be_cut and file.tell() and not _ends_line(self._path):
                text = "\n" + text
            self._may_be_cut = True
            file.write(text.encode())
        self._may_be_cut = False


class ProgressEvents:
    """Appends scalars to a new file in a folder that TensorBoard reads, with tensorboardX.

    Raises:
        OSError: If the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike):
        from tensorboardX.event_file_writer import EventsWriter

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # `SummaryWriter` writes in a thread that ends at the first error; later writes would hang.
        suffix = f".{os.getpid()}.{next(_numbers)}.tpudist"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self._writer.flush()

    def write(self, sample: ProgressSample) -> None:
        """Appends a sample, at the number of finished closures, and flushes.

        Raises:
            OSError: If the file cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event  # type: ignore
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore

        values = [Summary.Value(tag=k, simple_value=x) for k, x in sample.scalars().items()]
        event = Event(wall_time=sample.time, step=sample.finished, summary=Summary(value=values))
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def require_tensorboard(folder: str | os.PathLike) -> None:
    """Checks that the library for events is installed.

    Raises:
        ModuleNotFoundError: If tensorboardX is not installed.
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
