"""Products whose result does not depend on the machine.

In float32 sets one last bit decides, here and there, which way a quantiser rounds, and then a
logit moves by a hundredth: the order in which a matrix product adds up is enough (other vector
instructions, one thread more). The golden float32 sets were chosen so that accumulating every
product in float64 and rounding it back changes nothing. That is done here while a float32 model
runs, so that what is left to differ is the logic.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ExactProducts"]

_PRODUCTS = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.bmm,
        Tensor.matmul,
        Tensor.mm,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
    }
)


class ExactProducts(TorchFunctionMode):
    """While active, products of float32 tensors accumulate in float64 and are rounded once."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func not in _PRODUCTS or not _all_float32((*args, *named.values())):
            return func(*args, **named)
        wide = func(*map(_widened, args), **{key: _widened(one) for key, one in named.items()})
        return wide.to(torch.float32)


def _all_float32(values: Iterable[Any]) -> bool:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return bool(tensors) and all(tensor.dtype is torch.float32 for tensor in tensors)


def _widened(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, Tensor) else value
