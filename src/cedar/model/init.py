"""Random weights to train from.

Matrices are normal with a standard deviation that keeps the size of what they map (``in^-½``);
norms start at one, biases and sinks at zero, Engram rows near zero, so that a row which is never
hit says nothing. The streams start as a plain residual: the input mix
reads stream 0, every stream takes the sublayer's output once, and old streams stay where they
are; ``scale`` is 0.01, so that the data changes this only little at first.
"""

import torch
from torch import Tensor, nn

from cedar.model.linear import Weight
from cedar.quant import QuantTensor, quantize

__all__ = ["initialise"]

_OPEN = 4.0  # logits of the plain residual: sigmoid(4) = 0.98; e^4 against 1 in the rows of comb


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of ``model``; the same seed gives the same weights on every device.

    Packed weights get the codes of the values that they would hold otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    packed = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, Weight) and module.scale is not None
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in packed:
                _fill_packed(name, packed[name], generator)
            elif name.removesuffix(".scale") + ".weight" not in packed:
                parameter.copy_(_initial(name, parameter.shape, generator))


def _fill_packed(name: str, weight: Weight, generator: torch.Generator) -> None:
    value = weight.value()
    assert isinstance(value, QuantTensor)
    drawn = quantize(_initial(name, value.shape, generator), value.format)
    for target, source in ((value.codes, drawn.codes), (value.scale, drawn.scale)):
        target.view(torch.uint8).copy_(source.view(torch.uint8))


def _initial(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    kind = name.rsplit(".", 1)[-1]
    if kind.startswith("hc_"):
        return _mixing(kind, shape, generator)
    if kind == "weight" and len(shape) == 1:
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
