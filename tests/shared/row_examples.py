"""Number of examples in the tests of partial batches: ROW_EXAMPLES, or a number for CI.

With ROW_EXAMPLES=2000 they take about an hour on one core; with any number all losses and metrics
are tried, and not a share of them.
"""

import os

NUM_EXAMPLES = int(os.environ.get("ROW_EXAMPLES", "32"))
ALL_CASES = "ROW_EXAMPLES" in os.environ
