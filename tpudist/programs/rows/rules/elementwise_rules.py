"""Operations that treat each element, or each row, by itself: padding stays where it is."""

from collections.abc import Sequence
from typing import Any

from tpudist.programs.rows.evaluator import Operation, Rule

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos
    cosh device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p
    log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square
    optimization_barrier or pcast philox2x32 philox4x32 polygamma polynomial population_count pow
    pvary random_clone random_fold_in random_gamma random_gamma_grad random_seed random_unwrap
    random_wrap real reduce_precision reduced_vary_cast regularized_incomplete_beta rem reshard
    round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh sqrt square squeeze stack stop_gradient sub tan tanh threefry2x32 threefry4x32
    transpose unstack vary_unreduced_cast xla_metadata_value xor zeros_like zeta
"""
# They write a size into their result, and the padded one does. Random bits of more rows begin with
# those of fewer ones, if rows are their first dim; else they are other draws of the same kind.
_OF_SIZES = {
    "broadcast_in_dim": ("shape",),
    "broadcast_to": ("shape",),
    "empty": ("shape",),
    "empty2": ("shape",),
    "iota": ("shape",),
    "random_bits": ("shape",),
    "random_split": ("shape",),
    "iota_2x32_shape": ("shape",),
    "rng_bit_generator": ("shape",),
}


def _each_element(operation: Operation) -> Sequence[Any]:
    operation.check_params(but=("shape",))
    return operation.bind()


def _of_sizes(operation: Operation) -> Sequence[Any]:
    operation.check_params(but=_OF_SIZES[operation.name])
    return operation.bind()


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _each_element),
    **dict.fromkeys(_OF_SIZES, _of_sizes),
}
