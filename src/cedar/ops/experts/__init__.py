"""experts: the routed experts of a mixture and its shared one (section 7)."""

from typing import Protocol

from torch import Tensor

from cedar.ops.route import Gating, Routing
from cedar.quant import BlockFormat, QuantTensor

__all__ = ["Experts", "Mixture", "Shared", "Swiglu"]

Shared = tuple[Tensor | QuantTensor, Tensor | QuantTensor, Tensor | QuantTensor]
"""``w1, w2, w3`` of the expert that every token visits: ``[Fs, D]``, ``[D, Fs]``, ``[Fs, D]``."""


class Swiglu(Protocol):
    """``swiglu(gate [..., F], up [..., F], limit) -> [..., F]`` float32.

    ``silu(min(gate, limit)) ⊙ clamp(up, −limit, limit)``.
    """

    def __call__(self, gate: Tensor, up: Tensor, limit: float) -> Tensor: ...


class Experts(Protocol):
    """``experts(x [T, D], experts [T, A], weights [T, A], w1, w2, w3, ...) -> [T, D]``.

    ``w1, w3 [E, F, D]`` and ``w2 [E, D, F]`` are floating point or quantised per row. The routing
    weight multiplies the activation BEFORE ``w2``; with ``input_format`` both inputs are cast to
    it first. Sums over a token's experts are float32, and so is the result; with ``shared``, an
    expert that every token visits with weight 1, that one's output is added last and the result
    has the type of ``x``.

    Bytes: weights of the experts visited and of the shared one once, rows ``T A (2 D + 2 F)``.
    FLOP: ``6 T D (A F + Fs)``.
    """

    def __call__(
        self,
        x_TD: Tensor,
        experts_TA: Tensor,
        weights_TA: Tensor,
        w1: Tensor | QuantTensor,
        w2: Tensor | QuantTensor,
        w3: Tensor | QuantTensor,
        *,
        limit: float,
        input_format: BlockFormat | None,
        shared: Shared | None = None,
    ) -> Tensor: ...


class Mixture(Protocol):
    """``mixture(x [T, D], gating, w1, w2, w3, ...) -> ([T, D], Routing)``: router and experts.

    `Router` (with ``real [T]``), then `Experts` with what it chose. Bytes and FLOP: theirs.
    """

    def __call__(
        self,
        x_TD: Tensor,
        gating: Gating,
        w1: Tensor | QuantTensor,
        w2: Tensor | QuantTensor,
        w3: Tensor | QuantTensor,
        *,
        limit: float,
        input_format: BlockFormat | None,
        shared: Shared | None = None,
        real_T: Tensor | None = None,
    ) -> tuple[Tensor, Routing]: ...
