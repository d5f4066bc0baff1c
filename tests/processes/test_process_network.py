"""Two hosts of which the network between them fails, for a while or for good."""

import time

import pytest

import networks
from processes import start_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROGRAM = """
    import time
    import numpy as np
    from processes import report, say
    from worker_setup import me, strategy, total

    ones = strategy.experimental_distribute_values_from_function(lambda _: np.ones(3, np.float32))
    for i in range(900):
        result = np.asarray(strategy.run(total, (ones,)).addressable_data(0))
        assert (result == 4).all()
        time.sleep(0.02)
        if i == 20:
            say("training")
    report(i)
"""


@pytest.fixture
def two_hosts():
    if why := networks.why_not():
        pytest.skip(why)
    with networks.make_two_hosts() as made:
        yield made


def test_a_network_that_comes_back_is_waited_for(two_hosts):
    with start_processes(PROGRAM, devices_per_process=2, hosts=two_hosts.hosts) as running:
        running.wait_until_said(1, "training")
        two_hosts.unplug()
        time.sleep(6)
        two_hosts.plug_in()
        finished = running.wait(120)
    assert [x.result for x in finished] == [899, 899]
    assert "has told nothing for" in finished[0].stderr


def test_a_network_that_is_lost_ends_both_and_both_say_why(two_hosts):
    with start_processes(PROGRAM, devices_per_process=2, hosts=two_hosts.hosts) as running:
        running.wait_until_said(1, "training")
        two_hosts.unplug()
        start = time.monotonic()
        finished = running.wait(120, exit_codes=(75,))
        assert time.monotonic() - start < 40
    for index, one in enumerate(finished):
        assert f"tpudist, process {index}: Process {1 - index}" in one.stderr
        assert "Start all processes again" in one.stderr
    # The first to notice ends; both kernels are one here, and it says so to the other.
    assert any("or its host or network has failed" in one.stderr for one in finished)
