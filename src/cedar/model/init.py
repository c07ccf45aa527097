"""Random weights to train from.

Matrices are normal with a standard deviation that keeps the size of what they map (``in^-½``);
norms start at one, biases and sinks at zero, Engram rows near zero, so that a row which is never
hit says nothing. The streams start as a plain residual: the input mix
reads stream 0, every stream takes the sublayer's output once, and old streams stay where they
are; ``scale`` is 0.01, so that the data changes this only little at first.
"""

import torch
from torch import Tensor, nn

__all__ = ["initialise"]

_OPEN = 4.0  # logits of the plain residual: sigmoid(4) = 0.98; e^4 against 1 in the rows of comb


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of ``model``; the same seed gives the same weights on every device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_initial(name, parameter, generator).to(parameter))


def _initial(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize == 1:
        raise ValueError(f"{name} holds codes: only floating-point masters can be initialised")
    kind = name.rsplit(".", 1)[-1]
    shape = parameter.shape
    if kind.startswith("hc_"):
        return _mixing(kind, shape, generator)
    if kind == "weight" and parameter.dim() == 1:
        return torch.ones(shape)
    if kind in ("bias", "bias_vl", "attn_sink"):
        return torch.zeros(shape)
    if kind in ("q_weight", "k_weight"):
        return torch.ones(shape)
    normal = torch.randn(shape, generator=generator)
    if "embed.weight" in name or kind.startswith("image_"):
        return normal * (0.05 if "engram" in name else 0.5)
    return normal * shape[-1] ** -0.5


def _mixing(kind: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if kind.endswith("scale"):
        return torch.full(shape, 0.01)
    if kind.endswith("fn"):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    # base: [m] input mix, [m] post, [m, m] comb with (2 + m)·m values in all
    m = next(m for m in range(1, shape[0] + 1) if (2 + m) * m == shape[0])
    pre = torch.full((m,), -_OPEN)
    pre[0] = _OPEN
    comb = torch.eye(m) * 2 * _OPEN - _OPEN
    return torch.cat((pre, torch.zeros(m), comb.flatten()))
