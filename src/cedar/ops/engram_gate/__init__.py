"""engram_gate: write a looked-up value into the streams, gated per stream (section 7)."""

from typing import Protocol

from torch import Tensor

__all__ = ["EngramGate"]


class EngramGate(Protocol):
    """``engram_gate(x [T, C, D], keys [T, C, D], value [T, D], ...) -> [T, C, D]``.

    ``q_weight`` and ``k_weight`` are ``[C, D]``; only their product matters.

    ``u = Σ (x ⊙ q ⊙ k ⊙ key) · rstd(x) · rstd(key) · D^-½`` per stream, float32;
    ``g = sigmoid(sgn(u) · sqrt(max(|u|, 1e-6)))``, 0 where ``open`` is false; ``x + g · value``.
    """

    def __call__(
        self,
        x_TCD: Tensor,
        keys_TCD: Tensor,
        value_TD: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        open_T: Tensor | None,
    ) -> Tensor: ...
