"""Code that asks JAX for devices sees those of a slice while a step is traced for it."""

import threading

import jax
import pytest

from tpudist.xla.compiler.visible_devices import show_devices


def ask():
    return jax.device_count(), jax.local_device_count(), len(jax.devices()), jax.process_count()


def test_only_this_thread_sees_other_devices_and_only_in_the_block():
    before, some = ask(), jax.devices()[2:5]
    answers = []
    with show_devices(some):
        assert jax.devices() == jax.local_devices() == some
        assert ask() == (3, 3, 3, 1)
        assert jax.make_mesh((3,), ("x",)).devices.tolist() == some
        thread = threading.Thread(target=lambda: answers.append(ask()))
        thread.start()
        thread.join()
        with show_devices(some[:1]):
            assert jax.device_count() == 1
        assert jax.device_count() == 3
    assert [before] == answers == [ask()]


@pytest.mark.libtpu
def test_questions_about_another_platform_are_answered_as_before():
    from tpudist.xla import topology

    with show_devices(topology.devices("v5e-8")):
        assert (jax.default_backend(), jax.device_count(), jax.process_count()) == ("tpu", 8, 1)
        assert jax.devices("tpu") == topology.devices("v5e-8")
        assert jax.devices("cpu")[0].platform == "cpu"
    assert jax.default_backend() == "cpu"
