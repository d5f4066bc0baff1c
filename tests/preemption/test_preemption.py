"""One process that receives real signals to end: its saves and its exit."""

import gc
import http.server
import os
import resource
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from tpudist import step_boundaries
from tpudist.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from tpudist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from tpudist.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from tpudist.preemption import gce, notice_listener


@pytest.fixture(autouse=True)
def sigterm_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(notice_listener, "_INTERVAL_S", 0.02)
    before = signal.getsignal(signal.SIGTERM)
    yield
    if signal.getsignal(signal.SIGTERM) != before:
        gc.collect()
    after = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert after == before


def go_on(handler, step=lambda: time.sleep(0.01)):
    """Calls of `run` until one of them raises."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        handler.run(step)


class Left(Exception):
    """An error that `exit_fn` raises if a test continues afterwards."""


def leave():
    raise Left


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def checkpoint_of(step=0):
    return Checkpoint(step=step, x=jnp.arange(4.0))


def handler_of(checkpoint, folder, **config):
    config.setdefault("exit_fn", leave)
    return PreemptionCheckpointHandler(None, checkpoint, folder, TerminationConfig(**config))


def saved_steps(folder):
    return CheckpointManager(checkpoint_of(), folder).steps


def train(handler, checkpoint, num_steps, signal_in=(), send=terminate):
    """Steps that are calls of `run`; the signal comes while one of them runs."""

    def step():
        if checkpoint.step + 1 in signal_in:
            send()
        checkpoint.step += 1
        checkpoint.x = checkpoint.x + 1

    while checkpoint.step < num_steps:
        handler.run(step)


def test_the_current_step_is_saved_and_the_process_exits_with_143(tmp_path):
    checkpoint = checkpoint_of()
    handler = PreemptionCheckpointHandler(None, checkpoint, tmp_path)
    with pytest.raises(SystemExit) as exited:
        train(handler, checkpoint, 9, signal_in=[5])
    assert exited.value.code == 143
    assert checkpoint.step == 5
    terminate()  # a second one, in a `finally` block: it does not cut that short
    handler.close()

    again = checkpoint_of()
    handler = PreemptionCheckpointHandler(None, again, tmp_path)
    assert (again.step, handler.total_run_calls) == (5, 5)
    np.testing.assert_array_equal(again.x, checkpoint.x)
    train(handler, again, 9)
    assert handler.total_run_calls == 9
    handler.close()


def test_a_loop_over_a_dataset_continues_at_the_next_element(tmp_path):
    strategy = tpudist.MirroredStrategy()
    dataset = tpudist.input.NumpyDataset(np.arange(160)).shuffle(seed=3).batch(16).repeat(2)

    def run(signal_after):
        seen = []
        batches = iter(strategy.experimental_distribute_dataset(dataset))
        state = tpudist.TrainState(batches=batches)
        handler = handler_of(CheckpointManager(state, tmp_path), None)
        try:
            for batch in state.batches:
                seen.append(np.sort(strategy.gather(batch, axis=0)).tolist())
                state.step += 1
                if state.step == signal_after:
                    terminate()
        except Left:
            seen.append("left")
        handler.close()
        return seen

    first, second, third = run(3), run(11), run(None)
    assert first[-1] == second[-1] == "left"
    assert [len(x) for x in (first, second, third)] == [4, 9, 9]
    expected = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        expected.append(np.sort(strategy.gather(batch, axis=0)).tolist())
    assert [*first[:-1], *second[:-1], *third] == expected


def test_a_notice_also_ends_an_evaluation(tmp_path):
    """If only the training loop polled, a notice during an evaluation would lose the run."""
    strategy = tpudist.MirroredStrategy()
    dataset = tpudist.input.NumpyDataset(np.arange(80)).batch(8)
    dataset = strategy.experimental_distribute_dataset(dataset)
    state = tpudist.TrainState(batches=iter(dataset))
    handler = handler_of(CheckpointManager(state, tmp_path), None)
    for _ in range(3):
        next(state.batches)
        state.step += 1
    evaluated = 0
    try:
        for _ in dataset:
            evaluated += 1
            if evaluated == 2:
                terminate()
    except Left:
        evaluated += 100
    assert evaluated == 102
    assert saved_steps(tmp_path) == [3]
    handler.close()


def test_a_signal_before_the_first_or_after_the_last_step_counts(tmp_path):
    checkpoint = checkpoint_of()
    handler = handler_of(checkpoint, tmp_path)
    terminate()
    with pytest.raises(Left):
        train(handler, checkpoint, 3)
    assert (checkpoint.step, saved_steps(tmp_path)) == (0, [0])

    handler = handler_of(checkpoint, tmp_path)
    with pytest.raises(Left), handler.watch_preemption_scope():
        train(handler, checkpoint, 3, signal_in=[3])
    assert (checkpoint.step, saved_steps(tmp_path)) == (3, [0, 3])
    handler.close()


def test_an_error_in_the_scope_is_raised(tmp_path):
    handler = handler_of(checkpoint_of(), tmp_path)
    terminate()
    with pytest.raises(KeyError), handler.watch_preemption_scope():
        raise KeyError
    assert saved_steps(tmp_path) == []
    handler.close()


def test_a_call_of_run_with_a_new_element_is_not_a_boundary(tmp_path):
    """Saved there, the element would be taken and not used."""
    strategy = tpudist.MirroredStrategy()
    dataset = tpudist.input.NumpyDataset(np.arange(80)).batch(8)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    state = tpudist.TrainState(batches=batches)
    handler = handler_of(CheckpointManager(state, tmp_path), None)
    used = []

    def take(after=None):
        batch = next(batches)
        if after == len(used):
            terminate()
        return batch

    def step(batch):
        used.append(strategy.gather(batch, axis=0)[0].item())
        state.step += 1

    def train():
        while True:
            handler.run(step, take(after=4))

    with pytest.raises(Left):
        train()
    assert used == [0, 8, 16, 24, 32]
    assert batches.get_state() == state.batches.get_state()
    handler.close()

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    state = tpudist.TrainState(batches=batches)
    handler = handler_of(CheckpointManager(state, tmp_path), None)
    step(next(batches))
    assert (used[-1], state.step, handler.total_run_calls) == (40, 6, 5)
    handler.close()


def test_a_signal_during_a_save_or_a_second_one_changes_nothing(tmp_path):
    checkpoint = checkpoint_of()
    manager = CheckpointManager(checkpoint, tmp_path)

    def save():
        terminate()
        manager.save()
        terminate()
        manager.wait()

    handler = handler_of(manager, None, save_fn=save)
    with pytest.raises(Left):
        train(handler, checkpoint, 9, signal_in=[2], send=lambda: [terminate(), terminate()])
    assert saved_steps(tmp_path) == [2]
    handler.close()


def test_a_running_save_is_waited_for(tmp_path):
    checkpoint = Checkpoint(step=1, x=jnp.zeros(4_000_000))
    manager = CheckpointManager(checkpoint, tmp_path)
    handler = handler_of(manager, None)
    manager.save()
    terminate()
    checkpoint.step = 2
    with pytest.raises(Left):
        step_boundaries.poll()
    assert manager.steps == [1, 2]
    handler.close()


def test_a_save_is_repeated_after_a_failed_one(tmp_path, caplog):
    checkpoint = Checkpoint(step=1, x=np.random.default_rng(0).normal(size=500_000))
    manager = CheckpointManager(checkpoint, tmp_path)
    handler = handler_of(manager, None)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, unlimited[1]))  # the disk is as good as full
    try:
        manager.save()
        while any(t.name == "tpudist-checkpoint-1" for t in threading.enumerate()):
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    terminate()
    with pytest.raises(Left):
        step_boundaries.poll()
    assert manager.steps == [1]
    assert "step 1 could not be saved" in caplog.text
    handler.close()


def test_a_saved_step_is_not_saved_again(tmp_path):
    checkpoint = checkpoint_of(step=4)
    manager = CheckpointManager(checkpoint, tmp_path)
    handler = handler_of(manager, None)
    manager.save()
    terminate()
    with pytest.raises(Left):
        step_boundaries.poll()
    assert manager.steps == [4]
    handler.close()


def test_the_save_ignores_the_interval_and_passes_arguments(tmp_path):
    checkpoint = checkpoint_of(step=4)
    manager = CheckpointManager(checkpoint, tmp_path, checkpoint_interval=100)
    handler = handler_of(manager, None)
    manager.save()
    checkpoint.step = 5
    terminate()
    with pytest.raises(Left):
        step_boundaries.poll()
    handler.close()
    handler = handler_of(manager, None)
    handler.save_checkpoint_if_preempted(checkpoint_number=70)
    terminate()
    with pytest.raises(Left):
        handler.save_checkpoint_if_preempted(checkpoint_number=71)
    assert manager.steps == [4, 5, 71]
    assert handler.total_run_calls == 1
    handler.close()


def test_saves_of_the_program_contain_the_calls_of_run(tmp_path):
    checkpoint = checkpoint_of()
    manager = CheckpointManager(checkpoint, tmp_path)
    handler = PreemptionCheckpointHandler(None, manager)
    for _ in range(3):
        handler.run(lambda: None)
    manager.save(1)
    manager.close()
    handler.close()
    handler = handler_of(checkpoint, tmp_path)
    assert handler.total_run_calls == 3
    handler.close()


def test_a_state_that_cannot_be_saved_raises_and_does_not_exit(tmp_path):
    """A supervisor that saw 143 would take the state for saved."""
    checkpoint = checkpoint_of()
    handler = handler_of(checkpoint, tmp_path)
    checkpoint.x = checkpoint.x * jnp.nan
    terminate()
    with pytest.raises(CheckpointError, match="1 array contains NaN"):
        step_boundaries.poll()
    handler.close()


def test_training_continues_if_exit_fn_returns(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    checkpoint, exits = checkpoint_of(), []
    handler = handler_of(checkpoint, tmp_path, exit_fn=lambda: exits.append(checkpoint.step))
    train(handler, checkpoint, 5, signal_in=[2])
    assert (checkpoint.step, exits) == (5, [2])
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_previous_handler_is_called_and_its_exit_is_ignored(tmp_path):
    calls = []

    def own(number, frame):
        calls.append(number)
        raise SystemExit(7)

    before = signal.signal(signal.SIGTERM, own)
    try:
        checkpoint = checkpoint_of()
        handler = handler_of(checkpoint, tmp_path)
        with pytest.raises(Left):
            train(handler, checkpoint, 5, signal_in=[2])
        assert calls == [signal.SIGTERM]
        assert saved_steps(tmp_path) == [2]
        handler.close()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_closed_handler_below_another_forwards_the_signal(tmp_path):
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("own"))
    try:
        handler = handler_of(checkpoint_of(), tmp_path)
        ours = signal.getsignal(signal.SIGTERM)

        def above(number, frame):
            calls.append("above")
            ours(number, frame)

        signal.signal(signal.SIGTERM, above)
        handler.close()
        terminate()
        assert calls == ["above", "own"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_deleted_handler_restores_sigterm(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    handler = handler_of(checkpoint_of(), tmp_path)
    assert signal.getsignal(signal.SIGTERM) != before
    del handler
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # the child does nothing with JAX
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_ended_by_sigterm(tmp_path):
    """`terminate()` of multiprocessing and of data loaders is one."""
    handler = handler_of(checkpoint_of(), tmp_path)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sender, b"x")  # Python forgets the signals that come before its fork has ended
        time.sleep(60)
        os._exit(0)
    os.read(receiver, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    os.close(receiver)
    os.close(sender)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    handler.close()


def test_ctrl_c_is_not_changed(tmp_path):
    checkpoint = checkpoint_of()
    handler = handler_of(checkpoint, tmp_path)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        train(handler, checkpoint, 5, signal_in=[2], send=interrupt)
    assert saved_steps(tmp_path) == []
    handler.close()


def test_a_watcher_function_ends_the_run_from_its_thread(tmp_path):
    checkpoint, threads = checkpoint_of(), []
    told = threading.Event()

    def watcher_fn():
        threads.append(threading.current_thread().name)
        return told.is_set()

    handler = handler_of(checkpoint, tmp_path, termination_watcher_fn=watcher_fn)
    train(handler, checkpoint, 3)
    told.set()
    with pytest.raises(Left):
        go_on(handler)
    assert saved_steps(tmp_path) == [3]
    assert set(threads) == {"termination watcher"}
    handler.close()
    assert "termination watcher" not in {t.name for t in threading.enumerate()}


def test_the_next_step_raises_the_error_of_a_watcher_function(tmp_path):
    """If the error were ignored, the run would be lost with the machine."""

    def watcher_fn():
        raise LookupError("no such file")

    handler = handler_of(checkpoint_of(), tmp_path, termination_watcher_fn=watcher_fn)
    with pytest.raises(RuntimeError, match="raised LookupError.*no such file.*return False"):
        go_on(handler)
    handler.close()


def test_a_grace_period_saves_at_once_and_before_the_end(tmp_path):
    checkpoint = checkpoint_of()
    handler = handler_of(checkpoint, tmp_path, grace_period=1.5)

    told_at = stepped_at = 0.0

    def step():
        nonlocal told_at, stepped_at
        time.sleep(0.02)
        checkpoint.step += 1
        stepped_at = time.monotonic()
        if checkpoint.step == 2:
            told_at = stepped_at
            terminate()

    with pytest.raises(Left):
        go_on(handler, step)
    assert stepped_at < told_at + 1.5
    first, last = saved_steps(tmp_path)
    assert first == 2
    assert last == checkpoint.step > 3
    handler.close()


def test_sigterm_shortens_a_grace_period(tmp_path):
    checkpoint = checkpoint_of()
    handler = handler_of(
        checkpoint, tmp_path, termination_watcher_fn=lambda: checkpoint.step > 1, grace_period=60
    )

    def step():
        time.sleep(0.02)
        checkpoint.step += 1
        if len(saved_steps(tmp_path)) == 1:
            terminate()

    with pytest.raises(Left):
        go_on(handler, step)
    first, last = saved_steps(tmp_path)
    assert last == first + 1
    handler.close()


class Metadata(http.server.BaseHTTPRequestHandler):
    """A server that answers like the metadata server of Google's cloud."""

    answers: dict[str, str]

    def do_GET(self):
        known = self.answers.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
        fits = known is not None and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if fits else 403)
        self.end_headers()
        self.wfile.write((known or "").encode() if fits else b"")

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata(monkeypatch):
    """A server on this machine, and its answers."""
    Metadata.answers = {"preempted": "FALSE", "maintenance-event": "NONE"}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # to be left alone
    yield Metadata.answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("what", "value", "why"),
    [
        ("preempted", "TRUE", gce.PREEMPTED),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", gce.MAINTENANCE),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),
    ],
)
def test_the_metadata_server_returns_a_reason(metadata, what, value, why):
    assert gce.is_gce()
    watcher = gce.MetadataWatcher()
    assert watcher() is None
    metadata[what] = value
    assert watcher() == why


def test_on_googles_cloud_the_metadata_server_ends_the_run(metadata, tmp_path):
    checkpoint = checkpoint_of()
    handler = handler_of(checkpoint, tmp_path)
    train(handler, checkpoint, 3)
    metadata["preempted"] = "TRUE"
    with pytest.raises(Left):
        go_on(handler)
    assert saved_steps(tmp_path) == [3]
    handler.close()


def test_a_silent_metadata_server_causes_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    watcher = gce.MetadataWatcher()
    assert [watcher() for _ in range(25)] == [None] * 25
    (warning,) = caplog.records
    assert "did not answer 10 times" in warning.message


def test_a_watcher_has_a_message_after_the_signal():
    watcher = PreemptionWatcher()
    watcher.block_until_worker_exit()  # there is nobody to wait for
    assert watcher.preemption_message is None
    terminate()
    assert watcher.preemption_message.startswith("process 0 must end: SIGTERM (")
    watcher.block_until_worker_exit()  # nor for itself
    watcher.close()


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((None, checkpoint_of()), ValueError, "a checkpoint_dir must be passed as well"),
        ((None, {"step": 1}, "x"), TypeError, "cannot save dict"),
        (
            (
                SimpleClusterResolver(ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})),
                checkpoint_of(),
            ),
            NotImplementedError,
            "cluster with parameter servers",
        ),
    ],
)
def test_invalid_arguments_of_a_handler_raise(args, error, words):
    with pytest.raises(error, match=words):
        PreemptionCheckpointHandler(*args)


def test_a_directory_in_addition_to_a_manager_warns(tmp_path):
    manager = CheckpointManager(checkpoint_of(), tmp_path)
    with pytest.warns(UserWarning, match="has its own directory"):
        PreemptionCheckpointHandler(None, manager, "elsewhere").close()


def test_outside_of_the_main_thread_a_watcher_function_is_needed(tmp_path):
    found = []

    def make(**config):
        try:
            handler_of(checkpoint_of(), tmp_path, **config).close()
        except ValueError as error:
            found.append(str(error))

    for config in ({}, {"termination_watcher_fn": lambda: False}):
        thread = threading.Thread(target=make, kwargs=config, name="mine")
        thread.start()
        thread.join()
    (message,) = found
    assert "but this is thread 'mine'" in message
    assert "pass a termination_watcher_fn to TerminationConfig" in message


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"exit_fn": 143}, TypeError, r"exit_fn=143\): exit_fn must be a function"),
        ({"termination_watcher_fn": True}, TypeError, "termination_watcher_fn=True"),
        ({"save_fn": "x"}, TypeError, "save_fn='x'"),
        ({"grace_period": -1}, ValueError, "grace_period=-1.* of at least 0"),
        ({"grace_period": float("inf")}, ValueError, "grace_period=inf"),
        ({"grace_period": "1h"}, ValueError, "grace_period='1h'"),
        ({"grace_period": True}, ValueError, "grace_period=True"),
    ],
)
def test_an_invalid_config_raises(config, error, words):
    with pytest.raises(error, match=words):
        TerminationConfig(**config)
