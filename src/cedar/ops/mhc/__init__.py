"""mhc: the residual streams' mixing (section 1).

Letters: ``T`` tokens, ``C`` streams, ``D`` width.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["MhcCoefficients", "MhcCollapse", "MhcExpand", "MhcMix"]


class MhcMix(NamedTuple):
    """What one sublayer computes from the streams, all float32."""

    pre_TC: Tensor  # input mix, for the next sublayer (single-pass) or this one (two-pass)
    post_TC: Tensor  # how much of the sublayer's output each stream takes
    comb_TCC: Tensor  # comb[j, i]: how much of old stream j goes into new stream i


class MhcCoefficients(Protocol):
    """``mhc_coefficients(x [T, C, D], fn [(2+C)C, C·D], base [(2+C)C], scale [3], ...) -> MhcMix``.

    One RMS statistic over all ``C·D`` values, the projection first and the statistic after it;
    then sigmoids and ``sinkhorn_iters`` Sinkhorn steps, which end on the columns.
    """

    def __call__(
        self,
        x_TCD: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
        sinkhorn_iters: int,
    ) -> MhcMix: ...


class MhcCollapse(Protocol):
    """``mhc_collapse(x [T, C, D], pre [T, C]) -> [T, D]``: ``Σ_j pre_j x_j``, float32 sum."""

    def __call__(self, x_TCD: Tensor, pre_TC: Tensor) -> Tensor: ...


class MhcExpand(Protocol):
    """``mhc_expand(x [T, C, D], y [T, D], mix) -> [T, C, D]``.

    ``x_i ← post_i · y + Σ_j comb[j, i] · x_j``, float32 sum.
    """

    def __call__(self, x_TCD: Tensor, y_TD: Tensor, mix: MhcMix) -> Tensor: ...
