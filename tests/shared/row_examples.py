"""How many examples the tests of partial batches try: ROW_EXAMPLES, or what CI has time for.

With ROW_EXAMPLES=2000 they take about an hour on one core; with any number all losses and metrics
are tried, and not a share of them.
"""

import os

NUM_EXAMPLES = int(os.environ.get("ROW_EXAMPLES", "32"))
ALL_CASES = "ROW_EXAMPLES" in os.environ
