"""`python -m tpudist`, with limits from the environment that a test need not wait for.

LINK_S is how long a host may be silent, SUPERVISORS_S how long a run waits for others at its end.
"""

import os
import sys

from tpudist import cli
from tpudist.processes import peer_connections
from tpudist.supervisor import membership

peer_connections.DEAD_PEER_S = float(os.environ.get("LINK_S", peer_connections.DEAD_PEER_S))
membership.SUPERVISORS_S = float(os.environ.get("SUPERVISORS_S", membership.SUPERVISORS_S))
sys.exit(cli.main(sys.argv[1:]))
