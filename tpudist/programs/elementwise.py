"""The primitives of JAX whose result at each place depends on the operands at that place only.

One table for every reader of programs: partial batches, means, optimizers on servers, and lowering.
Each primitive has one line, by what it computes. A primitive that is missing here is not taken for
element-wise: readers then refuse it or look for a rule of their own.
"""

# Functions of numbers, of truth values and comparisons, without a rule of their own for means.
FUNCTIONS = frozenset(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp cos cosh
    digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mulhi ne nextafter not
    one_minus_square or polygamma polynomial pow random_gamma_grad regularized_incomplete_beta rem
    round rsqrt sign sin sinh sqrt square tan tanh xor zeros_like zeta
    """.split()
)
# Sums, products and choices, which a mean passes through in one way or another.
ARITHMETIC = frozenset("add add_any div integer_pow mul neg select_n sub".split())
# The same numbers once more, in another precision at most.
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
