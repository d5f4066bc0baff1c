"""`python -m tpudist` is the command `tpudist`."""

import sys

from tpudist.cli import main

sys.exit(main())
