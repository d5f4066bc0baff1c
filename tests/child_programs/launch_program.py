"""`python -m tpudist`, with limits from the environment that a test need not wait for.

LINK_S is how long a host may be silent, SUPERVISORS_S how long a run waits for others at its end.
"""

import os
import sys

from tpudist import cli
from tpudist.processes import process_lines
from tpudist.supervisor import membership

process_lines.LINK_S = float(os.environ.get("LINK_S", process_lines.LINK_S))
membership.SUPERVISORS_S = float(os.environ.get("SUPERVISORS_S", membership.SUPERVISORS_S))
sys.exit(cli.main(sys.argv[1:]))
