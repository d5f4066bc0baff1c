"""The faults that `inject_faults.py` puts into the steps of `examples/` and README."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

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
                "tpudist.compute_average_loss(errors**2)",
                "(errors**2).mean()",
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


def accepted_lines(source: str, old: str, new: str, site: Site) -> set[int]:
    """Returns the numbers of the changed lines, the reduction and the two lines after them."""
    changed = source.replace(old, new, 1)
    start = source[: source.index(old)].count("\n") + 1
    lines = set(range(start, start + new.count("\n") + 1))
    for text in (site.reduction, site.reduction.replace("pmean", "psum")):
        if text in changed:
            lines.add(changed[: changed.index(text)].count("\n") + 1)
    return lines | {max(lines) + 1, max(lines) + 2}


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
