"""The primitives of JAX that compute each element of the result from that element of the operands.

One table for every reader of programs: partial batches, means, optimizers on servers, and lowering.
A reader rejects a primitive that is missing here, or has its own rule for it.
"""

# Functions of numbers and truth values, and comparisons. Means do not pass through them.
FUNCTIONS = frozenset(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp cos cosh
    digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mulhi ne nextafter not
    one_minus_square or polygamma polynomial pow random_gamma_grad regularized_incomplete_beta rem
    round rsqrt sign sin sinh sqrt square tan tanh xor zeros_like zeta
    """.split()
)
# Sums, products and choices. A mean may pass through them, by a rule for each.
ARITHMETIC = frozenset("add add_any div integer_pow mul neg select_n sub".split())
# The same numbers, possibly in another precision.
COPIES = frozenset("convert_element_type copy copy_p reduce_precision stop_gradient".split())
# The same numbers, with a note for the compiler or for types.
ANNOTATIONS = frozenset(
    """
    device_put layout_constraint name optimization_barrier pcast pvary reduced_vary_cast reshard
    sharding_constraint vary_unreduced_cast xla_metadata_value
    """.split()
)
COMPLEX_PARTS = frozenset("complex conj imag real".split())
BITS = frozenset(
    """
    bitcast_convert_type clz population_count shift_left shift_right_arithmetic
    shift_right_logical
    """.split()
)
RANDOM = frozenset(
    """
    philox2x32 philox4x32 random_clone random_fold_in random_gamma random_seed random_unwrap
    random_wrap threefry2x32 threefry4x32
    """.split()
)
ALL = FUNCTIONS | ARITHMETIC | COPIES | ANNOTATIONS | COMPLEX_PARTS | BITS | RANDOM
# Operations that compute nothing.
FREE = ANNOTATIONS | frozenset("copy copy_p stop_gradient".split())
