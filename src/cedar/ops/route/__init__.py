"""route: which experts a token visits and with what weight (section 7)."""

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Gating", "Route", "Router", "Routing"]


class Routing(NamedTuple):
    """The router's decision for every token."""

    experts_TA: Tensor  # int64, the active experts, the best first
    weights_TA: Tensor  # float32, their routing weights
    scores_TE: Tensor  # float32, all unbiased scores (for balancing)


class Gating(NamedTuple):
    """What a `Router` is given besides tokens, by the names of its parameters."""

    weight_ED: Tensor
    bias: Tensor  # [E] or [T, E]
    active: int
    temp: float
    score_func: str
    normalize: bool
    route_scale: float


class Route(Protocol):
    """``route(logits [T, E] float32, bias [T or 1, E], active, ...) -> Routing``.

    The bias only selects, equal values the lowest number first; weights are the unbiased scores,
    normalised if asked, times ``route_scale``.
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


class Router(Protocol):
    """``router(x [T, D], weight [E, D], bias [E] or [T, E], active, ...) -> Routing``.

    `Route` of the logits ``x weightᵀ / temp``, products and sums in float32 whatever the type of
    ``x``. Rows where ``real [T]`` is False stand for no token: they are routed like the first
    row, so that they visit no expert of their own. Bytes: ``2 D (E + T)``; FLOP: ``2 T E D``.
    """

    def __call__(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias: Tensor,
        active: int,
        *,
        temp: float,
        score_func: str,
        normalize: bool,
        route_scale: float,
        real_T: Tensor | None = None,
    ) -> Routing: ...
