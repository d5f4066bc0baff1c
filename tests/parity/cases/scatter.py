"""tf.Variable.scatter_*: changing rows."""

from ..rules import CENTRAL, MIRRORED, ONE_DEVICE, TPU, rule
from .common import make, my_id, run, slices


def _scattered(method, on=(MIRRORED, ONE_DEVICE, CENTRAL)):
    def program(api, strategy):
        v = make(api, strategy, [2.0, 4.0, 8.0], "AUTO", "NONE")
        with strategy.scope():
            getattr(v, method)(slices(api, api.array([4.0, 2.0]), [0, 2]))
        return v.numpy()

    program.__name__ = f"{method}_changes_rows_in_cross_replica_context"
    rule(*on)(program)


for _method in ("add", "sub", "mul", "div", "min", "max", "update"):
    _scattered(f"scatter_{_method}")


def _scattered_in_replica(method, aggregation, on=(MIRRORED, TPU)):
    def program(api, strategy):
        v = make(api, strategy, [2.0, 4.0, 8.0], "AUTO", aggregation)

        def step():
            rows = slices(api, api.array([4.0, 2.0]) * (my_id(api) + 1), [0, 2])
            getattr(v, method)(rows)
            return v * 1.0

        return api.outcome(lambda: [run(api, strategy, step), v.numpy()])

    program.__name__ = f"{method}_with_{aggregation}_changes_rows_in_a_replica_function"
    rule(*on)(program)


for _method in ("add", "sub"):
    for _aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        _scattered_in_replica(f"scatter_{_method}", _aggregation)


for _method in ("min", "max", "update"):
    for _aggregation in ("SUM", "ONLY_FIRST_REPLICA"):
        _scattered_in_replica(f"scatter_{_method}", _aggregation)


@rule(MIRRORED, TPU)
def an_on_read_variable_does_not_scatter(api, strategy):
    v = make(api, strategy, [1.0, 2.0], "ON_READ", "SUM")
    rows = slices(api, api.array([4.0]), [0])
    return [
        api.outcome(lambda m=m: getattr(v, m)(rows))
        for m in ("scatter_add", "scatter_sub", "scatter_mul", "scatter_update", "scatter_max")
    ]
