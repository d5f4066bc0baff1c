"""Whose turn it is to make an item that a loop asks for: a background thread's, or the loop's own.

The interpreter runs one thread at a time, and handing items from one to the other costs 30 to 60
us each. It is worth it as long as the loop does something meanwhile. One that has nothing to do
between items gets them faster if it makes them.
"""

import time

# A loop that is away for so long has nothing to do between items.
_AT_ONCE_S = 40e-6
# Trials that fail cost the loop what it could have done meanwhile: at most 8 ms in 512 items.
_SOON_S = 1e-3
_NUM_LATE = 8
_PATIENCE = 8
_MAX_PATIENCE = 512


class Turns:
    """Who makes the items of one loop.

    That the loop does is tried for a few items where it comes back soon each time, and goes on for
    as long as it comes back at once. (While the thread is at work, the time that the loop spends on
    waiting for the interpreter cannot be told from its own.)
    """

    def __init__(self):
        """Before the first item."""
        self._loop = True  # which waits for the first item in any case
        self._num_soon = self._num_late = 0
        self._patience = _PATIENCE
        self._left_at = time.perf_counter()

    def is_loops_turn(self) -> bool:
        """Whether the loop, which asks for an item now, is to make it if none is there."""
        away_s = time.perf_counter() - self._left_at
        self._num_soon = self._num_soon + 1 if away_s < _SOON_S else 0
        if not self._loop:
            if self._num_soon > self._patience:
                self._loop, self._num_late = True, 0
        elif not self._num_soon:
            self._loop = False
        else:
            self._num_late = max(self._num_late + (1 if away_s > _AT_ONCE_S else -1), 0)
            if self._num_late >= _NUM_LATE:
                self._loop, self._num_soon = False, 0
                self._patience = min(4 * self._patience, _MAX_PATIENCE)
        return self._loop

    def resume_loop(self) -> None:
        """The loop has its item."""
        self._left_at = time.perf_counter()
