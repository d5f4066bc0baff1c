"""The private doors of JAX: what tpudist needs and JAX offers nowhere in public.

Each is looked up here and nowhere else, and each has a test of its own in
`tests/policy/test_jax_versions.py`, which names the version of JAX that closed it.
"""

from typing import Any

import jax
from jax._src import config, distributed


def coordination_client() -> Any:
    """The client of JAX's coordination service, with its key-value store; None in one process.

    Orbax reaches for it in the same way.
    """
    return distributed.global_state.client


def compiler_options_of(lowered: jax.stages.Lowered) -> dict[str, Any]:
    """The `compiler_options` that `jax.jit` was given for a program, which it shows nowhere."""
    try:
        return dict(lowered._lowering._compiler_options_kvs)  # type: ignore[attr-defined]
    except AttributeError as error:
        raise RuntimeError(
            f"The compiler options of a program that jax {jax.__version__} has lowered cannot be "
            f"read, and without them it would be compiled otherwise than jax.jit does. Install a "
            f"jax that tpudist supports: see CONTRIBUTING.md."
        ) from error


def make_key_of_trace_caches() -> Any:
    """A setting of our own, of which JAX's caches of traces know: another value, other caches.

    None where JAX has no such settings. To be made once: what was traced before is traced anew.
    """
    try:
        return config.config_ext.Config(
            "tpudist_trace", None, include_in_jit_key=False, include_in_trace_context=True
        )
    except (AttributeError, TypeError):
        return None


def is_described(device: jax.Device) -> bool:
    """Whether a device is one of a described topology, to compile for and not to run on."""
    return type(device.client).__name__ == "CompileOnlyPyClient"
