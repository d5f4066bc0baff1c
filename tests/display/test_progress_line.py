"""A long operation shows how far it is, on terminals only."""

import io

import pytest

from tpudist.display import progress_line
from tpudist.display.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("delay_s", [0, 1000])
@pytest.mark.parametrize("output", [Terminal, io.StringIO])
def test_only_long_operations_on_terminals_show_a_line(monkeypatch, output, delay_s):
    monkeypatch.setattr("sys.stderr", written := output())
    monkeypatch.setattr(progress_line, "_DELAY_S", delay_s)
    with ProgressLine("strategy.create", 3, "arrays") as line:
        line.advance(2)
    is_shown = "strategy.create: 2 of 3 arrays" in written.getvalue()
    assert is_shown == (output is Terminal and not delay_s)
