"""What an equation costs: floating point operations, bytes moved, seconds by a roofline.

``seconds = max(flops / peak flops, bytes / bandwidth)`` (Williams, Waterman and Patterson 2009). The rates are assumptions by
platform; ``record`` scales all seconds so that they sum to the measured step. Counts are of the equation as written: a loop's body
is counted once for each turn, where XLA's own ``cost_analysis`` counts it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recoup.jax.jaxprs import bytes_of, elements_of, inner_jaxprs, is_literal, scan_of

__all__ = ["ALIASES", "ELEMENTWISE", "REDUCTIONS", "Rates", "flops_of", "moved_of", "rates_for", "scratch_of", "seconds_of"]

ALIASES = frozenset(
    {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "name", "stop_gradient", "copy", "copy_p", "pvary",
     "random_wrap", "random_unwrap", "sharding_constraint"}
)  # fmt: skip
"""Equations that move nothing: XLA makes views of them, or reads through them."""
_MOVES = frozenset(
    {"slice", "dynamic_slice", "dynamic_update_slice", "gather", "concatenate", "pad", "rev", "split", "iota", "device_put",
     "optimization_barrier"}
)  # fmt: skip
"""Equations that move bytes and compute nothing."""
_COSTLY = {"tanh": 12, "exp": 8, "exp2": 8, "log": 8, "log1p": 10, "expm1": 10, "logistic": 12, "erf": 12, "erfc": 14, "erf_inv": 20,
           "sin": 12, "cos": 12, "tan": 16, "pow": 16, "rsqrt": 4, "sqrt": 4, "cbrt": 12, "div": 2, "atan2": 20, "asin": 16, "acos": 16,
           "atan": 16, "sinh": 14, "cosh": 14, "asinh": 16, "acosh": 16, "atanh": 16, "lgamma": 30, "digamma": 30}  # fmt: skip
ELEMENTWISE = frozenset(_COSTLY) | frozenset(
    {"add", "add_any", "sub", "mul", "neg", "max", "min", "abs", "sign", "floor", "ceil", "round", "rem", "integer_pow", "square",
     "one_minus_square", "select_n", "convert_element_type", "reduce_precision", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to",
     "lt_to", "and", "or",
     "xor", "not", "is_finite", "clamp", "nextafter", "shift_left", "shift_right_logical", "shift_right_arithmetic", "bitcast_convert_type",
     "real", "imag", "complex", "conj", "population_count", "clz", "mul_add"}
)  # fmt: skip
REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin", "reduce_precision"}
)
_RANDOM = {"threefry2x32": 100, "random_bits": 100, "rng_bit_generator": 20, "rng_uniform": 20}
_SORTS = 30


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second, at best.

    Attributes:
        flops_per_second: of matrix products in the dtypes of a training step.
        bytes_per_second: of its memory.
    """

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved: float) -> float:
        """The roofline, in seconds."""
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)


_GPU = Rates(200e12, 2e12)
_PLATFORMS = {"cpu": Rates(25e9, 8e9), "gpu": _GPU, "cuda": _GPU, "rocm": _GPU, "tpu": Rates(150e12, 1e12)}


def rates_for(platform: str) -> Rates:
    """Assumed rates of a platform; those of a GPU for one that is not known."""
    return _PLATFORMS.get(platform, _GPU)


def flops_of(eqn: Any) -> int:
    """Floating point operations of one equation, loops by their length, the dearest branch of a condition."""
    name, out = eqn.primitive.name, sum(elements_of(var.aval) for var in eqn.outvars)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        sizes = eqn.invars[0].aval.shape
        return 2 * out * elements_of_sizes([sizes[axis] for axis in contracted])
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out * elements_of(kernel) // max(1, features)
    if name == "scan":
        return scan_of(eqn).length * sum(map(flops_of, scan_of(eqn).jaxpr.eqns))
    held = [sum(map(flops_of, jaxpr.eqns)) for jaxpr in inner_jaxprs(eqn)]
    if held:
        return max(held) if name == "cond" else sum(held)
    if name in _RANDOM:
        return out * _RANDOM[name]
    if name in REDUCTIONS or name.startswith(("cum", "scatter")):
        return max(out, sum(elements_of(atom.aval) for atom in eqn.invars))
    if name in ("sort", "top_k"):
        return _SORTS * sum(elements_of(atom.aval) for atom in eqn.invars)
    return 0 if name in ALIASES | _MOVES else out * _COSTLY.get(name, 1)


_READS_PART = frozenset({"slice", "dynamic_slice", "gather"})
_WRITES_PART = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2}


def moved_of(eqns: Sequence[Any], read: int, made: int) -> int:
    """Bytes that equations which run as one move, given those of all operands and results; slices move only what they take."""
    if len(eqns) == 1 and eqns[0].primitive.name in _READS_PART:
        return 2 * made
    if len(eqns) == 1 and eqns[0].primitive.name in _WRITES_PART:
        return 2 * bytes_of(eqns[0].invars[_WRITES_PART[eqns[0].primitive.name]].aval)
    return read + made


def seconds_of(eqns: Sequence[Any], moved: int, rates: Rates) -> float:
    """Seconds of equations that run as one; of a loop, its turns times those of its body."""
    inside = [sum(_alone(eqn, rates) for eqn in jaxpr.eqns) * _turns(outer) for outer in eqns for jaxpr in inner_jaxprs(outer)]
    return max([rates.seconds(sum(map(flops_of, eqns)), moved), *inside])


def _alone(eqn: Any, rates: Rates) -> float:
    if eqn.primitive.name in ALIASES:
        return 0.0
    read, made = (sum(bytes_of(atom.aval) for atom in atoms) for atoms in (eqn.invars, eqn.outvars))
    return seconds_of([eqn], moved_of([eqn], read, made), rates)


def _turns(eqn: Any) -> int:
    return scan_of(eqn).length if eqn.primitive.name == "scan" else 1


def elements_of_sizes(sizes: list[int]) -> int:
    """The product of sizes."""
    product = 1
    for size in sizes:
        product *= size
    return product


def scratch_of(eqn: Any) -> int:
    """Bytes that stand inside an equation beside its inputs and outputs.

    A matrix product whose batch axes do not come first, or whose contracted axis is neither of the two last, reads a copy of
    that operand. Of loops and branches it is the most that one of their bodies holds at once.
    """
    if eqn.primitive.name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        operands = zip(eqn.invars, contracted, batch, strict=True)
        return sum(bytes_of(atom.aval) for atom, axes, batched in operands if _is_copied(len(atom.aval.shape), axes, batched))
    return max((_standing(jaxpr) for jaxpr in inner_jaxprs(eqn)), default=0)


def _is_copied(rank: int, contracted: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    return bool(batch) and (tuple(batch) != tuple(range(len(batch))) or any(axis < rank - 2 for axis in contracted))


def _standing(jaxpr: Any) -> int:
    """The most bytes that a body has made and still reads later."""
    last = {atom: place for place, eqn in enumerate(jaxpr.eqns) for atom in eqn.invars if not is_literal(atom)}
    last |= {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if not is_literal(atom)}
    given, alive, most = {*jaxpr.invars, *jaxpr.constvars}, 0, 0
    for place, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name in ALIASES:
            continue
        alive += sum(bytes_of(var.aval) for var in eqn.outvars)
        most = max(most, alive + scratch_of(eqn))
        dead = {
            atom for atom in (*eqn.invars, *eqn.outvars) if not is_literal(atom) and atom not in given and last.get(atom, place) <= place
        }
        alive -= sum(bytes_of(var.aval) for var in dead)
    return most
