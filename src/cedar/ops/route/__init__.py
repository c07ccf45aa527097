"""route: which experts a token visits and with what weight (section 7)."""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Route", "Routing"]


class Routing(NamedTuple):
    """The router's decision for every token."""

    experts_TA: Tensor  # int64, the active experts
    weights_TA: Tensor  # float32, their routing weights
    scores_TE: Tensor  # float32, all unbiased scores (for balancing)


class Route(Protocol):
    """``route(logits [T, E] float32, bias [T or 1, E], active, ...) -> Routing``.

    The bias only selects; weights are the unbiased scores, normalised if asked, times
    ``route_scale``.
    """

    def __call__(
        self,
        logits_TE: Tensor,
        bias: Tensor,
        active: int,
        *,
        score_func: str,
        normalize: bool,
        route_scale: float,
    ) -> Routing: ...
