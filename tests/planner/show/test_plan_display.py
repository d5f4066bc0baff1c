"""The display of a plan: in a terminal, in a notebook and as a picture."""

import copy
import dataclasses
import io
import json
import math
import pickle
import re
import sys
from html import unescape
from html.parser import HTMLParser

import hypothesis
import hypothesis.strategies as st
import pytest
from jupyter_client.manager import start_new_kernel
from rich.console import Console

import plans
from tpudist.planner.plan_record import Plan
from tpudist.planner.show import advice, chart, formats, html, memory_text, speed_text
from tpudist.planner.show.plan_text import describe_plan
from tpudist.planner.show.terminal import TerminalReport
from tpudist.xla.estimate.collective_traffic import CollectiveUse
from tpudist.xla.estimate.guesses import Guess
from tpudist.xla.estimate.refusal import Refusal

SCRIPT = "<script>alert('x')</script>"


def shown(plan, width=100, encoding="utf-8", **run):
    page = io.BytesIO()
    file = io.TextIOWrapper(page, encoding)
    Console(file=file, width=width, color_system=None).print(
        TerminalReport(describe_plan(plan, **run))
    )
    file.flush()
    return page.getvalue().decode(encoding)


def as_html(plan, **run):
    return html.format_html(describe_plan(plan, **run))


def everywhere(plan, **run):
    """Returns the text of a terminal and of a notebook, each in one line."""
    page = re.sub(r"<style>.*?</style>", "", as_html(plan, **run), flags=re.S)
    text = unescape(re.sub(r"<[^>]*>", " ", page))
    return [" ".join(one.split()) for one in (shown(plan, 120, **run), text)]


# Content.


@pytest.mark.parametrize("text", everywhere(plans.fitting()), ids=["terminal", "notebook"])
@pytest.mark.parametrize(
    "fact",
    [
        "train_step fits v5e-256",
        "9.13 GiB of 15.75 GiB (58%) per chip",
        "10.4 s (9.31 to 12.2), 7.0% of it guessed, MFU 60.3%",
        "of its causes: matrix products -900 ms +1.10 s, overlap -420 ms +240 ms.",
        "301,893 tokens/s, 1,179 per chip",
        "v5e-256: 256 chips",
        "replica 1 x fsdp 256 (1 replica)",
        "in 64.3 s with libtpu 0.0.42.1",
        "gradients and activations",
        "799 MiB are overwritten in place",
        "Not overwritten in place: optimizer.step.",
        "1.50 GiB more are in the host's memory",
        "bf16[40,6,2048,6144]",
        "models/transformer.py:142",
        "dot_general, recomputed",
        "ICI is busy for 1.30 s; computation hides 880 ms of it.",
        "6.50 s for 1.28 PFLOP at the chip's peak",
        "a chip sends 50.30 GiB over ICI per step",
        "reduce-scatter",
        "<0.1% of the parameters' bytes are whole on every device of a replica",
        "The kernel splash.1 is priced from its FLOPs.",
    ],
)
def test_a_plan_that_fits_says(text, fact):
    assert fact in text


@pytest.mark.parametrize("text", everywhere(plans.refused()), ids=["terminal", "notebook"])
@pytest.mark.parametrize(
    "fact",
    [
        "train_step does not fit v5e-16",
        "needs 210.40 GiB per chip, which has 15.75 GiB: 194.65 GiB too much",
        "f32[40,6144,3,48,128]",
        "17.80 GiB",
        "models/transformer.py:142",
        "--replica-axes fsdp=16",
        "remat=",
        "microbatches",
        "13.4 times the 15.75 GiB",
        "180.00 GiB of it are arguments and outputs",
        "tpudist plan --search",
    ],
)
def test_a_plan_that_does_not_fit_says(text, fact):
    assert fact in text


def test_the_cost_of_a_run_is_shown_if_its_length_and_a_price_are_given():
    (text, page) = everywhere(plans.fitting(), num_steps=10_000, price=1.2)
    for said in (text, page):
        assert "10,000 steps" in said
        assert "28.9 h (25.9 to 33.9), 7,410 chip-hours, 8,891.73 at 1.2 per chip-hour" in said
    assert "chip-hours" in shown(plans.fitting(), num_steps=10)
    assert "at 1.2" not in shown(plans.fitting(), num_steps=10)
    assert "chip-hours" not in shown(plans.refused(), num_steps=10, price=1.0)


def test_memory_is_shown_per_device_if_a_chip_has_two_devices():
    text = shown(plans.fitting(chip="tpu7x", num_chips=128, topology="tpu7x-256"))
    assert "per device" in text
    assert "tpu7x-256: 128 chips, 256 devices" in text
    assert "per chip\n" not in text


def test_devices_without_known_rates_show_memory_but_no_time():
    plan = plans.fitting(chip="", topology="cpu", time=None, collectives=(), tokens_per_step=None)
    plan = dataclasses.replace(
        plan, memory=dataclasses.replace(plan.memory, capacity_bytes=None), model_flops=None
    )
    text = shown(plan)
    assert "9.13 GiB per chip" in text
    assert "step time" not in text
    assert "%" not in text.partition("Memory")[2].partition("Largest")[0]
    as_html(plan)


def test_equal_collectives_are_merged_and_sorted_by_waiting_time():
    merged = speed_text.merge_uses(plans.collectives())
    assert [use.kind for use in merged] == ["reduce-scatter", "all-gather", "all-reduce"]
    assert merged[1].count == 120
    assert merged[1].seconds == pytest.approx(0.36)


def test_guessed_parts_have_their_seconds_and_conditionals_their_branches():
    time = dataclasses.replace(
        plans.fitting().time,
        guessed=(
            Guess("conditional", 1.5, "/a/model.py:3", (0.5, 2.0)),
            Guess("sort", 0.7, "/a/model.py:7"),
            Guess("gather", 1e-9, None),
        ),
    )
    text = shown(plans.fitting(time=time))
    assert "branch 0 takes 500 ms (weight 0), branch 1 takes 2.00 s (weight 1)" in text
    assert "sort (model.py:7): 700 ms" in text
    assert "gather" not in text.partition("Guessed")[2].partition("Communication")[0]


def test_rounding_noise_is_not_shown():
    time = plans.fitting().time
    noise = dataclasses.replace(time.top[0], seconds=1e-12, op_name="noise")
    text = shown(
        plans.fitting(
            time=dataclasses.replace(
                time, top=(*time.top, noise), ici_s=1.3, exposed_ici_s=1.3 - 1e-9
            )
        )
    )
    assert "noise" not in text
    assert "computation hides 0 s of it" in text


def test_merging_collectives_preserves_totals():
    uses = st.builds(
        CollectiveUse,
        kind=st.sampled_from(["all-gather", "all-reduce"]),
        num_bytes=st.integers(1, 10**9),
        count=st.integers(1, 100).map(float),
        axes=st.sampled_from([("fsdp",), ("replica", "tensor"), ()]),
        network=st.sampled_from(["ici", "dcn", "host"]),
        is_async=st.booleans(),
        source=st.sampled_from([None, "/a/b.py:1", "/a/b.py:2"]),
        op_name=st.just("psum"),
        sent_bytes=st.integers(0, 10**9).map(float),
        seconds=st.integers(0, 1000).map(float),
        exposed_s=st.integers(0, 1000).map(float),
    )

    @hypothesis.given(st.lists(uses, max_size=30))
    def holds(found):
        merged = speed_text.merge_uses(found)
        for name in ("num_bytes", "count", "sent_bytes", "seconds", "exposed_s"):
            assert sum(getattr(x, name) for x in merged) == sum(getattr(x, name) for x in found)
        assert len({(x.kind, x.axes, x.network, x.is_async, x.source) for x in merged}) == len(
            merged
        )

    holds()


def test_rows_omitted_from_a_table_are_summed():
    one = plans.collectives()[2]
    many = tuple(dataclasses.replace(one, source=f"/a/b.py:{i}") for i in range(20))
    text = shown(plans.fitting(collectives=many))
    assert "And 12 more: 301.75 GiB sent, 4.32 s waited." in text


def test_temporaries_of_one_line_show_their_shape_only_if_it_is_the_same():
    memory = plans.fitting().memory
    one = memory.largest[-1]

    def shown_shape(unpadded_bytes):
        merged = dataclasses.replace(
            one, num_bytes=memory.peak_bytes, unpadded_bytes=unpadded_bytes, count=3
        )
        return shown(plans.fitting(memory=dataclasses.replace(memory, largest=(merged,))))

    assert "f32[64,3] x 3" in shown_shape(3 * one.unpadded_bytes)
    assert "f32[64,3] and 2 more" in shown_shape(2 * one.unpadded_bytes)


def test_a_temporary_below_a_thousandth_of_the_memory_is_not_listed():
    memory = plans.fitting().memory
    small = dataclasses.replace(memory.largest[0], num_bytes=memory.peak_bytes // 1001)
    listed = dataclasses.replace(memory, largest=(small,))
    assert "Largest temporaries" not in shown(plans.fitting(memory=listed))
    assert "copy.4" not in shown(plans.fitting())
    assert "And 1 more: 32.0 KiB." in shown(plans.fitting())


def test_unattributed_parts_of_a_step_are_shown_as_waiting_for_memory():
    time = dataclasses.replace(plans.fitting().time, step_s=12.0)
    assert "waiting for HBM" in shown(plans.fitting(time=time))


def test_the_first_suggestion_depends_on_the_largest_category():
    refused = plans.refused()
    split, *_ = advice.suggest_changes(refused)
    assert "--replica-axes fsdp=16" in split
    refusal = dataclasses.replace(refused.refusal, argument_bytes=1)
    remat, *_ = advice.suggest_changes(dataclasses.replace(refused, refusal=refusal))
    assert "remat" in remat


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"replica": 4, "fsdp": 2, "tensor": 2}, "--replica-axes fsdp=8 tensor=2"),
        ({"replica": 8, "tensor": 2}, "--replica-axes tensor=2 fsdp=8"),
        ({"replica": 1, "fsdp": 16}, None),
    ],
)
def test_a_replica_on_all_devices_has_no_suggestion_to_split_further(mesh, told):
    text = " ".join(advice.suggest_changes(dataclasses.replace(plans.refused(), mesh=mesh)))
    assert told in text if told else "--replica-axes" not in text


def test_a_refusal_without_numbers_shows_the_compilers_message():
    refusal = Refusal(0, 0, 0, (), "it is [too] large")
    for text in everywhere(dataclasses.replace(plans.refused(), refusal=refusal)):
        assert "it is [too] large" in text
        assert "0 B" not in text


# Layout.


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("plan", [plans.fitting(), plans.refused()], ids=["fits", "refused"])
def test_no_line_is_longer_than_the_terminal(plan, width):
    lines = shown(plan, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("train_step" in line for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_and_names_are_not_broken_over_lines(width):
    text = shown(plans.fitting(), width, num_steps=10)
    for word in ("reduce-scatter", "25.15 GiB", "transformer.py:142", "bf16[40,6,2048,6144]"):
        assert word in text


def test_an_ascii_terminal_receives_ascii():
    shown(plans.fitting(), encoding="ascii").encode("ascii")
    assert "####" in shown(plans.fitting(), encoding="ascii")


def test_the_parts_of_the_memory_and_the_free_part_sum_to_the_capacity():
    (bars, *_) = memory_text.memory_sections(plans.fitting())
    told = {part.name: part.amount for part in (*bars.parts, bars.free)}
    assert told["gaps between values"] == pytest.approx(0.2 * plans.GIB, rel=0.01)
    assert {"the program", "free", "parameters"} <= set(told)
    assert sum(told.values()) == pytest.approx(plans.fitting().memory.capacity_bytes, abs=2)
    assert bars.whole == plans.fitting().memory.capacity_bytes


def test_each_part_of_a_bar_starts_at_the_end_of_the_previous_part():
    rows = shown(plans.fitting(), 120, encoding="ascii").splitlines()
    compute, kernels = (
        next(row for row in rows if name in row) for name in ("compute  ", "custom")
    )
    assert abs(len(compute.rstrip()) - kernels.index("#")) <= 1
    assert compute.count("#") / kernels.count("#") == pytest.approx(8.9 / 1.1, rel=0.15)


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.found = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("plan", [plans.fitting(), plans.refused()], ids=["fits", "refused"])
@pytest.mark.parametrize("make", [as_html, lambda plan: html.format_page(as_html(plan))])
def test_html_is_well_formed_and_self_contained(plan, make):
    text = make(plan)
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parser.found}
    assert "http" not in text
    assert "url(" not in text


def test_bars_in_a_notebook_are_proportional_to_their_values():
    text = as_html(plans.fitting())
    assert f"width:{100 * 8.9 / 10.42:.3f}%" in text
    assert f"width:{100 * 1.1 / 10.42:.3f}%" in text


def test_user_text_is_escaped_in_html():
    plan = plans.fitting(name=SCRIPT, notes=(SCRIPT,), mesh={SCRIPT: 1})
    use = dataclasses.replace(plans.collectives()[0], source=f'/a/"{SCRIPT}".py:1', kind=SCRIPT)
    text = html.format_page(as_html(dataclasses.replace(plan, collectives=(use,))))
    assert SCRIPT not in text
    assert "&lt;script&gt;" in text


def test_user_text_is_not_interpreted_as_terminal_markup():
    plan = plans.fitting(name="[bold]step[/]", notes=("[red]note[/red]",))
    assert "[bold]step[/] fits" in shown(plan)
    assert "[red]note[/red]" in shown(plan)


@pytest.mark.parametrize("plan", [plans.fitting(), plans.refused()], ids=["fits", "refused"])
@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn(plan, ending, begins, tmp_path):
    chart.draw(plan, tmp_path / f"plan.{ending}")
    assert (tmp_path / f"plan.{ending}").read_bytes().startswith(begins)


def test_a_step_without_any_time_is_shown_and_drawn(tmp_path):
    """The step does no work; matplotlib would warn of an axis of length 0."""
    time = plans.fitting().time
    nothing = {
        field.name: 0.0
        for field in dataclasses.fields(time)
        if field.name not in ("top", "causes", "guessed")
    }
    for top in ((), (dataclasses.replace(time.top[0], seconds=0.0),)):
        plan = plans.fitting(time=dataclasses.replace(time, **nothing, top=top), collectives=())
        assert all("0 s" in text for text in everywhere(plan))
        chart.draw(plan, tmp_path / "plan.png")


def test_drawing_without_matplotlib_names_the_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        chart.draw(plans.fitting(), tmp_path / "plan.png")


def test_a_plan_displays_itself_in_rich_and_in_notebooks():
    plan = plans.fitting()
    assert as_html(plan) == plan._repr_html_()
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(plan)
    assert captured.get() == shown(plan, 100)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_notebook_shows_progress_while_planning_runs(tmp_path, monkeypatch):
    """The output is below the cell and disappears at the end."""
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    manager, client = start_new_kernel(kernel_name="python3")
    code = (
        "from tpudist.planner.show.progress import show_progress\n"
        "with show_progress(None) as tell:\n"
        "    tell('lowering', 0.2)\n"
        "    tell('compiling', 12.3)\n"
    )
    said = []
    try:
        reply = client.execute_interactive(code, timeout=120, output_hook=said.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok"
    lines = [
        one["content"]["data"]["text/plain"]
        for one in said
        if one["msg_type"] in ("display_data", "update_display_data")
    ]
    assert lines == ["planning", "planning: lowering", "planning: compiling, 12.3 s", ""]


# Value semantics.


@pytest.mark.parametrize("plan", [plans.fitting(), plans.refused()], ids=["fits", "refused"])
def test_a_plan_can_be_copied_pickled_and_hashed(plan):
    for again in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert again == plan
        assert {again} == {plan}


def test_a_plan_without_an_error_bar_is_read_and_shown():
    """Plans of older versions have none."""
    fields = json.loads(plans.fitting().to_json())
    for name in ("low_s", "high_s", "causes", "guessed_s", "slow_slices_s"):
        del fields["time"][name]
    old = Plan.from_json(json.dumps(fields))
    assert old.time.low_s is None
    for text in everywhere(old):
        assert "10.4 s (an estimate), MFU 60.3%" in text
        assert "error bar" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"memory": [1]},
        {"memory": "much"},
        {"mesh": [8]},
        {"mesh": "8"},
        {"collectives": 5},
        {"collectives": ["all-gather"]},
        {"collectives": {"kind": "all-gather"}},
        {"num_chips": "many"},
        {"fits": "yes"},
        {"name": None},
        {"versions": None},
        {"notes": "one"},
        {"_source": {}},
        {"trace_s": math.nan},
        {"trace_s": math.inf},
    ],
    ids=str,
)
def test_json_that_is_not_a_plan_is_rejected(change):
    fields = json.loads(plans.fitting().to_json()) | change
    with pytest.raises(ValueError, match="is not a (complete )?Plan"):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "it is not JSON"),
        ("[]", "This JSON is not a Plan"),
        ('{"kind": "Plan", "version": 0}', "version 0 of the format"),
        ('{"kind": "Plan", "version": 1}', "not a complete Plan"),
        ('{"kind": "Plan", "version": 1, "other": 1}', "Plan has no other"),
    ],
)
def test_text_that_is_not_a_plan_is_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_without_json_representation_is_rejected(number):
    with pytest.raises(ValueError, match="This Plan has a number that JSON cannot represent"):
        plans.fitting(model_flops=number).to_json()


# Formats.


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 B"),
        (8, "8 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (50_000, "48.8 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (800 * 1024**2, "800 MiB"),
        (9_846_000_000, "9.17 GiB"),
        (210.4 * 1024**3, "210.40 GiB"),
        (2048 * 1024**3, "2.00 TiB"),
    ],
)
def test_format_bytes_chooses_a_unit(count, told):
    assert formats.format_bytes(count) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"),
        (2.7e-20, "0 s"),
        (42.6e-9, "42.6 ns"),
        (2e-6, "2.00 us"),
        (0.000_999_4, "999 us"),
        (0.012_34, "12.3 ms"),
        (0.9999, "1.00 s"),
        (10.42, "10.4 s"),
        (119, "119 s"),
        (300, "5.00 min"),
        (104_200, "28.9 h"),
        (864_000, "10.0 days"),
    ],
)
def test_format_seconds_chooses_a_unit(seconds, told):
    assert formats.format_seconds(seconds) == told


@hypothesis.given(st.floats(1e-7, 1e7))
def test_format_seconds_preserves_the_value(seconds):
    number, unit = formats.format_seconds(seconds).replace(",", "").split()
    sizes = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400}
    assert float(number) * sizes[unit] == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (0, "0%"),
        (0.0004, "<0.1%"),
        (0.0012, "0.1%"),
        (0.0994, "9.9%"),
        (0.583, "58%"),
        (0.997, ">99%"),
        (1, "100%"),
    ],
)
def test_format_share_rounds_to_percent(share, told):
    assert formats.format_share(share) == told


@pytest.mark.parametrize(
    ("op_name", "told"),
    [
        ("", ""),
        ("jit(step)/shard_map/jvp()/while/body/dot_general", "dot_general"),
        ("jit(step)/transpose(jvp())/while/body/dot_general", "dot_general, backward"),
        (
            "jit(step)/transpose(jvp())/checkpoint/rematted_computation/dot_general",
            "dot_general, recomputed",
        ),
        ("jit(step)/transpose(jvp())", "transpose(jvp()), backward"),
    ],
)
def test_format_op_shortens_operation_names(op_name, told):
    assert formats.format_op(op_name) == told


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ("f32[8,128]{1,0:T(8,128)}", "f32[8,128]"),
        ("s32[]", "s32[]"),
        ("(f32[2,3]{1,0}, /*index=1*/u32[], u8[4])", "f32[2,3] +2"),
        ("token", "token"),
    ],
)
def test_format_shape_shortens_shapes(shape, told):
    assert formats.format_shape(shape) == told
