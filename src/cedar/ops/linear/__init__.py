"""linear: ``y = x Wᵀ (+ b)`` with a weight in floating point or in a block format.

Five operations: the plain product, and four that a kernel may do in fewer launches than their
parts: products that share an input, a product for each group of heads, both of them one after the
other, a product in float32.
"""

from typing import Protocol

from torch import Tensor

from cedar.quant import BlockFormat, QuantTensor

__all__ = ["LinearOp", "Project", "ProjectGroups", "ProjectOutput", "WideLinear"]


class LinearOp(Protocol):
    """``linear(x [..., in], weight [out, in], bias [out] | None) -> [..., out]``.

    The product accumulates in float32 and is rounded once to the type of ``x``. Quantising the
    input is the caller's business: which products do it is part of the architecture (section 8).
    """

    def __call__(
        self, x: Tensor, weight: Tensor | QuantTensor, bias: Tensor | None = None
    ) -> Tensor: ...


class Project(Protocol):
    """``project(x [..., in], (w_0 [out_0, in], ...)) -> ([..., out_0], ...)``: one input for all.

    First x is normalised, if ``norm`` (weight ``[in]`` and eps) is given, and rounded to its type;
    then cast to ``input_format``, if that is given; then multiplied as by `LinearOp`.

    Bytes with FP8 weights: ``Σ out_i in (1 + 1/1024) + 2 T (in + Σ out_i)``. FLOP:
    ``2 T in Σ out_i``. Below some ninety tokens an H200 is bound by the weights' bytes.
    """

    def __call__(
        self,
        x: Tensor,
        weights: tuple[Tensor | QuantTensor, ...],
        *,
        input_format: BlockFormat | None,
        norm: tuple[Tensor, float] | None = None,
    ) -> tuple[Tensor, ...]: ...


class ProjectGroups(Protocol):
    """``project_groups(o [T, G, K], weight [G R, K]) -> [T, G R]``: each group by its own rows.

    A quantised weight is used in the type of ``o``, which is not cast. Bytes with an FP8 weight:
    ``G R K (1 + 1/1024) + 2 T G (K + R)``. FLOP: ``2 T G R K``.
    """

    def __call__(self, o_TGK: Tensor, weight: Tensor | QuantTensor) -> Tensor: ...


class ProjectOutput(Protocol):
    """``project_output(o [T, G, K], first [G R, K], second [D, G R], ...) -> [T, D]``.

    `ProjectGroups` by ``first``, then `Project` by ``second`` with ``input_format``. Bytes and
    FLOP: theirs.
    """

    def __call__(
        self,
        o_TGK: Tensor,
        first: Tensor | QuantTensor,
        second: Tensor | QuantTensor,
        *,
        input_format: BlockFormat | None,
    ) -> Tensor: ...


class WideLinear(Protocol):
    """``wide_linear(x [..., in], weight [out, in]) -> [..., out]`` in float32, never narrowed.

    float64 for a float64 x. Products of two bfloat16 numbers are exact in float32, so narrow
    inputs need not be widened first. Bytes with a bfloat16 weight: ``2 out in + T (2 in + 4 out)``.
    FLOP: ``2 T in out``.
    """

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...
