"""Says what is being done while a plan is made: to a callback, or on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

# Called with what is being done, and for how many seconds.
Progress = Callable[[str, float], None]


@contextlib.contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """What to tell progress to: `progress`, or a line with a spinner if stderr is a terminal."""
    if progress is not None:
        yield progress
    elif not sys.stderr.isatty():
        yield lambda doing, seconds: None
    else:
        with _spinner() as tell:
            yield tell


@contextlib.contextmanager
def _spinner() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning")

        def tell(doing: str, seconds: float) -> None:
            bar.update(task, description=f"planning: {doing}")

        yield tell
