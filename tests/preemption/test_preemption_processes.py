"""Two processes, one of which receives real signals to end: both save the same step."""

import signal

import pytest

from processes import run_processes, start_processes

pytestmark = pytest.mark.multiprocess

TRAINING = """
    import sys, time
    import jax
    import numpy as np
    import tpudist
    from processes import report, say

    folder, phase = sys.argv[1:]
    tpudist.emulate()
    strategy = tpudist.MultiWorkerMirroredStrategy()
    me = jax.process_index()
    dataset = tpudist.input.NumpyDataset(np.arange(16 * 30)).shuffle(seed=3).batch(16)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        total = tpudist.Variable(0)
    state = tpudist.TrainState(total=total, batches=iter(dataset))
    manager = tpudist.checkpoint.CheckpointManager(state, folder)
    handler = tpudist.experimental.PreemptionCheckpointHandler(None, manager)
    seen, start = [], state.step
    evaluated = 0

    def step(ids):
        total.assign_add(strategy_sum(ids))
        return strategy_sum(ids)

    def strategy_sum(ids):
        return tpudist.get_replica_context().all_reduce("SUM", ids.sum())

    try:
        for batch in state.batches:
            seen.append(int(strategy.run(step, args=(batch,))))
            state.step += 1
            if phase == "training":
                time.sleep(0.05 * me)  # so that one is ahead of the other
                if state.step == 4:
                    say("training")
            if phase == "evaluation" and state.step == start + 3:
                for _ in range(100):
                    for batch in dataset:
                        evaluated += 1
                        time.sleep(0.02)
                        if evaluated == 5:
                            say("evaluation")
    finally:
        report({
            "start": start, "step": state.step, "seen": seen, "evaluated": evaluated,
            "total": int(total.read_value()),
        })
"""


@pytest.mark.slow
def test_both_save_the_same_step_exit_with_143_and_continue_at_the_next(tmp_path):
    def run(phase, victim=None):
        with start_processes(TRAINING, args=[str(tmp_path / "run"), phase]) as running:
            if victim is None:
                return [x.result for x in running.wait()]
            running.wait_until_said(victim, phase)
            running.signal(victim, signal.SIGTERM)
            return [x.result for x in running.wait(exit_codes=(143,))]

    runs = [run("training", victim=1), run("evaluation", victim=0), run("to the end")]
    for first, second in runs:
        assert first == second
    training, evaluation, rest = [first for first, _ in runs]
    assert training["start"] == 0
    assert 4 <= training["step"] < 30
    assert evaluation["start"] == training["step"]
    assert evaluation["step"] == evaluation["start"] + 3
    assert 5 <= evaluation["evaluated"] < 200
    assert rest["start"] == evaluation["step"]
    assert rest["step"] == 30
    assert rest["total"] == sum(range(16 * 30))  # each example once
    seen = [x for run in (training, evaluation, rest) for x in run["seen"]]
    assert len(seen) == 30
    assert sum(seen) == rest["total"]


def test_notices_of_one_process_reach_the_other(tmp_path):
    """A watcher function with a grace period, a process that has ended, and only a watcher."""
    program = f"""
        import os, signal, time
        import jax
        import tpudist
        from processes import report
        from tpudist.checkpoint import Checkpoint, CheckpointManager
        from tpudist.experimental import (
            PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig,
        )

        tpudist.emulate()
        strategy = tpudist.MultiWorkerMirroredStrategy()
        me = jax.process_index()
        found, steps = {{}}, []

        class Left(Exception):
            pass

        def leave():
            raise Left

        def handler_of(name, **config):
            checkpoint = Checkpoint(step=0)
            manager = CheckpointManager(checkpoint, {str(tmp_path)!r} + "/" + name)
            config = TerminationConfig(exit_fn=leave, **config)
            return checkpoint, manager, PreemptionCheckpointHandler(None, manager, None, config)

        def step(checkpoint, most):
            strategy.run(lambda: tpudist.get_replica_context().all_reduce("SUM", 1.0))
            checkpoint.step += 1
            steps.append(checkpoint.step)
            time.sleep(0.01)
            return checkpoint.step < most

        # 1: the function of process 0 returns True, and the grace period is one second.
        checkpoint, manager, handler = handler_of(
            "grace",
            termination_watcher_fn=lambda: me == 0 and len(steps) > 3,
            grace_period=1.0,
        )
        try:
            while handler.run(step, checkpoint, 2000):
                pass
        except Left:
            found["grace"] = [checkpoint.step, manager.steps]
        handler.close()

        # 2: process 0 has finished its loops when process 1 is told to end.
        checkpoint, manager, handler = handler_of("ended")
        if me == 0:
            handler.close()
        else:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            start = time.monotonic()
            while time.monotonic() - start < 0.8:
                handler.save_checkpoint_if_preempted()
            handler.close()
        found["ended"] = manager.steps

        # 3: there is nobody but a watcher.
        watcher = PreemptionWatcher()
        if me == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while watcher.preemption_message is None:
            time.sleep(0.01)
        found["message"] = watcher.preemption_message
        start = time.monotonic()
        if me == 0:
            watcher.block_until_worker_exit()
        else:
            time.sleep(0.5)
        found["waited"] = time.monotonic() - start
        report(found)
        """
    first, second = [r.result for r in run_processes(program)]
    assert first["grace"] == second["grace"]
    last, (saved_first, saved_last) = first["grace"]
    assert 4 <= saved_first < saved_last == last
    assert first["ended"] == second["ended"] == []
    assert first["message"] == second["message"]
    assert first["message"].startswith("process 1 must end: SIGTERM (")
    assert first["waited"] > 0.25
