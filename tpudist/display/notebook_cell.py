"""Text below a notebook's cell that changes in place while the cell runs.

This uses the protocol of Jupyter itself: rich would need ipywidgets.
"""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Returns whether a Jupyter kernel runs this program."""
    # A kernel has imported IPython. In a plain IPython shell, the shell has no `kernel`.
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", None)  # IPython has no types here
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None


class NotebookCell:
    """Output of the cell that runs; `update` replaces it.

    Args:
        text: First text.
    """

    def __init__(self, text: str = ""):
        from IPython.display import display  # type: ignore[import-not-found]

        handle = display({"text/plain": text}, raw=True, display_id=True)
        assert handle is not None, "display_id=True returns a handle"
        self._handle = handle

    def update(self, text: str) -> None:
        """Replaces the text; the empty text removes it."""
        self._handle.update({"text/plain": text}, raw=True)
