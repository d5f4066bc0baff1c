"""Output of a run: lines, metrics, curves, and the error messages of bad options."""

import io
import json
import os
import signal
import stat

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiment import arguments
from experiment.curves import draw_curves
from experiment.generate import printable
from experiment.summary import describe_placement
from tpudist.training import compilation_cache, display, metrics_writers
from tpudist.training.history import History
from tpudist.training.interrupt import StopOnInterrupt
from tpudist.training.metrics_writers import JsonLinesWriter, TensorBoardWriter, WandbWriter


@pytest.mark.parametrize(
    ("text", "axes"),
    [("", {}), ("fsdp=4", {"fsdp": 4}), (" fsdp=2, tensor = 2 ", {"fsdp": 2, "tensor": 2})],
)
def test_axes_are_read_from_text(text, axes):
    assert arguments.parse_axes(text) == axes


@pytest.mark.parametrize("text", ["fsdp", "fsdp=", "=4", "fsdp=0", "fsdp=two", "2=2"])
def test_parse_axes_rejects_malformed_text(text):
    with pytest.raises(ValueError, match="Write name=size, separated by commas"):
        arguments.parse_axes(text)


def test_parse_axes_rejects_a_repeated_axis():
    with pytest.raises(ValueError, match="has the axis 'fsdp' twice"):
        arguments.parse_axes("fsdp=2,fsdp=4")


def test_check_positive_names_the_option():
    arguments.check_positive({"steps": 1})
    with pytest.raises(ValueError, match="--steps is 0. It must be above 0"):
        arguments.check_positive({"batch-size": 8, "steps": 0})


def test_check_split_names_the_option_of_a_dim_that_its_axes_do_not_divide():
    rules = (("heads", "tensor"), ("batch", ("data", "fsdp")), ("layers", None))
    mesh_shape = {"replica": 1, "tensor": 8, "fsdp": 2, "data": 3}
    dims = {"num-layers": ("layers", 3), "batch": ("batch", 6), "other": ("unruled", 5)}
    arguments.check_split(dims, rules, mesh_shape)
    with pytest.raises(ValueError, match="--num-heads is 4. .* over tensor=8.* multiple of 8"):
        arguments.check_split(dims | {"num-heads": ("heads", 4)}, rules, mesh_shape)


def test_check_folder_creates_a_folder_or_raises_an_error(tmp_path, monkeypatch):
    assert arguments.check_folder(tmp_path / "new" / "run").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out .*: cannot create this folder"):
        arguments.check_folder(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="--out .*: no permission to write"):
        arguments.check_folder(tmp_path)


@pytest.mark.parametrize(("platforms", "found"), [("cpu", False), ("tpu,cpu", True)])
def test_jax_platforms_determines_has_accelerator(monkeypatch, platforms, found):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert arguments.has_accelerator() is found


def test_metrics_lines_are_flushed_immediately(tmp_path):
    writer = JsonLinesWriter(tmp_path)
    writer.begin(History())
    writer.write(3, "train", {"loss": 0.5})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    writer.close()
    assert line.pop("time_s") >= 0
    assert line == {"step": 3, "split": "train", "loss": 0.5}


def test_a_run_replaces_the_metrics_of_an_earlier_run_in_its_folder(tmp_path):
    """Otherwise TensorBoard would draw both runs as one curve."""
    for step in (1, 2):
        for writer in (JsonLinesWriter(tmp_path), TensorBoardWriter(tmp_path)):
            writer.begin(History())
            writer.write(step, "train", {"loss": 0.5})
            writer.sync()
            writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 2
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_tensorboard_writer_requires_tensorboardx(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_writers, "has_tensorboard", lambda: False)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboardX"):
        TensorBoardWriter(tmp_path)


def test_wandb_writer_logs_the_same_names_as_tensorboard():
    logged = []

    class Run:
        def log(self, values, step):
            logged.append((values, step))

    writer = WandbWriter(Run())
    writer.begin(History())
    writer.write(3, "train", {"loss": 0.5})
    writer.sync()
    writer.close()
    assert logged == [({"train/loss": 0.5}, 3)]
    with pytest.raises(
        TypeError, match=r"WandbWriter\(run=str\): this object has no log\(\). Pass"
    ):
        WandbWriter("my project")


@pytest.mark.parametrize("points", [[], [(1, 5.0), (2, 4.0), (3, 3.5)]])
def test_draw_curves_writes_a_picture(tmp_path, points):
    path = tmp_path / "curves.png"
    draw_curves(path, points, points[1:], {"uniform": 8.0}, unit="bits/byte", title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_pipe_receives_plain_lines(monkeypatch):
    out = io.StringIO()
    shown = display.make_display(40, file=out)
    shown.set_phase("compiling")
    monkeypatch.setattr(type(shown), "QUIET_S", 0)
    for step in range(1, 41):
        shown.update(step, "loss 2.500 bits/byte", "10,000 tokens/s", 83.0)
    shown.print_table("Finished", [("mesh", "replica 8"), ("step time", "20 ms")])
    shown.print_text("What it writes", "def ", "f():")
    shown.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 1/40  loss 2.500 bits/byte  10,000 tokens/s  1:23 left"
    assert sum(line.startswith("step ") for line in lines) == 21
    assert "  step time  20 ms" in lines
    assert "def f():" in lines
    assert "\x1b" not in out.getvalue()


def test_progress_lines_are_rate_limited():
    """A run with fast steps does not fill a log."""
    out = io.StringIO()
    shown = display.make_display(1000, file=out)
    for step in range(1, 1001):
        shown.update(step, "", "", None)
    assert out.getvalue() == "step 1/1000\nstep 1000/1000\n"


def test_a_terminal_shows_a_bar(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    shown = display.make_display(10, file=out)
    shown.update(5, "loss 2.500", "10 tokens/s", 83.0)
    shown.print("a line")
    shown.print_table("Finished", [("mesh", "replica 8")])
    shown.print_text("What it writes", "def ", "f[0]:")
    shown.close()
    for part in ("a line", "5/10", "1:23 left", "replica 8", "f[0]:"):
        assert part in out.getvalue()


def test_quiet_display_shows_nothing(capsys):
    shown = display.make_display(10, quiet=True)
    shown.set_phase("x")
    shown.print("x")
    shown.update(1, "x", "x", 1.0)
    shown.print_table("x", [("x", "x")])
    shown.print_text("x", "x", "x")
    shown.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "text"), [(3, "0:03"), (83, "1:23"), (3700, "1:01:40")])
def test_format_clock_shows_hours_only_if_needed(seconds, text):
    assert display.format_clock(seconds) == text


def test_the_first_interrupt_requests_a_stop_and_the_second_raises():
    pressed = []
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt(lambda: pressed.append(1)) as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        assert pressed == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_printable_removes_control_characters():
    assert (
        printable(b"a\tb\n\x1b[31m\xff")
        == "a\tb\n\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    )


def test_describe_placement_names_the_axes():
    mesh = jax.make_mesh((4, 2), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    split = jax.device_put(jnp.zeros((4, 256)), NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    whole = jax.device_put(jnp.zeros(25), NamedSharding(mesh, PartitionSpec()))
    assert (
        describe_placement({"a": split, "b": whole})
        == "4.00 KiB split over fsdp (2.00 KiB per device), 100 B replicated on 8 devices"
    )
    assert describe_placement(jnp.zeros(2)) == "8 B on 1 device"
    assert describe_placement({}) == "none"


def test_the_compilation_cache_is_private_to_the_user(tmp_path, monkeypatch):
    """The cache contains native code that JAX runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    try:
        folder = compilation_cache.enable_compilation_cache()
        assert folder is not None
        assert folder.is_relative_to(tmp_path)
        assert jax.config.jax_compilation_cache_dir == str(folder)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_compilation_cache_of_another_user_or_an_invalid_path_is_not_used(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("")
    assert compilation_cache.enable_compilation_cache(tmp_path / "file" / "cache") is None
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert compilation_cache.enable_compilation_cache(tmp_path / "cache") is None
    assert jax.config.jax_compilation_cache_dir == before
