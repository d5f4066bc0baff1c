"""Injects faults into the training steps of `examples/` and README, and counts those found.

    python scripts/inject_faults.py [NAME ...]

Each fault is a change of a few lines of a right program, such as a user makes by mistake. The
program runs up to its first step, which `Strategy.verify` compares with one device. A fault is
found if the report has a difference on full batches, or if tracing the step is an error. Its line
is right if it is a changed line, the line of the reduction or the line that uses its result. The
steps as they are must have no difference. Prints one line per fault, and a summary.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import pathlib
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import tpudist

ROOT = pathlib.Path(__file__).parents[1]
_PMEAN = 'jax.lax.pmean({}, "replica")'
_PSUM = 'jax.lax.psum({}, "replica")'
_OWN = (
    "jax.tree.unflatten(jax.tree.structure(grads), "
    "[*jax.tree.leaves(own)[:1], *jax.tree.leaves(grads)[1:]])"
)


@dataclasses.dataclass(frozen=True)
class Site:
    """The places of a program at which faults are injected.

    Attributes:
        reduction: The line that reduces the gradients; of NNX, the line of the optimizer.
        params: An expression of the parameters at that line.
        rows: Names of the arguments that have rows.
        body: The first line of the step.
        options: Arguments of `main` that make the program small.
        logits: An assignment of a value for each row, and its name.
        op: The reduction of the right program, "mean" or "sum".
        changes: Further faults: for each name the old and the new text.
    """

    reduction: str
    params: str
    rows: tuple[str, ...]
    body: str
    options: dict[str, Any]
    logits: tuple[str, str] | None = None
    op: str = "mean"
    changes: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)


_HAIKU = '    loss, grads = jax.lax.pmean((loss, grads), "replica")'
_KEY = "tpudist.get_replica_context().random_key({})"
_UPDATE = "    updates, opt_state = optimizer.update(grads, {})"
_LOCAL_MOMENTS = (
    "    updates, opt_state = optimizer.update(own, {})\n    updates = " + _PMEAN.format("updates")
)


def _moments_of_own_gradients(state: str) -> dict[str, tuple[str, str]]:
    old = f"{_HAIKU}\n{_UPDATE.format(state)}"
    new = f"    own = grads\n{_HAIKU}\n{_LOCAL_MOMENTS.format(state)}"
    return {"moments of the replica's own gradients": (old, new)}


SITES = {
    "mnist_linen": Site(
        '    loss, accuracy, grads = jax.lax.pmean((loss, accuracy, grads), "replica")',
        "state.params",
        ("images", "labels"),
        "    def loss_fn(params):",
        {"num_steps": 1, "batch_size": 64, "width": 8},
        ('        logits = state.apply_fn({"params": params}, images)', "logits"),
        changes={
            "wrong divisor of accumulation": (
                "    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)"
                "(state.params)",
                "    whole = images, labels\n"
                "    total = jax.tree.map(jnp.zeros_like, state.params)\n"
                "    for half in range(2):\n        images, labels = (x[half::2] for x in whole)\n"
                "        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)"
                "(state.params)\n        total = jax.tree.map(jnp.add, total, grads)\n"
                "    grads = jax.tree.map(lambda g: g / (2 * jax.lax.axis_size('replica')), total)",
            )
        },
    ),
    "mnist_haiku": Site(
        _HAIKU,
        "state.params",
        ("images", "labels"),
        "    def loss_fn(params):",
        {"num_steps": 1, "batch_size": 64},
        ("        logits = network.apply(params, images)", "logits"),
        changes=_moments_of_own_gradients("state.opt_state")
        | {
            "average of the replica's own steps": (
                f"{_HAIKU}\n{_UPDATE.format('state.opt_state')}\n"
                "    params = optax.apply_updates(state.params, updates)\n"
                "    avg_params = optax.incremental_update(params, state.avg_params, "
                "step_size=0.05)",
                f"    own, _ = optimizer.update(grads, state.opt_state)\n{_HAIKU}\n"
                f"{_UPDATE.format('state.opt_state')}\n"
                "    params = optax.apply_updates(state.params, updates)\n"
                "    mine = optax.apply_updates(state.params, own)\n"
                "    avg_params = optax.incremental_update(mine, state.avg_params, "
                "step_size=0.05)",
            ),
            "average of a sum of steps": (
                "    avg_params = optax.incremental_update(params,",
                f"    total = {_PSUM.format('params')}\n"
                "    avg_params = optax.incremental_update(total,",
            ),
        },
    ),
    "mnist_jax": Site(
        '    loss, grads = tpudist.get_replica_context().all_reduce("sum", (loss, grads))',
        "params",
        ("images", "targets"),
        "    loss, grads = jax.value_and_grad(loss_fn)(params, images, targets)",
        {"num_epochs": 1},
        (
            "    return tpudist.compute_average_loss(-(predict(params, images) * targets).sum(1))",
            "",
        ),
        op="sum",
        changes={
            "divided by the replica's own count": (
                "tpudist.compute_average_loss(-(predict(params, images) * targets).sum(1))",
                "(-(predict(params, images) * targets).sum(1)).sum() / len(images)",
            ),
            "wrong divisor of accumulation": (
                "    loss, grads = jax.value_and_grad(loss_fn)(params, images, targets)",
                "    halves = images.reshape(2, -1, 64), targets.reshape(2, -1, 10)\n"
                "    (loss, *_), grads = jax.lax.map(\n"
                "        lambda x: jax.value_and_grad(lambda p: (-(predict(p, x[0]) * x[1])"
                ".sum(1).mean()))(params), halves)\n"
                "    grads = jax.tree.map(lambda g: g.sum(0) / 2, grads)",
            ),
        },
    ),
    "lm1b_linen": Site(
        '    loss, grads = jax.lax.psum((loss, grads), "replica")',
        "state.params",
        ("tokens",),
        "    weights = (tokens > 0).astype(jnp.float32)",
        {"num_steps": 1, "width": 16, "dropout_rate": 0.1},
        (
            '        logits = state.apply_fn({"params": params}, tokens, train=True, '
            'rngs={"dropout": key})',
            "logits",
        ),
        op="sum",
        changes={
            "divided by the replica's own count": (
                '    num_tokens = jax.lax.psum(weights.sum(), "replica")',
                "    num_tokens = weights.sum()",
            ),
            "averaged, and divided by the replica's own count": (
                '    num_tokens = jax.lax.psum(weights.sum(), "replica")',
                "    num_tokens = weights.sum() * jax.lax.axis_size('replica')",
            ),
            "one key for all replicas": (
                _KEY.format("jax.random.fold_in(key, state.step)"),
                "jax.random.fold_in(key, state.step)",
            ),
        },
    ),
    "resnet_linen": Site(
        _HAIKU,
        "state.params",
        ("images", "labels"),
        "    def loss_fn(params):",
        {"num_steps": 1, "batch_size": 32},
        None,
    ),
    "rnn_haiku": Site(
        _HAIKU,
        "state.params",
        ("tokens",),
        "    def loss_fn(params):",
        {"num_steps": 1},
        ("        logits = network.apply(params, tokens[:, :-1])", "logits"),
        changes=_moments_of_own_gradients("state.opt_state"),
    ),
    "spirals_equinox": Site(
        '    loss, accuracy, grads = jax.lax.pmean((loss, accuracy, grads), "replica")',
        "eqx.filter(model, eqx.is_inexact_array)",
        ("points", "labels"),
        "    compute = eqx.filter_value_and_grad(compute_loss, has_aux=True)",
        {"num_steps": 1, "width": 8},
        None,
    ),
    "diffusion_equinox": Site(
        _HAIKU,
        "eqx.filter(model, eqx.is_inexact_array)",
        ("images",),
        f"    key = {_KEY.format('key')}",
        {"num_steps": 1, "width": 32},
        None,
        changes=_moments_of_own_gradients("opt_state")
        | {"one key for all replicas": (f"    key = {_KEY.format('key')}\n", "")},
    ),
    "ppo_jax": Site(
        '        loss, grads = jax.lax.pmean((loss, grads), "replica")',
        "params",
        (),
        "",
        {"num_steps": 1, "num_environments": 16},
        None,
        changes={
            "normalized by the replica's own statistics": (
                "    mean, square = jax.lax.pmean((advantages.mean(), (advantages**2).mean()), "
                '"replica")',
                "    mean, square = advantages.mean(), (advantages**2).mean()",
            ),
        },
    ),
    "gpt_nnx": Site(
        "    optimizer.update(model, grads)",
        "nnx.state(model, nnx.Param)",
        ("tokens",),
        "    def loss_fn(model):",
        {"num_steps": 1, "width": 16, "length": 16},
        ("        logits = model(tokens[:, :-1])", "logits"),
        changes={"sum for mean": ('reduce_op="mean"', 'reduce_op="sum"')},
    ),
    "vae_nnx": Site(
        "    optimizer.update(model, grads)",
        "nnx.state(model, nnx.Param)",
        ("images",),
        "    def loss_fn(model):",
        {"num_steps": 1, "width": 32},
        None,
        changes={
            "sum for mean": ('reduce_op="mean"', 'reduce_op="sum"'),
            "one key for all replicas": (
                _KEY.format("jax.random.fold_in(key, optimizer.step[...])"),
                "jax.random.fold_in(key, optimizer.step[...])",
            ),
        },
    ),
    "README": Site(
        "    optimizer.update(model, grads)  # sums the gradients of all replicas",
        "nnx.state(model, nnx.Param)",
        (),
        "    def loss_fn(model):",
        {},
        None,
        op="sum",
        changes={
            "mean for sum": ("tpudist.Optimizer(optax.adam(0.05), model)",
                             'tpudist.Optimizer(optax.adam(0.05), model, reduce_op="mean")'),
            "divided by the replica's own count": (
                'tpudist.compute_average_loss(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))',
                '((model(batch["x"]) - batch["y"]) ** 2).sum(-1).mean()',
            ),
            "half of the batch is read twice": (
                "    def loss_fn(model):",
                "    batch = {k: jnp.concatenate([x[: len(x) // 2]] * 2) "
                "for k, x in batch.items()}\n"
                "    def loss_fn(model):",
            ),
            "the last row is dropped": (
                "    def loss_fn(model):",
                "    batch = {k: x[:-1] for k, x in batch.items()}\n    def loss_fn(model):",
            ),
        },
    ),
}  # fmt: skip


def make_faults(site: Site) -> Iterator[tuple[str, str, str]]:
    """Returns the faults of a program: name, old text and new text."""
    line = site.reduction
    indent = line[: len(line) - len(line.lstrip())]
    is_nnx = "optimizer.update(model" in line

    def before(text: str) -> str:
        return f"{indent}grads = {text}\n{line}"

    def after(text: str) -> str:
        return f"{line}\n{indent}grads = {text}"

    n = "jax.lax.axis_size('replica')"
    yield (
        "clipped before",
        line,
        before("jax.tree.map(lambda g: g / (1e-3 + jnp.linalg.norm(g)), grads)"),
    )
    yield "normalized before", line, before("jax.tree.map(jnp.sign, grads)")
    if is_nnx:
        yield "reduced twice", line, before(_PSUM.format("grads"))
        yield "wrong divisor", line, before(f"jax.tree.map(lambda g: g / {n}, grads)")
        if site.op == "sum":
            params = site.params
            yield (
                "decay n times",
                line,
                before(f"jax.tree.map(lambda g, p: g + 0.01 * p, grads, {params})"),
            )
        yield from _of_rows(site)
        return
    both = re.search(r"\((\w+(?:, \w+)*), grads\)", line)
    assert both is not None, "the reduction has several values"
    yield "not reduced", line, line.replace(f"{both[1]}, grads =", f"{both[1]}, _ =")
    yield "one leaf not reduced", line, f"{indent}own = grads\n{after(_OWN)}"
    yield "reduced twice", line, after(_PSUM.format("grads"))
    yield (
        "a stale parameter",
        line,
        after(
            "jax.tree.map(lambda g: jnp.where(jax.lax.axis_index('replica') == 0, g, 0 * g), grads)"
        ),
    )
    if site.op == "mean":
        yield "sum for mean", line, line.replace("pmean", "psum")
        yield (
            "decay n times",
            line,
            after(
                "jax.tree.map(lambda g, p: g + jax.lax.psum(0.01 * p, 'replica'), grads, "
                f"{site.params})"
            ),
        )
        yield "wrong divisor", line, after(f"jax.tree.map(lambda g: g / {n}, grads)")
    else:
        yield "mean for sum", line, line.replace("psum", "pmean").replace('"sum"', '"mean"')
        yield (
            "decay n times",
            line,
            before(f"jax.tree.map(lambda g, p: g + 0.01 * p, grads, {site.params})"),
        )
    yield from _of_rows(site)


def _of_rows(site: Site) -> Iterator[tuple[str, str, str]]:
    if site.rows:
        names = ", ".join(site.rows)
        comma = "," if len(site.rows) == 1 else ""
        each = f"for x in ({names}{comma})"
        start = site.body[: len(site.body) - len(site.body.lstrip())]
        yield (
            "half of the batch is read twice",
            site.body,
            (
                f"{start}{names}{comma} = (jnp.concatenate([x[: len(x) // 2]] * 2) {each})\n"
                f"{site.body}"
            ),
        )
        yield (
            "the last row is dropped",
            site.body,
            (f"{start}{names}{comma} = (x[:-1] {each})\n{site.body}"),
        )
    yield (
        "all replicas read the same rows",
        "strategy.experimental_distribute_dataset(",
        ("every_replica_reads(strategy, "),
    )
    if site.logits is not None and site.logits[1]:
        line, name = site.logits
        indent = line[: len(line) - len(line.lstrip())]
        yield "the wrong axis", line, f"{line}\n{indent}{name} = {name} - {name}.mean(0)"
    for name, (old, new) in site.changes.items():
        yield name, old, new


_HEADER = """
import jax, jax.numpy as jnp, numpy as np
def every_replica_reads(strategy, batches):
    n = strategy.num_replicas_in_sync
    for batch in batches:
        yield jax.tree.map(lambda x: strategy.experimental_distribute_values_from_function(
            lambda context: np.asarray(x)[: len(x) // n]), batch)
"""


class Verified(Exception):
    """Ends a program at its first step, with the report."""


def verify_first_step(self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None):
    """Stands for `Strategy.run`."""
    raise Verified(self.verify(fn, args, kwargs, options))


def run(name: str, source: str, options: dict[str, Any], folder: str) -> tuple[str, list[str]]:
    """Runs a program up to its first step.

    Returns:
        The result, "ok", "difference" or "error", and the lines that the report names.
    """
    path = pathlib.Path(folder) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
            if hasattr(module, "main"):
                module.main(**options)
    except Verified as end:
        report = end.args[0]
        found = [x for x in report.differences if x.comparison != "tail"]
        if "-v" in sys.argv:
            print(report)
        return ("difference" if found else "ok"), [x.where for x in found]
    except ValueError as error:
        return "error", re.findall(rf"{re.escape(path.name)}:\d+", str(error))
    raise RuntimeError(f"{name} took no step")


def _accepted(source: str, old: str, new: str, site: Site) -> set[int]:
    """The numbers of the changed lines, the reduction and the two lines after them."""
    changed = source.replace(old, new, 1)
    start = source[: source.index(old)].count("\n") + 1
    lines = set(range(start, start + new.count("\n") + 1))
    for text in (site.reduction, site.reduction.replace("pmean", "psum")):
        if text in changed:
            lines.add(changed[: changed.index(text)].count("\n") + 1)
    return lines | {max(lines) + 1, max(lines) + 2} | {min(lines)}


def read(name: str) -> str:
    """Returns the source of a right program."""
    if name == "README":
        text = (ROOT / "README.md").read_text()
        code = re.search(r"```python\n(import numpy.*?)```", text, re.DOTALL)
        assert code is not None, "README has a first program"
        return _HEADER + code[1].replace("tpudist.emulate", "0 and tpudist.emulate")
    source = (ROOT / "examples" / name / "distributed.py").read_text()
    future = source.index("\nimport ")
    return source[:future] + _HEADER + source[future:]


def main(names: list[str], num_devices: int) -> int:
    """Injects all faults; returns the number of faults that were missed, and of false alarms."""
    tpudist.emulate(num_devices)
    tpudist.Strategy.run = verify_first_step  # type: ignore[method-assign]
    found = placed = total = false = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            site, source = SITES[name], read(name)
            verdict, _ = run(f"{name}_right", source, site.options, folder)
            false += verdict != "ok"
            print(f"{name:18} as it is: {verdict}", flush=True)
            for i, (kind, old, new) in enumerate(make_faults(site)):
                if source.count(old) < 1:
                    raise ValueError(f"{name} has no line for '{kind}': {old}")
                start = time.perf_counter()
                changed = source.replace(old, new, 1)
                verdict, lines = run(f"{name}_{i}", changed, site.options, folder)
                accepted = _accepted(source, old, new, site)
                numbers = [int(x.rpartition(":")[2]) for x in lines if x]
                is_right = bool(numbers) and numbers[0] in accepted
                is_right |= kind == "all replicas read the same rows"  # its report names arguments
                total, found = total + 1, found + (verdict != "ok")
                placed += verdict != "ok" and is_right
                mark = "MISSED" if verdict == "ok" else "" if is_right else f"line {numbers[:3]}"
                seconds = time.perf_counter() - start
                print(f"{name:18} {kind:50} {verdict:10} {seconds:5.1f} s {mark}", flush=True)
    print(
        f"{found} of {total} faults found ({found / total:.1%}), the right line named for {placed} "
        f"({placed / total:.1%}); {false} right programs with a difference."
    )
    return total - found + false


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="examples; all by default")
    parser.add_argument("--devices", type=int, default=4, help="number of emulated devices")
    parser.add_argument("-v", action="store_true", help="print each report")
    given = parser.parse_args()
    sys.exit(bool(main(given.names or list(SITES), given.devices)))
