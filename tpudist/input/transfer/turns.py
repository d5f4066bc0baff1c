"""Decides whether a background thread or the loop itself makes the next item.

Python runs one thread at a time, and handing an item from one thread to another costs 30 to 60 us.
That is worth it as long as the loop works meanwhile. A loop that does nothing between items gets
them faster if it makes them itself.
"""

import time

# A loop that returns within 40 us has done nothing between items.
_IDLE_S = 40e-6
# A loop that returns within 1 ms is worth a trial. A trial fails when it has had 8 more busy items
# (taken later than `_IDLE_S`) than idle ones. That costs the work that the thread could have done
# meanwhile: about 8 ms.
_SOON_S = 1e-3
_MAX_BUSY_ITEMS = 8
# Items that must come soon before a trial. It grows fourfold after each failed one, and never
# shrinks, so that trials cost at most about 8 ms in 512 items.
_PATIENCE = 8
_MAX_PATIENCE = 512


class Turns:
    """Decides who makes the items of one loop.

    If the loop returns soon for some items, a trial begins, in which it makes them itself. The
    trial continues as long as the loop returns at once. A trial is needed because while the thread
    runs, the loop's time of waiting for the interpreter looks like work.
    """

    def __init__(self) -> None:
        self._is_trial = True  # the loop has to wait for the first item in any case
        self._num_soon = 0  # items in a row for which the loop returned soon
        self._num_busy = 0  # items of the trial with work before them, minus those without
        self._patience = _PATIENCE
        self._left_at = time.perf_counter()

    def is_loops_turn(self) -> bool:
        """Whether the loop, which requests an item now, makes it if none is ready."""
        away_s = time.perf_counter() - self._left_at
        self._num_soon = self._num_soon + 1 if away_s < _SOON_S else 0
        if not self._is_trial:
            if self._num_soon > self._patience:
                self._is_trial, self._num_busy = True, 0
        elif not self._num_soon:
            # The loop was at work: the thread makes items again, but the trial has not failed.
            self._is_trial = False
        else:
            self._num_busy = max(self._num_busy + (1 if away_s > _IDLE_S else -1), 0)
            if self._num_busy >= _MAX_BUSY_ITEMS:
                self._is_trial, self._num_soon = False, 0
                self._patience = min(4 * self._patience, _MAX_PATIENCE)
        return self._is_trial

    def resume_loop(self) -> None:
        """Records that the loop has received its item."""
        self._left_at = time.perf_counter()
