"""scripts/finetune.py from the command line: results, output files, resuming and bad options."""

import importlib.util
import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest

from experiment import token_text
from places import ROOT
from processes import run_processes
from tiny_models import make_tiny_model
from tpudist.models import load_pretrained, load_tokenizer
from tpudist.training import StopOptions
from train_runs import (
    compiled_once,  # noqa: F401
    lines_of,
    losses_of,
)

SCRIPT = ROOT / "scripts" / "finetune.py"
SMALL = ("--sequence-length", "16", "--batch-size", "8", "--sample-tokens", "6", "--emulate", "8")
SMALL += ("--held-out-windows", "16", "--no-compilation-cache", "--learning-rate", "0.01")


@pytest.fixture(scope="module")
def finetune():
    spec = importlib.util.spec_from_file_location("finetune_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns the directory of a small model."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def text(tmp_path):
    """Returns a directory with a few files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"this is file number {i} of the text. " * 60)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (folder / ".hidden").write_text("a secret")
    return folder


ADAPTERS = ("--lora", "2", "--replica-axes", "fsdp=2", "--sample-tokens", "0", "--steps", "4")
ADAPTERS += ("--evaluations", "1")


@pytest.fixture(scope="module")
def adapted(finetune, model, tmp_path_factory):
    """Trains adapters; returns the arguments and the directory of the run."""
    folder = tmp_path_factory.mktemp("adapters")
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"this is file number {i} of the text. " * 60)
    text, out = [str(folder / f"{i}.txt") for i in range(3)], folder / "out"
    args = ["--model", str(model), "--text", *text, *SMALL, *ADAPTERS]
    assert finetune.main([*args, "--out", str(out)]) == 0
    return args, out


def weights_of(folder) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_a_full_finetune_trains_all_weights_and_writes_the_tokenizer(
    finetune, model, text, tmp_path, capsys
):
    out = tmp_path / "out"
    args = ["--model", str(model), "--text", str(text), "--out", str(out), *SMALL]
    assert finetune.main([*args, "--steps", "12", "--evaluations", "2"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "before: held out ",
        "step 6/12  held out ",
        "--- Sample before training ---",
        "--- Sample after training ---",
        f"{text}: 3 document(s)",
        "all weights, ",
        "  before baseline  ",
        ", beaten by ",
        f"{out}/model",
    ):
        assert part in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held_out"]["nats_per_token"] < summary["baselines"]["before"] - 0.1
    assert [line["step"] for line in lines_of(out) if line["split"] == "held_out"] == [6, 12]
    assert (out / "curves.png").exists()
    before, after = weights_of(model), weights_of(out / "model")
    assert before.keys() == after.keys()
    assert not any(np.array_equal(before[name], after[name]) for name in before)
    assert load_tokenizer(out / "model").encode("this is").ids == (
        load_tokenizer(model).encode("this is").ids
    )
    # The files that were written compute the loss that was reported.
    loaded = load_pretrained(out / "model")
    tokenizer, documents = load_tokenizer(model), token_text.read_documents([text])
    end = json.loads((model / "config.json").read_text())["eos_token_id"]
    tokens = token_text.tokenize(documents, tokenizer, vocabulary=300, end=end, source="")
    windows = finetune.spread_windows(tokens.held_out, 16, 16)
    windows = windows[: len(windows) // 8 * 8 or len(windows)]  # whole batches
    nats = jax.jit(finetune.next_token_nats)(loaded, windows).mean()
    assert float(nats) == pytest.approx(summary["held_out"]["nats_per_token"], rel=1e-4)


@pytest.mark.slow
def test_a_lora_run_trains_merges_and_resumes_exactly(finetune, model, adapted, tmp_path, capsys):
    args, whole = adapted
    out = tmp_path / "out"
    original = finetune.train

    def train(*args, **kwargs):
        asked = iter([False] * 2)
        stop = StopOptions(lambda: next(asked, True), exit_when_preempted=False)
        return original(*args, **{**kwargs, "stop": stop})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "train", train)
        assert finetune.main([*args, "--out", str(out)]) == 130
    assert not (out / "model").exists()
    assert "adapters of rank 2, " in capsys.readouterr().out
    assert finetune.main([*args, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "Resuming after step 2 of 4, from " in shown
    assert "before: " not in shown
    assert losses_of(out) == losses_of(whole)
    for name, array in weights_of(whole / "model").items():
        np.testing.assert_array_equal(weights_of(out / "model")[name], array)
    changed = [
        name
        for name, array in weights_of(model).items()
        if not np.array_equal(weights_of(out / "model")[name], array)
    ]
    assert changed
    assert all(name.split(".")[-2].endswith("_proj") for name in changed)
    saved = (out / "checkpoints" / "4").rglob("*")
    assert sum(file.stat().st_size for file in saved if file.is_file()) < 400_000


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_learn_what_one_does_and_the_first_writes(adapted, tmp_path):
    args, one = adapted
    two = tmp_path / "two"
    first, second = run_processes(SCRIPT, devices_per_process=2, args=[*args, "--out", str(two)])
    assert "Finished after 4 steps" in first.stdout
    assert "step" not in second.stdout
    for (step, found), (_, expected) in zip(losses_of(two), losses_of(one), strict=True):
        assert found == pytest.approx(expected, rel=1e-5), step
    assert weights_of(two / "model").keys() == weights_of(one / "model").keys()
    for name, array in weights_of(one / "model").items():
        np.testing.assert_allclose(weights_of(two / "model")[name], array, atol=1e-4)
    assert load_tokenizer(two / "model").encode("this").ids


@pytest.mark.slow
def test_a_run_without_a_model_makes_a_tiny_one_once(
    finetune, model, tmp_path, capsys, monkeypatch
):
    made = []

    def make(strategy, folder, display):
        made.append(folder)
        folder.symlink_to(model)

    monkeypatch.setattr(finetune, "make_tiny_model", make)
    args = ["--out", str(tmp_path / "out"), *SMALL, "--steps", "1", "--sample-tokens", "0"]
    assert finetune.main(args) == 0
    assert finetune.main(args) == 0
    assert made == [tmp_path / "tiny-model"]
    shown = capsys.readouterr().out
    assert shown.startswith("Creating a tiny model in ")
    assert "the topics of Python's help(): " in shown
    assert "This run has already finished" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "nowhere"], "--text nowhere does not exist"),
        (["--text", "picture"], "--text picture is not UTF-8 text"),
        (["--text", "empty"], "--text empty contains no UTF-8 text"),
        (["--text", "short"], "text has [0-9]+ tokens, fewer than one window of 16"),
        (["--model", "nowhere"], "nowhere/config.json does not exist"),
        (["--lora", "-1"], "--lora is -1. It must be 0 or above"),
        (["--lora-alpha", "8"], "--lora-alpha 8.0 requires adapters"),
        (["--prompt", ""], "--prompt is empty"),
        (["--steps", "0"], "--steps is 0. It must be above 0"),
        (["--strategy", "mirrored", "--replica-axes", "fsdp=2"], "Use --strategy tpu, or omit"),
        (["--resume", "must"], "has no checkpoint to resume from"),
    ],
)
def test_a_bad_option_is_rejected_before_work_begins(
    finetune, model, options, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune, "run", None)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("few words")
    assert finetune.main(["--model", str(model), *SMALL, *options]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.startswith("finetune.py: ")
    assert re.search(words, caught.err)


@pytest.mark.slow
def test_a_model_with_different_weights_has_a_different_digest(finetune, model, tmp_path):
    """Otherwise adapters trained with one model could resume with another of the same size."""
    other = shutil.copytree(model, tmp_path / "other")
    digest = finetune.digest_of_model(model)
    assert finetune.digest_of_model(other) == digest
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert finetune.digest_of_model(other) != digest


def test_documents_are_held_out_by_name_until_the_share_is_reached():
    lengths = {f"{i}": 10 for i in range(100)}
    chosen = token_text.choose_held_out(lengths)
    assert len(chosen) == 5
    assert token_text.choose_held_out(dict(reversed(lengths.items()))) == chosen
    uneven = {"long": 100, "longer": 200, **{f"{i}": 10 for i in range(20)}}
    assert 25 <= sum(uneven[name] for name in token_text.choose_held_out(uneven)) <= 50


@pytest.mark.parametrize("lengths", [{"a": 100}, {"a": 1, "b": 100}, {"a": 60, "b": 70, "c": 30}])
def test_the_end_of_each_document_is_held_out_if_there_are_few_documents(lengths):
    assert not token_text.choose_held_out(lengths)
    found = token_text.tokenize(
        {name: "x" * n for name, n in lengths.items()},
        Letters(),
        vocabulary=128,
        end=None,
        source="",
    )
    share = len(found.held_out) / sum(lengths.values())
    assert 0.03 <= share <= 0.07
    assert len(found.train) + len(found.held_out) == sum(lengths.values())


class Letters:
    """A tokenizer with one token per letter."""

    def encode_batch(self, texts):
        return [type("Encoding", (), {"ids": [ord(c) for c in text]}) for text in texts]


def test_documents_end_with_the_end_token_and_unknown_tokens_are_rejected():
    found = token_text.tokenize({"only": "a" * 40}, Letters(), vocabulary=128, end=0, source="here")
    assert found.train.tolist() == [97] * 39
    assert found.held_out.tolist() == [97, 0]
    with pytest.raises(ValueError, match="returns token 97, but the model has 90 tokens"):
        token_text.tokenize({"a": "a"}, Letters(), vocabulary=90, end=None, source="")


def test_the_help_topics_of_python_are_available_on_every_machine():
    topics = token_text.python_topics()
    assert len(topics) > 50
    assert "statement" in topics["assert"]
