"""`survive`: runs a program that continues when processes of its run are lost, or when others join.

The supervisor (`tpudist launch`) decides which processes form a generation. When they change, the
thread that runs the program is left behind, JAX restarts in the same process, and the program is
called again in another thread, with the newest state that any process has in memory. On platforms
where JAX is not known to restart in a process, the program itself restarts in it (`exec`).
"""

import operator
import os
from collections.abc import Callable, Collection
from typing import TypeVar

from tpudist.preemption.survival import restart_in_place
from tpudist.preemption.survival.supervised_process import SupervisedProcess
from tpudist.preemption.survival.survivor import Copies, Link, Survivor
from tpudist.processes import supervisor_variables
from tpudist.xla import emulation

T = TypeVar("T")


def survive(
    train: Callable[[Survivor], T],
    *,
    every: int = 1,
    processes: Collection[int] | None = None,
    in_process: bool | None = None,
) -> T:
    """Calls `train`, and again with other processes when one fails or joins; returns its result.

        def train(survivor):
            strategy = tpudist.MultiWorkerMirroredStrategy(deterministic=8)
            state = make_state(strategy)  # a tpudist.TrainState
            survivor.restore(state)
            for batch in state.batches:
                strategy.run(step, (state.model, state.optimizer, batch))
                state.step += 1
                survivor.commit(state)

        tpudist.experimental.survive(train)

    Under `tpudist launch`, the remaining processes continue without a restart, from the newest
    state that one of them has in memory. Everywhere else, `train` is called once. `survive` returns
    once `train` has returned in all processes.

    Create all objects that use devices (strategies, Variables, models, arrays, distributed
    datasets) in `train`, because each call starts from scratch. `train` runs in its own thread. If
    the thread waits for a lost process, it is abandoned, and its work is discarded.

    Args:
        train: Called with a `Survivor`, to which it reports its state.
        every: Commits per copy of the state in host memory. After a loss, at most this many steps
            are repeated, and in addition the steps whose copy was not complete yet.
        processes: Numbers of processes with which the program can continue, such as (1, 2, 4); by
            default any number. Extra processes wait.
        in_process: Whether JAX restarts in the same process when other processes fail. With False,
            the complete program restarts instead, from its first line, with the state that it had
            in memory: for devices that are released only when a program ends. The default is True
            on CPUs, where it was tested, and False elsewhere.

    Raises:
        RuntimeError: If JAX has already started its devices.
        ValueError: If a number is not a whole number of at least 1, or this system does not support
            `in_process=False`.
        SystemExit: With code 143 if this process received a request to end (SIGTERM); with code 0
            if it was not needed at the end of the run.
    """
    every, allowed = _check_options(every, processes, in_process)
    supervisor = os.environ.get(supervisor_variables.SUPERVISOR_VARIABLE)
    if supervisor is None:
        return train(Survivor(0, Copies(None), every, Link()))
    _require_no_devices()
    return SupervisedProcess(train, every, allowed, in_process, supervisor).run()


def _check_options(
    every: int, processes: Collection[int] | None, in_process: bool | None
) -> tuple[int, list[int] | None]:
    """Returns `every`, and the allowed numbers of processes, ascending; None for any number."""
    try:
        commits_per_copy = operator.index(every)  # also of NumPy
        allowed = None if processes is None else sorted(set(map(operator.index, processes)))
    except TypeError:
        commits_per_copy, allowed = 0, None
    if commits_per_copy < 1 or (allowed is not None and (not allowed or allowed[0] < 1)):
        raise ValueError(
            f"survive(every={every!r}, processes={processes!r}): every and processes must be "
            f"whole numbers of at least 1."
        )
    if in_process is False and (why := restart_in_place.why_not_supported()):
        raise ValueError(f"survive(in_process=False) is not supported: {why}. Omit in_process.")
    return commits_per_copy, allowed


def _require_no_devices() -> None:
    if emulation.has_backend():
        raise RuntimeError(
            "survive() was called after JAX started the devices of this process, which would not "
            "be the devices of the run. Create arrays and strategies only inside the function "
            "that survive() calls."
        )
