"""The `tpudist` command: its output, its exit codes, and its errors."""

import ast
import dataclasses
import inspect
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tpudist
from experiment.config import ModelOptions
from maxtext_base import BASE
from places import DATA, PROGRAMS, ROOT
from tpudist import cli
from tpudist.cli import reference, user_step
from tpudist.models import TransformerConfig, read_config
from tpudist.models.presets import PRESETS, make_transformer
from tpudist.planner import Candidate, Plan, SearchResult
from tpudist.xla import topology
from tpudist.xla.hardware import slices
from tpudist.xla.hardware.announced_chips import ANNOUNCED
from tpudist.xla.hardware.chips import CHIPS

STEPS = str(PROGRAMS / "steps_to_plan.py")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Returns the plan cache of these tests."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path, kept):
    """Simulates a user with an empty home directory, a wide terminal and no TPU."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def plan(*options, step=f"{STEPS}:make_step", topology="v5e-4"):
    return cli.main(["plan", *([step] if step else []), "--topology", topology, *options])


def refusal(capsys, *options, **others):
    """Runs a command with a mistake; returns its one message."""
    assert plan(*options, **others) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tpudist: ")
    assert "Traceback" not in err
    return " ".join(err.split())


# Usage errors.


def test_version_prints_the_versions_of_a_bug_report(capsys):
    assert cli.main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"tpudist {tpudist.__version__}, jax {jax.__version__}, ")
    assert f", Python {platform.python_version()}, system " in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "--topolgy", "v5e-64"], "plan has no option --topolgy. Did you mean --topology?"),
        (["plan", "--no-cahce"], "Did you mean --no-cache?"),
        (["run", "--emulate", "x", "a.py"], "--emulate x: must be a whole number."),
        (["doctor", "--minutes=x"], "--minutes x: must be a number."),
        (["doctor", "nofolder"], "The folder nofolder does not exist in "),
    ],
)
def test_a_usage_error_is_one_line(args, message, capsys):
    assert cli.main(args) == cli.WRONG_USE
    found = capsys.readouterr().err
    assert found.startswith(f"tpudist: {message}") or message in found
    assert len(found.splitlines()) == 1


def test_help_is_also_a_command(capsys):
    for word in ("help", "--help"):
        assert cli.main([word]) == 0
    first, second = capsys.readouterr().out.split("usage: tpudist COMMAND")[1:]
    assert first == second
    assert all(f"  {name} " in first for name in cli.COMMANDS)
    assert max(map(len, first.splitlines())) <= 100
    assert cli.main([]) == cli.WRONG_USE
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main(["help", "topologies"])
    assert end.value.code == 0
    assert "usage: tpudist topologies" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_doctor_report_is_markdown_without_the_home_directory(capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(ROOT.parent))
    cli.main(["doctor", "--report", "--emulate", "2"])
    printed = capsys.readouterr().out
    assert printed.startswith("Versions: tpudist ")
    assert "- ok: devices: 2 x cpu (cpu), emulated\n" in printed
    assert str(ROOT.parent) not in printed


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e", "'v5e' is not a TPU slice"),
        ("v5e-7", "nearest are v5e-4, v5e-8, v5e-16"),
        ("v5e:32x32", "For more chips, use several slices"),
    ],
)
def test_an_invalid_slice_is_a_usage_error(capsys, topology, message):
    assert message in refusal(capsys, topology=topology)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--replica-axes fsdp", "'fsdp' is not an axis and its size"),
        ("--replica-axes fsdp=2 fsdp=2", "has the axis 'fsdp' twice"),
        ("--remat none full", "--remat none full: several values need --search"),
        ("--microbatches 1 2", "--microbatches 1 2: several values need --search"),
        ("--microbatches 0", "--microbatches is 0. It must be above 0"),
        ("--geometries fsdp=2", "--geometries needs --search"),
        ("--search --geometries fsdp", "--geometries 'fsdp': 'fsdp' is not an axis"),
        ("--price-per-chip-hour 1.2", "needs the length of the run. Add it, such as --steps 10000"),
        ("--steps -1", "--steps is -1. It must be above 0"),
        ("--steps 0", "--steps is 0. It must be above 0"),
        ("--tokens-per-step 0", "--tokens-per-step is 0. It must be above 0"),
        ("--tokens-per-step -64", "--tokens-per-step is -64. It must be above 0"),
        ("--time-budget 60", "--time-budget 60 is for a search, and this is one plan"),
        ("--steps 1 --price-per-chip-hour -1", "--price-per-chip-hour is -1.0"),
        ("--search --replica-axes fsdp=2", "--geometries fsdp=2 none"),
        ("--search --chart x.png", "--chart is for one plan, and --search makes several"),
        ("--search --save x", "--save is for one plan, and --search makes several"),
        ("--search --time-budget 0", "--time-budget is 0.0. It must be above 0"),
        ("--search --time-budget inf", "--time-budget is inf. Pass a number of seconds"),
        ("--search --price-per-chip-hour 1", "--price-per-chip-hour is for one plan, and"),
        ("--search --steps 9 --price-per-chip-hour 1", "--steps is for one plan, and"),
        ("--num-layers 3", "Options of the reference transformer were passed with your own step"),
    ],
)
def test_invalid_plan_options_are_usage_errors(capsys, options, message):
    assert message in refusal(capsys, *options.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num-heads 3", "embed_dim=128 does not give each of num_heads=3 heads"),
        ("--num-layers 0", "A transformer needs num_layers >= 1; got 0"),
        ("--global-batch 8 --batch-per-chip 2", "set the same size"),
        ("--global-batch 0", "--global-batch is 0. It must be above 0"),
        ("--batch-per-chip 0", "--batch-per-chip is 0. It must be above 0"),
        ("--sequence-length 0", "--sequence-length is 0. It must be above 0"),
        ("--sequence-length -1", "--sequence-length is -1. It must be above 0"),
        ("--tokens-per-step 1", "--tokens-per-step is only for your own step"),
    ],
)
def test_invalid_transformer_sizes_are_usage_errors(capsys, options, message):
    assert message in refusal(capsys, *options.split(), step=None)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("make_step", "'make_step' does not name a function. Name a function make_step(candidate)"),
        ("missing:make_step", "There is no module 'missing' in this folder"),
        ("missing.py:make_step", "There is no file missing.py"),
        (f"{STEPS}:missing", "has no function 'missing'"),
        (f"{STEPS}:NOT_CALLABLE", "has no function 'NOT_CALLABLE'"),
    ],
)
def test_a_missing_step_is_a_usage_error(capsys, step, message):
    assert message in refusal(capsys, step=step)


def test_an_import_error_is_reported_with_its_line(capsys, tmp_path):
    (tmp_path / "broken_steps.py").write_text("x = 1\nundefined\n")
    message = refusal(capsys, step="broken_steps:make_step")
    assert "broken_steps cannot be imported: NameError: name 'undefined' is not defined" in message
    assert "broken_steps.py:2)" in message
    (tmp_path / "needing_steps.py").write_text("import surely_not_installed\n")
    message = refusal(capsys, step="needing_steps:make_step")
    assert "No module named 'surely_not_installed'" in message
    assert "needing_steps.py:1)" in message


def test_a_file_that_exits_on_import_is_reported_with_its_line(capsys, tmp_path):
    """Otherwise the exit code would claim that the step fits."""
    (tmp_path / "ending.py").write_text("import sys\nsys.exit(0)\n")
    for step in ("ending:make_step", "ending.py:make_step"):
        message = refusal(capsys, step=step)
        assert "cannot be imported: SystemExit: 0 (" in message
        assert "ending.py:2)" in message


def test_a_users_file_may_have_the_name_of_an_installed_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of the file is added
    (tmp_path / "optax.py").write_text("def make_step(candidate):\n    return 1, 2, 3\n")
    assert user_step.load("optax.py:make_step", "v5e-8").make(None) == (1, 2, 3)
    assert sys.modules["optax"] is optax


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("make_ending", "make_ending failed: SystemExit: 0 ({}:"),
        ("make_ending_step", "make_ending_step failed: SystemExit: 0 ({}:"),
        (
            "make_more",
            "make_more returned a int as its last element. It must be a dict of arguments",
        ),
        (
            "make_topology",
            "make_topology returned the argument 'topology' of a plan. Omit it there",
        ),
        (
            "make_dict",
            "make_dict returned a dict as the arguments of the step. They must be a tuple",
        ),
        ("make_odd_step", "make_odd_step failed: TypeError: cannot reshape array"),
        ("jitted_step", "jitted_step is a jitted function. The shapes of its arguments are not"),
        ("plain_step", "def make_step(): return plain_step, (weights, rows)"),
        ("make_nothing", "make_nothing returned a str. Name a function make_step(candidate)"),
        ("make_mistake", "make_mistake failed: KeyError: 'mistaken' ({}:{})"),
        ("make_diverging_step", "make_diverging_step failed: ValueError"),
    ],
)
def test_a_mistake_in_a_step_is_reported_with_its_line(capsys, function, message):
    lines = Path(STEPS).read_text().splitlines()
    line = lines.index('    raise KeyError("mistaken")') + 1
    assert message.format(STEPS, line) in refusal(capsys, step=f"{STEPS}:{function}")


@pytest.mark.libtpu
def test_axes_that_do_not_divide_the_slice_are_a_usage_error(capsys):
    message = refusal(capsys, "--replica-axes", "fsdp=3")
    assert "Replicas of fsdp=3 span 3 devices each, but there are 4 devices" in message


@pytest.mark.libtpu
@pytest.mark.parametrize("words", [["--replica-axes"], ["--search", "--geometries", "none"]])
def test_axes_without_a_rule_in_the_reference_transformer_are_a_usage_error(words, capsys):
    message = refusal(capsys, *words, "fdsp=2", step=None)
    assert "the axis 'fdsp', but no rule of this model splits anything" in message
    assert "Did you mean fsdp? The axes of the model's rules are data, expert, fsdp," in message


def test_plan_without_libtpu_names_the_package_to_install(capsys, monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert "needs libtpu, the TPU compiler, which is not installed" in refusal(capsys)


@pytest.mark.parametrize("args", [["plan"], ["launch"], ["plan", "--topology", "v5e-8", "-x"]])
def test_unparsable_arguments_are_a_usage_error(args, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2


# Output.


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_step_that_fits_is_shown_and_written_with_exit_code_0(capsys, tmp_path):
    code = plan(
        *("--replica-axes", "fsdp=2", "--steps", "1000", "--price-per-chip-hour", "1.5"),
        *("--json", "plan.json", "--html", "plan.html", "--chart", "plan.png"),
    )
    assert code == 0
    out, err = capsys.readouterr()
    assert "step fits v5e-4" in out
    assert "replica 2 x fsdp 2" in out
    assert "at 1.5 per chip-hour" in out
    assert "tokens/s" in out  # the step returns its number of tokens
    assert "steps_to_plan.py:" in out
    assert "Wrote plan.json, plan.html, plan.png" in err
    found = Plan.from_json((tmp_path / "plan.json").read_text())
    assert found.fits
    assert found.mesh == {"replica": 2, "fsdp": 2}
    assert "1,000 steps" in (tmp_path / "plan.html").read_text()
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    # The second plan comes from the cache and is the same.
    assert plan("--replica-axes", "fsdp=2", "--json", "-") == 0
    again = Plan.from_json(capsys.readouterr().out)
    assert again.program == found.program
    assert again.memory == found.memory


@pytest.mark.libtpu
def test_a_step_of_plain_jax_is_planned_with_the_mesh_that_it_returns(capsys):
    assert plan("--json", "-", step=f"{STEPS}:make_plain_step") == 0
    found = Plan.from_json(capsys.readouterr().out)
    assert (found.name, found.mesh, found.topology) == ("plain_step", {"data": 4}, "v5e-4")
    assert found.model_flops == 2 * 2 * 64 * 256**2
    for option in ("--search", "--replica-axes=fsdp=2"):
        assert "make_step(candidate)" in refusal(capsys, option, step=f"{STEPS}:make_plain_step")
    assert plan("--replica-axes=fsdp=2", "--json", "-", step=f"{STEPS}:make_plain_layout") == 0
    assert Plan.from_json(capsys.readouterr().out).mesh == {"data": 2, "fsdp": 2}
    assert plan("--search", "--compiles", "0", step=f"{STEPS}:make_plain_layout") == 0
    assert "fsdp=2 tensor=2" in capsys.readouterr().out


@pytest.mark.libtpu
def test_a_step_that_does_not_fit_reports_the_reason_with_exit_code_1(capsys):
    assert plan("--save", "program", step=f"{STEPS}:make_large_step") == 1
    out, _ = capsys.readouterr()
    assert "step does not fit v5e-4" in out
    assert "too much" in out
    assert "--replica-axes fsdp=4" in out
    assert not Path("program").exists()


@pytest.mark.libtpu
def test_rates_that_a_user_keeps_are_used_by_later_plans(capsys, tmp_path):
    rates = {"generation": "v5e", "matmul_flops_per_s": 98.5e12}
    (tmp_path / "report.json").write_text(json.dumps({"calibration": rates}))

    def notes(*options):
        assert plan("--json", "plan.json", *options) == 0
        return " ".join(Plan.from_json(Path("plan.json").read_text()).notes)

    used = "v5e, from report.json: matrix products 98.5 TFLOP/s (50% of the peak)."
    assert used in notes("--calibration", "report.json")
    assert "measured rates" not in notes()  # it was not kept
    assert used in notes("--calibrate", "report.json")
    assert f"Rates of {used} Kept in " in capsys.readouterr().err
    assert used in notes()
    assert "measured rates" not in notes("--calibration", "published")
    capsys.readouterr()
    told = refusal(capsys, "--calibrate", "report.json", "--calibration", "report.json")
    assert "pass one" in told
    assert "plan.json is not a report" in refusal(capsys, "--calibrate", "plan.json")


@pytest.mark.libtpu
def test_a_search_ranks_the_candidates_that_fit(capsys):
    step = f"{STEPS}:make_large_step"
    options = ["--search", "--geometries", "none", "fsdp=4", "--time-budget", "300"]
    assert plan(*options, "--html", "search.html", "--json", "search.json", step=step) == 0
    out, _ = capsys.readouterr()
    assert "best on v5e-4: fsdp=4" in out
    assert "data parallel, remat none: needs" in " ".join(out.split())
    assert "data parallel -&gt; fsdp=4" in Path("search.html").read_text()
    found = SearchResult.from_json(Path("search.json").read_text())
    assert [one.status for one in found.outcomes] == ["fits", "too large"]
    assert plan("--search", "--geometries", "none", step=step) == 1
    assert "no candidate fits v5e-4" in capsys.readouterr().out


@pytest.mark.libtpu
def test_a_search_in_which_every_candidate_fails_is_a_usage_error(capsys):
    """The exit code must not claim that no candidate fits."""
    options = ["--search", "--geometries", "none", "fsdp=2", "--json", "search.json"]
    assert plan(*options, step=f"{STEPS}:make_odd_step") == 2
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    assert "all that was tried for v5e-4 failed" in out
    assert "tpudist: All 2 layouts failed. data parallel, remat none: " in err
    assert "TypeError: cannot reshape array" in err
    assert f"({STEPS}:" in err
    assert SearchResult.from_json(Path("search.json").read_text()).best is None


@pytest.mark.libtpu
def test_a_search_that_compiles_nothing_suggests_a_larger_time_budget(capsys):
    assert plan("--search", "--geometries", "none", "fsdp=2", "--time-budget", "1e-6") == 2
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    assert "nothing was compiled for v5e-4 within" in out
    assert "None of 2 layouts was compiled within" in err
    assert "Increase --time-budget" in err


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("compiles", "title", "message"),
    [
        ("1", "all that was tried for v5e-4 failed", "The layout failed."),
        ("0", "nothing could be estimated for v5e-4", "None of 2 layouts could be estimated."),
    ],
)
def test_a_search_for_a_step_that_cannot_be_traced_does_not_blame_the_time(
    capsys, compiles, title, message
):
    options = ["--geometries", "none", "fsdp=2", "--compiles", compiles]
    assert plan("--search", *options, step=f"{STEPS}:make_odd_step") == 2
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    assert title in out
    assert message in err
    assert "within" not in out + err


@pytest.mark.libtpu
@pytest.mark.parametrize("search", [[], ["--search", "--geometries", "none"]])
def test_tokens_per_step_overrides_the_number_from_the_step(capsys, search):
    assert plan("--tokens-per-step", "4096", "--json", "-", *search) == 0
    found = json.loads(capsys.readouterr().out)
    one = found["outcomes"][0]["plan"] if search else found
    assert one["tokens_per_step"] == 4096


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("options", "step", "code", "written"),
    [
        (["--chart", "plan.png", "--save", "program"], "make_step", 0, {"plan.png", "program"}),
        (["--html", "plan.html", "--json", "plan.json"], "make_large_step", 1, {"plan.html"}),
        (["--html", "plan.html", "--json", "-"], "make_step", 0, {"plan.html"}),
        (
            ["--search", "--geometries", "none", "--html", "found.html"],
            "make_large_step",
            1,
            {"found.html"},
        ),
    ],
)
def test_a_closed_pipe_does_not_prevent_the_files_and_the_exit_code(
    monkeypatch, capsys, options, step, code, written
):
    """The reader has gone, as after `| head`."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:  # at its end, no data remains to be flushed
        monkeypatch.setattr(sys, "stdout", closed)
        assert plan(*options, step=f"{STEPS}:{step}") == code
    assert written <= set(os.listdir())
    assert written <= set(re.split("[ ,\n]+", capsys.readouterr().err.partition("Wrote ")[2]))


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--json", "missing/plan.json"], "missing/plan.json cannot be written: No such file"),
        (["--html", "missing/plan.html"], "missing/plan.html cannot be written: No such file"),
        (["--chart", "plan.txt"], "Format 'txt' is not supported"),
    ],
)
def test_a_file_that_cannot_be_written_is_a_usage_error(capsys, option, message):
    assert plan(*option) == 2
    out, err = capsys.readouterr()
    assert message in " ".join(err.split())
    assert "step fits v5e-4" in out  # the result is still printed


@pytest.mark.libtpu
def test_the_reference_transformer_is_planned_from_its_sizes(capsys):
    options = ["--num-layers", "2", "--embed-dim", "64", "--mlp-dim", "128", "--num-heads", "2"]
    options += ["--sequence-length", "128", "--attention", "dot_product", "--json", "-"]
    options += ["--batch-per-chip", "4", "--microbatches", "2", "--replica-axes", "fsdp=2"]
    assert plan(*options, "tensor=2", step=None) == 0
    found = Plan.from_json(capsys.readouterr().out)
    assert found.tokens_per_step == 4 * 4 * 128
    assert found.mesh == {"replica": 1, "fsdp": 2, "tensor": 2}
    assert any("transformer.py" in (use.source or "") for use in found.collectives)


def test_topologies_lists_all_chips_and_their_sources(capsys):
    assert cli.main(["topologies"]) == 0
    table = capsys.readouterr().out
    for name in CHIPS:
        assert name in table
    assert "v5e-256 (16x16)" in table
    known, announced = table.split("Announced. libtpu does not support these chips yet")
    for name in ANNOUNCED:
        assert name in announced
        assert name not in known
    assert cli.main(["topologies", "--only", "tpu8t", "--sources"]) == 0
    one = capsys.readouterr().out
    assert "9,600" in one
    assert "tpu_info.py" in one
    assert "tpu7x" not in one
    assert cli.main(["topologies", "--only", "v5p", "--sources"]) == 0
    one = capsys.readouterr().out
    assert "v5e-" not in one.partition("A slice is named")[0]
    assert "docs.cloud.google.com/tpu/docs/v5p" in one
    assert cli.main(["topologies", "--only", "v5"]) == 2
    assert "no such generation. Use one of v2" in capsys.readouterr().err


# Consistency with other files.


def test_the_tiny_preset_matches_the_training_script():
    tiny, script = PRESETS["tiny"], ModelOptions()
    for name in ("num_layers", "embed_dim", "num_heads", "mlp_dim", "gated", "remat"):
        assert getattr(tiny.config, name) == getattr(script, name)
    assert tiny.length == script.sequence_length


def test_the_loss_of_a_preset_is_chunked_if_chunks_divide_the_sequence():
    for given, chunk in (
        ({}, 1024),
        ({"sequence_length": 2048}, 1024),
        ({"sequence_length": 1000}, None),
        ({"loss_chunk": 512}, 512),
        ({"loss_chunk": 0}, None),
    ):
        options = reference.ReferenceOptions(preset="llama-3.1-8b", **given)
        assert reference.make_reference(options, slices.parse("v5e-8")).config.loss_chunk == chunk


def test_a_model_folder_is_planned_from_only_its_configuration(tmp_path):
    shutil.copy(DATA / "pretrained" / "gemma2" / "config.json", tmp_path)
    options = reference.ReferenceOptions(hf=tmp_path, num_layers=3, sequence_length=2048)
    found = reference.make_reference(options, slices.parse("v5e-4"))
    assert found.config == dataclasses.replace(read_config(tmp_path), remat="full", loss_chunk=1024)
    fewer = dataclasses.replace(options, num_layers=2)
    config = reference.make_reference(fewer, slices.parse("v5e-4")).config
    assert config.layers_with_window == found.config.layers_with_window[:2]
    assert (found.length, found.global_batch) == (2048, 4)
    shorter = reference.make_reference(
        reference.ReferenceOptions(hf=tmp_path), slices.parse("v5e-4")
    )
    assert (shorter.length, shorter.config.loss_chunk) == (64, None)


def test_a_folder_without_a_supported_model_is_a_usage_error(capsys, tmp_path):
    said = refusal(capsys, "--hf", str(tmp_path), step=None)
    assert "config.json does not exist" in said
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    said = refusal(capsys, "--hf", str(tmp_path), step=None)
    assert "config.json says model_type: 'mamba'" in said
    said = refusal(capsys, "--hf", str(tmp_path), "--preset", "mistral-7b", step=None)
    assert "both choose a model" in said


def test_a_step_of_maxtext_is_planned_with_its_axes(capsys, tmp_path):
    (tmp_path / "base.yml").write_text(BASE)
    arguments = (str(tmp_path / "base.yml"), "per_device_batch_size=2", "ici_tensor_parallelism=2")
    options = reference.ReferenceOptions(maxtext=(*arguments, "quantization=int8"), num_layers=3)
    found = reference.make_reference(options, slices.parse("v5e-8"))
    assert (found.replica_axes, found.global_batch) == ({"fsdp": 4, "tensor": 2}, 16)
    assert (found.config.num_layers, found.config.embed_dim) == (3, 2048)
    assert "These keys of MaxText are not mapped: quantization=int8." in capsys.readouterr().err
    said = refusal(capsys, "--maxtext", *arguments, "--preset", "mistral-7b", step=None)
    assert "both choose a model" in said
    said = refusal(capsys, "--maxtext", *arguments, "decoder_block=deepseek", step=None)
    assert "decoder_block=deepseek" in said


def test_weights_and_first_moments_have_the_dtypes_of_the_options():
    options = reference.ReferenceOptions(param_dtype="bfloat16", num_layers=1)
    moments = {}
    for mu_dtype in (None, "float32"):
        options = dataclasses.replace(options, mu_dtype=mu_dtype)
        made = reference.make_reference(options, slices.parse("v5e-1"))
        candidate = Candidate("v5e-1", {}, "full", 1, jax.devices()[:1])
        _, _, (model, optimizer, _) = made.make_step(candidate)
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
        moments[mu_dtype] = [str(x.dtype) for x in jax.tree.leaves(optimizer.opt_state[0].mu)]
    assert set(moments[None]) == {"bfloat16"}
    assert set(moments["float32"]) == {"float32"}


def test_every_preset_can_be_chosen_and_every_size_is_a_field_of_the_config():
    choices = reference.ModelOptions.__annotations__["preset"]
    assert set(re.findall(r"'([^']+)'", choices)) == set(PRESETS)
    sizes = set(reference.ModelOptions.__annotations__) - {"preset", "hf"}
    assert sizes <= set(TransformerConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("name", "billions"),  # as published with the weights
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("mistral-7b", 7.24), ("mixtral-8x7b", 46.7)],
)
def test_presets_have_the_number_of_parameters_of_their_models(name, billions):
    shapes = jax.eval_shape(lambda: jax.tree.leaves(make_transformer(PRESETS[name].config)))
    assert sum(x.size for x in shapes) / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_command_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"tpudist": "tpudist.cli:main"}


def commands(document):
    """Yields the commands in the code blocks of a document."""
    for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S):
        for line in block.splitlines():
            name, *words = shlex.split(line)
            if Path(name).name == "tpudist" and words != ["--version"]:
                yield words


@pytest.mark.parametrize(
    "document",
    [
        "docs/first_hour.md",
        "docs/doctor.md",
        "docs/fault_tolerance.md",
        "docs/goodput.md",
        "docs/planning.md",
        "docs/several_processes.md",
        "docs/tpu_vms.md",
    ],
)
def test_the_commands_in_the_docs_can_be_parsed(document):
    found = list(commands(document))
    assert found
    for words in found:
        options = cli.parse(words)
        if isinstance(options, cli.plan_command.Options):
            cli.plan_command.check(options)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.libtpu
def test_the_module_is_runnable_and_leaves_jax_on_the_cpu(tmp_path):
    """Runs without JAX_PLATFORMS in the environment. A pipe that closes early is not an error."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-m", "tpudist"]
    how = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    words = ["plan", f"{STEPS}:make_step", "--topology", "v5e-4", "--json", "-"]
    done = subprocess.run([*command, *words], check=False, **how)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["fits"]
    shell = f"{shlex.join(command)} topologies --sources | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], check=False, **how)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.libtpu
def test_ctrl_c_also_ends_the_compiler(tmp_path):
    # Runs as `-m tpudist`, but restores SIGINT, which a shell ignores for background jobs.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('tpudist', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, "plan", "--topology", "v5e-64"]
    command += ["--preset", "llama-3.1-8b", "--replica-axes", "fsdp=64", "--batch-per-chip", "1"]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        compilers = _wait_for(lambda: _children(running.pid))
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert err.splitlines()[-1] == "tpudist: interrupted."
    assert "Traceback" not in err
    assert out == ""
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in compilers))


def _children(pid):
    """Returns the child processes that compile now."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [int(x) for task in tasks for x in (task / "children").read_text().split()]
        return [x for x in found if b"compiler_child" in Path(f"/proc/{x}/cmdline").read_bytes()]
    except OSError:
        return []


def _wait_for(condition, seconds=120):
    """Waits for the first true value; returns it."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return answer


def test_each_subcommand_is_a_module_with_options_and_run():
    """A new subcommand is therefore one file, and one line of COMMANDS."""
    for name in cli.COMMANDS:
        command = cli.find_command(name)
        tree = ast.parse(Path(command.__file__).read_text())
        assert f"`tpudist {name}`" in (ast.get_docstring(tree) or "")
        assert callable(command.run)
        assert isinstance(command.Options, type)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_describes_every_option_and_ends_with_examples_and_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.parse([name, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "\nexamples:\n  tpudist " in printed
    assert printed.count(f"\n  tpudist {name}") >= 2
    assert "\nexit codes: " in printed
    assert "STR" not in printed
    assert "{None}" not in printed
    command = cli.find_command(name)
    own = {
        "plan": [reference.ReferenceOptions, reference.ModelOptions],
        "plan-server": [reference.ModelOptions],
    }
    for kind in [command.Options, *own.get(name, [])]:
        described = re.findall(
            r'^    (\w+): .*\n(?:.*\n)*?    """(.*)"""$', inspect.getsource(kind), re.M
        )
        inherited = {x.name for base in kind.__bases__ for x in _fields_of(base)}
        names = {x.name for x in dataclasses.fields(kind)} - inherited - {"model"}
        assert {x for x, _ in described} >= names
        for option, text in described:
            assert text, option
            assert len(text) <= 100, text


def _fields_of(kind):
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


@pytest.mark.parametrize(
    ("name", "message"),
    [("plann", "There is no command plann. Did you mean plan?"), ("x", "The commands are plan, ")],
)
def test_an_unknown_command_suggests_the_nearest_one(name, message, capsys):
    assert cli.main([name]) == cli.WRONG_USE
    assert message in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.parametrize("words", ["--help", "--version", "port --help", "doctor --help", "plann"])
def test_help_and_usage_errors_do_not_import_jax(words):
    program = (
        "import sys; from tpudist import cli\n"
        f"try: cli.main({words.split()!r})\n"
        "except SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
