"""Lists the operations that are known to compile in replicas of several devices.

`docs/constructs.md` lists the tested models, on replicas of each kind. XLA's partitioner ends the
process for some other operations (`partitioner_bugs`). So `first_compile` compiles a program with
an operation that is not listed here, or for another jaxlib, in a separate process first.
"""

from tpudist.programs import elementwise

# Elementwise operations that no model of docs/constructs.md has.
_NOT_TESTED = frozenset(
    """
    bessel_i0e bessel_i1e copy_p device_put eq_to igamma igamma_grad_a igammac imag
    layout_constraint log2 lt_to mulhi name nextafter pcast philox2x32 philox4x32 pvary
    random_gamma_grad real reduced_vary_cast regularized_incomplete_beta threefry2x32 threefry4x32
    vary_unreduced_cast xla_metadata_value zeros_like zeta
    """.split()
)
# `tests/models/test_constructs.py` compares this set with the operations of the models.
KNOWN = (elementwise.ALL - _NOT_TESTED) | frozenset(
    """
    all_gather all_to_all argmax argmin axis_index broadcast_in_dim call_hi_primitive cholesky
    concatenate cond conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum
    custom_jvp_call custom_linear_solve custom_vjp_call debug_print dot_general dynamic_slice
    dynamic_update_slice eigh empty2 fft gather io_callback iota jit lu pad pmax pmin ppermute
    psum pure_callback random_bits random_split reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_scatter reduce_sum reduce_window_max reduce_window_sum reduce_xor remat2
    reshape rev scan scatter scatter-add scatter-max select_and_scatter_add shard_map slice sort
    split squeeze stack tile top_k transpose triangular_solve unstack while
    """.split()
)
# XLA calls into Python to partition these. Another process has no such function, and would end.
COMPILED_HERE = frozenset({"custom_partitioning", "inspect_sharding"})
JAXLIBS = ("0.10.2", "0.12.0.1")
