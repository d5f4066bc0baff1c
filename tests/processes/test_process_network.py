"""A network between two hosts that fails for a while.

`tests/test_pod_in_a_box.py` has a network that fails for good.
"""

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
    for i in range(200):
        result = np.asarray(strategy.run(total, (ones,)).addressable_data(0))
        assert (result == 4).all()
        time.sleep(0.02)
        if i == 20:
            say("training")
    report(i)
"""


@pytest.fixture
def two_hosts():
    if why := networks.why_unsupported():
        pytest.skip(why)
    with networks.make_two_hosts() as hosts:
        yield hosts


@pytest.mark.exhaustive
def test_a_run_survives_a_short_network_failure(two_hosts):
    with start_processes(PROGRAM, devices_per_process=2, hosts=two_hosts.hosts) as running:
        running.wait_until_said(1, "training")
        two_hosts.unplug()
        stderr, deadline = running.workers[0].folder / "stderr", time.monotonic() + 12
        while "has not reported for" not in stderr.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        two_hosts.plug_in()
        finished = running.wait(120)
    assert [x.result for x in finished] == [199, 199]
    assert "has not reported for" in finished[0].stderr
