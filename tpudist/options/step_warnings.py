"""Warning classes about steps that compute with the wrong rows, which programs can filter."""


class UndistributedBatchWarning(UserWarning):
    """Warns that each replica computes with the whole of an array, and the results are added up.

    Each replica receives the whole array if you pass `Strategy.run` a NumPy array, or a `jax.Array`
    that is on one device or whose sharding splits its rows. So n replicas repeat the same work. A
    sum over the replicas (in an optimizer or `all_reduce`) is n times the sum on one device, unless
    it is divided by n, as a mean is. The warning appears once per function, with the line of the
    call, if all of these conditions hold:

    - Dim 0 of the array has more than one row.
    - No argument of the call is distributed, and the function captures no `PerReplica`.
    - An `all_reduce` (by sum or mean) in the function adds up a value that depends on the array and
      is equal on all replicas.
    - No value that is added up or returned has the array's shape, as parameters and state would.

    So these cases cause no warning: scalars, lookup tables next to a distributed batch, arrays from
    which each replica takes its own rows, functions that reduce nothing, and replicas that differ
    by their random numbers. To disable the warning:
    `warnings.filterwarnings("ignore", category=tpudist.UndistributedBatchWarning)`.

    Remedy: put the array in a dataset and distribute it with `experimental_distribute_dataset`, so
    that each replica has its own rows.
    """


class LocalMeanWarning(UserWarning):
    """Warns that a step computes a different new state than one device with all rows would.

    A step gets this warning once, when it is traced, with the factor, the line of the mean and the
    line of the reduction. tpudist traces each step that sums over replicas a second time, with more
    rows on more replicas, and derives from both traces how each value grows. A step is reported if
    it adds to its state, as a function of that state:

    - a value that is n times too large on n replicas, such as gradients of a mean over a replica's
      own rows that are summed, or a value that is already reduced and is summed again;
    - a value that is n times too small, such as an average of losses that are divided by all rows;
    - the sum of a share of each replica and of a value that is equal on all replicas, which then
      counts n times;
    - a mean over replicas of means over their own rows, if replicas have different numbers of rows.

    A step is also reported if it returns a reduced loss that is n times too large or too small, or
    if it gives `nnx.metrics.Average` its share of a loss. `Strategy.reduce("mean", loss)` is
    reported if the loss is a share of each replica.

    A step whose values cannot be followed, such as through a `while_loop` or a kernel, is not
    reported. A step that multiplies by a number that may be 1 / n is not reported either.
    `Strategy.verify` compares such steps with one device. To disable the warning:
    `warnings.filterwarnings("ignore", category=tpudist.LocalMeanWarning)`.

    Remedy: compute the loss with `tpudist.compute_average_loss(per_example_loss)`, and sum the
    gradients over the replicas.
    """
