"""mhc: the residual streams' mixing (section 1).

Letters: ``T`` tokens, ``C`` streams, ``D`` width.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = [
    "MhcCoefficients",
    "MhcCollapse",
    "MhcExpand",
    "MhcMix",
    "MhcParameters",
    "MhcStep",
]


class MhcMix(NamedTuple):
    """What one sublayer computes from the streams, all float32."""

    pre_TC: Tensor  # input mix, for the next sublayer (single-pass) or this one (two-pass)
    post_TC: Tensor  # how much of the sublayer's output each stream takes
    comb_TCC: Tensor  # comb[j, i]: how much of old stream j goes into new stream i


class MhcParameters(NamedTuple):
    """A sublayer's own mixing parameters, all float32; C streams of width D."""

    fn: Tensor  # [(2 + C)C, C·D]
    base: Tensor  # [(2 + C)C]
    scale: Tensor  # [3]


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


class MhcStep(Protocol):
    """From one sublayer's output to the next one's input: `MhcExpand`, then of the new streams
    `MhcCoefficients` with the next sublayer's parameters, `MhcCollapse` with ``pre``, RMSNorm.

    ``mhc_step(x [T, C, D], (y [T, D], mix) | None, pre [T, C], parameters, norm weight [D], ...)
    -> (x' [T, C, D], the next mix, h [T, D])``; without an update ``x'`` is ``x``.
    """

    def __call__(
        self,
        x_TCD: Tensor,
        update: tuple[Tensor, MhcMix] | None,
        pre_TC: Tensor,
        parameters: MhcParameters,
        norm_weight: Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
        sinkhorn_iters: int,
    ) -> tuple[Tensor, MhcMix, Tensor]: ...
