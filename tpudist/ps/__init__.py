"""Parameter servers: variables and tables whose updates take effect once per closure.

See README.md in this folder.
"""

from tpudist.ps.embedding_table import Table
from tpudist.ps.sharded_variable import ShardedVariable, embedding_lookup
from tpudist.ps.tables.row_touches import Eviction
from tpudist.ps.tables.rowwise_adagrad import rowwise_adagrad

__all__ = ["Eviction", "ShardedVariable", "Table", "embedding_lookup", "rowwise_adagrad"]
