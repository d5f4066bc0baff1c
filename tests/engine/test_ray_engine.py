"""RayEngine: processes that are killed from outside, tokens, lines, and leftovers."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from process_trees import are_gone, descendants
from tpudist.engine.engine import ActorDied
from tpudist.engine.ray import ray_calls, ray_session
from tpudist.engine.ray.ray_engine import RayEngine

slow = pytest.mark.slow


@pytest.fixture
def engine(running_ray, strangers):
    engine = RayEngine()
    yield engine
    engine.shutdown()


class Part:
    """An actor that tests manipulate."""

    def __init__(self):
        self.seen = []

    def pid(self):
        return os.getpid()

    def add(self, x):
        self.seen.append(x)
        return len(self.seen)

    def nap(self, seconds):
        time.sleep(seconds)

    def ask(self, engine, other, method, *args):
        return engine.result(engine.call(other, method, *args))

    def use(self, engine, what, *args):
        getattr(engine, what)(*args)

    def variable(self, name):
        return os.environ.get(name)

    def fail(self, error):
        raise error


def spawn(engine, *roles):
    actors = [engine.spawn(role, 0, Part) for role in roles]
    pids = [engine.result(engine.call(x, "pid")) for x in actors]
    return [x for pair in zip(actors, pids, strict=True) for x in pair]


# Without Ray.


def test_tpudist_does_not_import_ray():
    code = "import sys, tpudist; print([x for x in sys.modules if 'ray' in x.split('.')[-1]])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'ray'" not in done.stdout
    assert "ray_engine" not in done.stdout


def test_missing_ray_raises_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tpudist\[ray\]'"):
        RayEngine().start()


def test_resources_accept_only_options_of_placement():
    RayEngine(resources={"worker": {"num_cpus": 1, "resources": {"TPU": 4}}})
    with pytest.raises(
        ValueError, match=r"of 'ps' have unknown names: max_restarts, name. Only these .*num_cpus"
    ):
        RayEngine(resources={"ps": {"num_cpus": 1, "name": "x", "max_restarts": 3}})


def test_ray_without_tokens_raises_an_error(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_session, "import_ray", lambda: pytest.fail("Ray was imported"))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(RuntimeError, match="RAY_AUTH_MODE='disabled': everyone who can reach"):
        RayEngine().start()


def test_a_readable_token_file_is_a_warning(monkeypatch, tmp_path, caplog):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    file = tmp_path / "token"
    monkeypatch.setattr(ray_session, "_TOKEN_FILE", file)
    with pytest.raises(
        RuntimeError, match="No token for Ray at 10.0.0.1:6379 was found: it is in RAY_AUTH_T"
    ):
        ray_session.choose_token("10.0.0.1:6379", was_imported=False)
    ray_session.choose_token(None, was_imported=False)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ.pop("RAY_AUTH_TOKEN")) == 64
    file.write_text("secret")
    file.chmod(0o644)
    ray_session.choose_token(None, was_imported=True)
    assert f"Other users can read {file}" in caplog.text
    caplog.clear()
    file.chmod(0o600)
    ray_session.choose_token(None, was_imported=True)
    assert caplog.text == ""
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_ray_that_was_imported_too_early_raises_an_error(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(RuntimeError, match="imported before the engine .* for 10.0.0.1:6379"):
        ray_session.choose_token("10.0.0.1:6379", was_imported=True)


def test_the_folder_is_private_and_its_name_short(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 50)))
    folder = ray_session.make_folder()
    assert folder.parent == Path("/tmp")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


# Actors that die.


def test_calls_of_a_process_killed_from_outside_raise_actor_died(engine):
    worker, pid, shard, _ = spawn(engine, "worker", "ps")
    napping = [engine.call(worker, "nap", 60), *(engine.call(worker, "add", i) for i in range(9))]
    asking = engine.call(shard, "ask", engine, worker, "add", 9)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for future in (*napping, asking, engine.call(worker, "add", 10)):
        with pytest.raises(ActorDied, match="worker 0 has died: The actor died") as caught:
            engine.result(future)
        assert caught.value.actor == worker
    assert time.monotonic() - began < 30
    engine.kill(worker)
    again = engine.spawn("worker", 0, Part)
    assert again.incarnation == 1
    assert engine.result(engine.call(again, "add", 1)) == 1


@slow
def test_a_hanging_process_is_killed(engine):
    worker, pid = spawn(engine, "worker")
    os.kill(pid, signal.SIGSTOP)
    future = engine.call(worker, "add", 1)
    began = time.monotonic()
    engine.kill(worker, "it hangs")
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(ActorDied, match="worker 0 has died: it hangs"):
        engine.result(future)
    assert time.monotonic() - began < 30


def test_shutdown_raises_actor_died_in_waiting_callers(engine):
    worker, pid = spawn(engine, "worker")
    found = []

    def wait():
        with pytest.raises(ActorDied, match="the engine was shut down") as caught:
            engine.result(engine.call(worker, "nap", 60))
        found.append(caught.value.actor)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    engine.shutdown()
    thread.join(5)
    assert found == [worker]
    assert not os.path.exists(f"/proc/{pid}")


@slow
@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        (
            "ActorUnavailableError",
            ("no route", None),
            r"it was unreachable, so it was killed.*no ro",
        ),
        ("NodeDiedError", ("the machine is gone",), "NodeDiedError: the machine is gone"),
    ],
)
def test_an_unreachable_actor_is_killed(engine, monkeypatch, name, args, why):
    import ray

    worker, pid = spawn(engine, "worker")
    future = engine.ping(worker)  # which goes through Ray, like all calls without a line
    with monkeypatch.context() as context:
        error = getattr(ray.exceptions, name)(*args)
        context.setattr(ray, "get", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(ActorDied, match=f"(?s)worker 0 has died: {why}"):
            engine.result(future)
    if name == "ActorUnavailableError":
        end_s = time.monotonic() + 5
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end_s:
            time.sleep(0.02)
        assert not os.path.exists(f"/proc/{pid}")


# Calls that do not go by Ray.


def call_by_line(engine, actor):
    """Calls until a call uses a line."""
    end_s = time.monotonic() + 30
    while (future := engine.call(actor, "add", 1)).line is None:
        engine.result(future)
        assert time.monotonic() < end_s
    return future


@slow
def test_the_end_of_a_line_kills_its_actor(engine):
    """A call may still run in it, and a later call could overtake it."""
    worker, pid = spawn(engine, "worker")
    future = call_by_line(engine, worker)
    assert engine.result(future) > 0
    future.line._line._socket.shutdown(socket.SHUT_RDWR)
    why = "the connection to it ended, Ray says that it lives, and it was killed"
    for later in (engine.call(worker, "add", 2), engine.call(worker, "add", 3)):
        with pytest.raises(ActorDied, match=f"worker 0 has died: {why}"):
            engine.result(later)
    assert engine.result(future) > 0
    end_s = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


@slow
def test_waiting_callers_ask_ray_whether_the_actor_is_alive(engine, monkeypatch):
    """A line does not notice that a machine is gone."""
    monkeypatch.setattr(ray_calls, "PING_EVERY_S", 0.05)
    worker, _ = spawn(engine, "worker")
    engine.result(call_by_line(engine, worker))
    pings, ping = [], ray_calls.RayCalls.ping
    monkeypatch.setattr(ray_calls.RayCalls, "ping", lambda *a: pings.append(1) or ping(*a))
    engine.result(engine.call(worker, "nap", 0.5))
    assert len(pings) > 1
    napping = engine.call(worker, "nap", 60)

    def find_dead(self, ping, timeout_s):
        raise self._death(ping.actor, "its machine is gone")

    monkeypatch.setattr(ray_calls.RayCalls, "_ask", find_dead)
    with pytest.raises(ActorDied, match="worker 0 has died: its machine is gone"):
        engine.result(napping)


@slow
def test_actors_without_a_line_are_called_through_ray(engine, monkeypatch, caplog):
    def refuse(*args):
        raise TimeoutError("a firewall")

    monkeypatch.setattr(ray_calls, "CallLine", refuse)
    worker, _ = spawn(engine, "worker")
    end_s = time.monotonic() + 30
    while "slower than a direct connection: no process answers at" not in caplog.text:
        engine.result(engine.call(worker, "add", 1))
        assert time.monotonic() < end_s
    future = engine.call(worker, "add", 1)
    assert future.reference is not None
    assert engine.result(future) > 1
    assert caplog.text.count("a firewall") == 1


# What crosses to other processes.


class Unreadable(Exception):
    """An error that can be pickled, but not read."""

    def __init__(self, row, column):
        super().__init__(f"row {row}, column {column}")


@slow
def test_errors_name_the_object_that_cannot_be_sent(engine):
    worker, _ = spawn(engine, "worker")
    lock = threading.Lock()
    match = r"Argument 1 of add of worker 0 cannot be sent to another process: .*lock"
    with pytest.raises(TypeError, match=match):
        engine.call(worker, "add", 1, lock)
    with pytest.raises(TypeError, match="Argument 0 of put cannot be sent"):
        engine.put(lock)
    with pytest.raises(TypeError, match="Argument 1 of the factory of ps 0 cannot be sent"):
        engine.spawn("ps", 0, Part, lock)
    assert engine.spawn("ps", 0, Part).incarnation == 0
    asked = engine.call(worker, "fail", ValueError("a row", "a column"))
    with pytest.raises(ValueError, match="a row") as caught:
        engine.result(asked)
    assert type(caught.value) is ValueError
    assert "Raised on worker 0.\nTraceback" in caught.value.__notes__[0]

    class Row:
        def fail(self):
            raise Unreadable(1, 2)

        def lock(self):
            return threading.Lock()

    row = engine.spawn("row", 0, Row)
    with pytest.raises(RuntimeError, match=r"(?s)Unreadable, which cannot be pickled.*row 1, col"):
        engine.result(engine.call(row, "fail"))
    with pytest.raises(TypeError, match="cannot pickle"):
        engine.result(engine.call(row, "lock"))


@slow
def test_the_engine_in_an_actor_only_calls(engine):
    worker, _, shard, _ = spawn(engine, "worker", "ps")
    assert engine.result(engine.call(worker, "ask", engine, shard, "add", 1)) == 1
    for what, args in (("spawn", ("ps", 1, Part)), ("kill", (shard,)), ("shutdown", ())):
        with pytest.raises(RuntimeError, match="An engine in an actor cannot"):
            engine.result(engine.call(worker, "use", engine, what, *args))
    member = pickle.loads(pickle.dumps(engine))
    assert member.result(member.call(shard, "add", member.put(2))) == 2
    member.start()
    again = pickle.loads(pickle.dumps(member))
    assert again.result(again.call(shard, "add", 3)) == 3


@slow
def test_actors_get_the_environment_of_the_program(running_ray, monkeypatch):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    engine = RayEngine(environment={"XLA_FLAGS": "", "COLOUR": "blue"})
    actor = engine.spawn("worker", 0, Part)
    names = ("JAX_TRACEBACK_FILTERING", "XLA_FLAGS", "COLOUR")
    found = [engine.result(engine.call(actor, "variable", x)) for x in names]
    assert found == ["off", "", "blue"]
    engine.shutdown()


# Tokens, and leftovers.

JOIN = """
import sys, ray
from tpudist.engine.ray.ray_engine import RayEngine

def make():
    import os
    class Here:
        def pid(self): return os.getpid()
    return Here()

if __name__ == "__main__":
    engine = RayEngine(sys.argv[1])
    engine.start()
    actor = engine.spawn("worker", 0, make)
    print(engine.result(engine.call(actor, "pid")))
    engine.shutdown()
    assert not ray.is_initialized()
"""


def start(folder, *command, **variables):
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


@pytest.fixture(scope="module")
def strangers(running_ray, tmp_path_factory):
    """Programs without the token. Ray lets them try for 20 s, during which other tests run."""
    import ray

    folder = tmp_path_factory.mktemp("strangers")
    (folder / "join.py").write_text(JOIN)
    address = ray.get_runtime_context().gcs_address
    no_token = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "", "HOME": str(folder)}
    programs = [
        start(folder, "join.py", address, RAY_AUTH_TOKEN="0" * 64),
        start(folder, "-c", f"import ray; ray.init({address!r}); print('joined')", **no_token),
    ]
    yield programs
    for program in programs:
        program.kill()
        program.wait()
        program.stdout.close()
        program.stderr.close()


@slow
def test_joining_ray_needs_the_token_and_leaves_ray_running(engine, strangers, tmp_path):
    import ray

    (tmp_path / "join.py").write_text(JOIN)
    address = ray.get_runtime_context().gcs_address
    worker, pid = spawn(engine, "worker")
    program = start(tmp_path, "join.py", address)
    out, error = program.communicate(timeout=100)
    assert program.returncode == 0, error
    assert not os.path.exists(f"/proc/{out.strip()}")
    told = [x.communicate(timeout=100) for x in strangers]
    assert [x.returncode for x in strangers] == [1, 1]
    assert [out for out, _ in told] == ["", ""]
    assert f"Ray at {address}: it does not answer, or it has" in told[0][1]
    assert engine.result(engine.call(worker, "pid")) == pid


PROGRAM = """
import os, signal, sys
before = signal.getsignal(signal.SIGTERM)
if sys.argv[1] == "imports ray":
    import ray
from tpudist.engine.ray.ray_engine import RayEngine

class Part:
    def pid(self):
        return os.getpid()

if __name__ == "__main__":
    engine = RayEngine()
    actors = [engine.spawn("worker", i, Part) for i in range(2)]
    pids = [engine.result(engine.call(x, "pid")) for x in actors]
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert signal.getsignal(signal.SIGTERM) is before
    os.kill(pids[0], signal.SIGSTOP)
    print("ready", flush=True)
    sys.stdin.readline()
    engine.shutdown()
    engine.shutdown()
    engine.kill(actors[1])
    import ray
    assert not ray.is_initialized()  # as `ray.get` would do
    print("over", flush=True)
    sys.stdin.readline()
"""


@slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("needs_ray")
@pytest.mark.parametrize("ray", ["imports ray", "imports no ray"])
@pytest.mark.parametrize("end", ["shutdown", "SIGKILL", "SIGTERM"])
def test_a_program_leaves_no_processes_and_files(tmp_path, end, ray):
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = Path(tempfile.mkdtemp(prefix="left", dir="/tmp"))
    without = {x: value for x, value in os.environ.items() if not x.startswith("RAY_")}
    program = subprocess.Popen(
        [sys.executable, "program.py", ray],
        cwd=tmp_path,
        env=without | {"TMPDIR": str(folder), "HOME": str(tmp_path / "home")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with program:
        assert program.stdout.readline() == "ready\n", program.stderr.read()
        started = descendants(program.pid)
        assert len(started) > 8  # the guard, the services of Ray, two actors
        assert os.listdir(folder)
        if end == "shutdown":
            program.stdin.write("\n")
            assert program.stdout.readline() == "over\n"
            assert are_gone(started, within_s=0)
            assert os.listdir(folder) == []
            program.stdin.write("\n")
        else:
            program.send_signal(getattr(signal, end))
        program.wait(30)
    assert are_gone(started, within_s=15)
    assert os.listdir(folder) == []
    assert not (tmp_path / "home").exists()  # where Ray keeps a token
    folder.rmdir()
