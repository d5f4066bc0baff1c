"""`tpudist plan-server`: the figures of a server and their arithmetic."""

import dataclasses
import json

import pytest

import plans
from tpudist import cli
from tpudist.planner import ServerPlan, server_plan

SIZES = "--num-layers 2 --embed-dim 256 --num-heads 8 --num-kv-heads 4 --head-width 128".split()


def run(capsys, *options):
    code = cli.main(["plan-server", "--topology", "v5e-4", *SIZES, *options])
    return code, *capsys.readouterr()


@pytest.mark.libtpu
@pytest.mark.slow
def test_a_server_is_planned_for_the_sequences_that_fit(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    lengths = ("--prompt-length", "256", "--output-length", "256")
    code, out, err = run(capsys, "--sequences", "64", "--json", str(tmp_path / "x"), *lengths)
    assert (code, err) == (0, f"Wrote {tmp_path / 'x'}\n")
    for text in ("first token", "next tokens", "reading the cache (32.1 MiB)", "tensor 4"):
        assert text in out
    plan = ServerPlan.from_json((tmp_path / "x").read_text())
    assert plan.fits
    assert plan.num_sequences == 64
    # Keys and values of 2 layers, 512 tokens and one head on each chip, in bfloat16.
    keys_and_values = 64 * (2 * 2 * 512 * 128 * 2)
    positions = 64 * 512 * 4 + 512  # with the number of tokens, padded
    assert plan.decode.memory.categories["cache"] == keys_and_values + positions

    *_, out, _ = run(capsys, "--replica-axes", "data=4", "--json", "-", *lengths)
    largest = json.loads(out)
    assert largest["fits"]
    assert largest["num_prompts"] == 4
    # Each chip has all 4 heads of a quarter of the sequences.
    free = 15.75 * 2**30 / (4 * 2 * 2 * 512 * 128 * 2)
    assert 0.8 * free < largest["num_sequences"] / 4 <= 0.9 * free


def test_the_speed_of_a_server_contains_its_prefill_steps():
    plan = plans.fitting()
    time, memory = plan.time, plan.memory
    prefill = dataclasses.replace(plan, time=dataclasses.replace(time, step_s=0.5))
    decode = dataclasses.replace(plan, time=dataclasses.replace(time, step_s=0.01))
    server = server_plan.join(
        prefill,
        decode,
        prompt_length=100,
        output_length=101,
        num_prompts=2,
        num_sequences=50,
        num_groups=2,
        sequence_bytes=memory.free_bytes / 3.5,
    )
    assert server.max_sequences == 6  # a prefill step leaves space for 3 in each group
    assert not server.fits
    assert server.tokens_per_s == pytest.approx(101 / (0.5 / 2 + 100 * 0.01 / 50))
    assert ServerPlan.from_json(server.to_json()) == server


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sequences 0", "sequences"),
        ("--slots 0", "slots"),
        ("--slots 8", "--slots 8 has no space for a prompt of"),
        ("--replica-axes tensor=3", "3 devices, but the slice has 4"),
        ("--replica-axes data=2 --sequences 3", "3 is not a multiple of 4"),
        ("--replica-axes tensr=2", "Did you mean tensor"),
    ],
)
def test_invalid_options_of_a_server_are_usage_errors(capsys, options, message):
    code, out, err = run(capsys, *options.split())
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "drop none, use --expert-capacity 4, or --expert-method grouped."),
        (["--expert-method", "grouped"], ""),
        (["--expert-capacity", "4"], ""),
    ],
)
def test_a_server_whose_experts_drop_tokens_reports_it(capsys, options, message):
    """The server is not planned: its number of sequences is invalid."""
    experts = ["--num-experts", "8", "--replica-axes", "data=2", "--sequences", "3"]
    _, _, err = run(capsys, *experts, *options)
    assert "is not a multiple of 4" in " ".join(err.split())
    assert ("may drop tokens" in err) == bool(message)
    assert message in " ".join(err.split())
