"""Router and experts in four launches for few tokens on Hopper: dispatch, two products, sum."""

import torch
from torch import Tensor

from cedar.ops.experts import Experts, Shared
from cedar.ops.experts.packed import for_few
from cedar.ops.route import Gating, Router, Routing
from cedar.ops.route.triton import unsupported
from cedar.quant import BlockFormat, QuantTensor

__all__ = ["MixtureKernels"]


class MixtureKernels:
    """`cedar.ops.experts.Mixture`; what it cannot take goes to the two operations by themselves.

    Holds counters of programs that arrived, in use during a launch, so launches that may overlap
    need instances of their own. The first call on a device allocates them, so it must not be
    captured in a graph.
    """

    def __init__(self, router: Router, experts: Experts) -> None:
        self._router, self._experts = router, experts
        self._counters: dict[torch.device, Tensor] = {}

    def mixture(
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
    ) -> tuple[Tensor, Routing]:
        few = None
        if shared is not None and unsupported(x_TD, gating.weight_ED, gating.score_func) is None:
            few = for_few(x_TD, (w1, w2, w3), gating.active, input_format, shared)
        if few is not None:
            found = self._few(x_TD, gating, *few, limit, real_T)
            if found is not None:
                return found
        routing = self._router(x_TD, **gating._asdict(), real_T=real_T)
        y_TD = self._experts(
            x_TD, routing.experts_TA, routing.weights_TA, w1, w2, w3,
            limit=limit, input_format=input_format, shared=shared,
        )  # fmt: skip
        return y_TD, routing

    def _few(
        self,
        x_TD: Tensor,
        gating: Gating,
        weights: tuple[QuantTensor, QuantTensor, QuantTensor],
        shared: tuple[QuantTensor, QuantTensor, QuantTensor],
        limit: float,
        real_T: Tensor | None,
    ) -> tuple[Tensor, Routing] | None:
        from cedar.ops.experts import few
        from cedar.ops.experts.dispatch import COUNTERS, dispatch, takes
        from cedar.ops.experts.prepare import FEW

        if not takes(x_TD, gating):
            return None
        counters = self._counters.get(x_TD.device)
        if counters is None:
            counters = torch.zeros(COUNTERS, dtype=torch.int32, device=x_TD.device)
            self._counters[x_TD.device] = counters
        block = few.tokens_per_tile(len(x_TD) * gating.active, weights[0].shape[0])
        routing, x, tiles = dispatch(x_TD, gating, real_T, counters, block, FEW)
        y_TD = few.products(x, tiles, routing.weights_TA, *weights, limit=limit, shared=shared)
        return y_TD, routing
