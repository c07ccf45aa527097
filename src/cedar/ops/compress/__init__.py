"""compress: pool the tokens of a group into one latent (section 4)."""

from typing import Protocol

from torch import Tensor

__all__ = ["Compress"]


class Compress(Protocol):
    """``compress(kv [G, ρ, H], gate [G, ρ, H]) -> [G, H]``.

    Per channel: the softmax of the gates over the group's tokens weighs their values.
    """

    def __call__(self, kv_GRH: Tensor, gate_GRH: Tensor) -> Tensor: ...
