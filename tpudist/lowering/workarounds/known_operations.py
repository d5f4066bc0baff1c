"""The operations that are known to compile in replicas of several devices, on what they were tried.

`docs/constructs.md` has what was tried: models of these operations, on replicas of each kind. XLA's
partitioner ends the process over some others (`partitioner_bugs`), so a program with an operation
that is not here, or for another jaxlib, is compiled in a process of its own first.
"""

# `tests/models/test_constructs.py` compares them with those of the models.
KNOWN = frozenset(
    """
    abs acos acosh add add_any all_gather all_to_all and argmax argmin asin asinh atan atan2
    atanh axis_index bitcast_convert_type broadcast_in_dim call_hi_primitive cbrt ceil cholesky
    clamp clz complex concatenate cond conj conv_general_dilated convert_element_type copy cos
    cosh cumlogsumexp cummax cummin cumprod cumsum custom_jvp_call custom_linear_solve
    custom_vjp_call debug_print digamma div dot_general dynamic_slice dynamic_update_slice eigh
    empty2 eq erf erf_inv erfc exp exp2 expm1 fft floor gather ge gt integer_pow io_callback
    iota is_finite jit le le_to lgamma log log1p logistic lt lu max min mul ne neg not
    one_minus_square optimization_barrier or pad pmax pmin polygamma polynomial population_count
    pow ppermute psum pure_callback random_bits random_clone random_fold_in random_gamma
    random_seed random_split random_unwrap random_wrap reduce_and reduce_max reduce_min
    reduce_or reduce_precision reduce_prod reduce_scatter reduce_sum reduce_window_max
    reduce_window_sum reduce_xor rem remat2 reshape reshard rev round rsqrt scan scatter
    scatter-add scatter-max select_and_scatter_add select_n shard_map sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt
    square squeeze stack stop_gradient sub tan tanh tile top_k transpose triangular_solve
    unstack while xor
    """.split()
)
JAXLIBS = ("0.10.2", "0.12.0.1")
