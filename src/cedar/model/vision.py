"""The vision tower, its aligner, and the placing of images in the text (section 7).

Not like the text model: rotary pairs are half-split, norms use eps 1e-6, attention is full.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.errors import RequestError
from cedar.model.linear import BuildSpec, Linear, Norm
from cedar.ops import widen

__all__ = ["Aligner", "VisionTower", "place_images"]

_EPS = 1e-6
START, IMAGE, NEWLINE, END = 0, 1, 2, 3


class _PatchEmbed(nn.Module):
    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        pixels = 3 * config.vision_patch_size**2
        self.proj = Linear(pixels, config.vision_dim, None, spec, bias=True)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        self.num_heads = config.vision_n_heads
        self.wqkv = Linear(config.vision_dim, 3 * config.vision_dim, None, spec, bias=True)
        self.wo = Linear(config.vision_dim, config.vision_dim, None, spec, bias=True)

    def forward(self, x_PD: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.wqkv(x_PD).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q, k = _rotate_half_split(q, angles), _rotate_half_split(k, angles)
        # [P, N, h] -> [1, N, P, h], where a fused implementation may be chosen.
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
        return self.wo(o.flatten(1))


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        self.w1 = Linear(config.vision_dim, 2 * config.vision_inter_dim, None, spec)
        self.w2 = Linear(config.vision_inter_dim, config.vision_dim, None, spec)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class _VisionBlock(nn.Module):
    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        self.norm1 = Norm(config.vision_dim, _EPS, spec)
        self.attn = _Attention(config, spec)
        self.norm2 = Norm(config.vision_dim, _EPS, spec)
        self.mlp = _Mlp(config, spec)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class VisionTower(nn.Module):
    """Patches of one image to features."""

    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        self.head_dim = config.vision_dim // config.vision_n_heads
        self.theta = config.vision_rope_theta
        self.patch_embed = _PatchEmbed(config, spec)
        self.blocks = nn.ModuleList(
            _VisionBlock(config, spec) for _ in range(config.vision_n_layers)
        )
        self.norm = Norm(config.vision_dim, _EPS, spec)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """``[P, 3, p, p]`` in row-major order of ``grid`` rows and columns to ``[P, D_vision]``."""
        x = self.patch_embed.proj(patches.flatten(1))
        angles = self._angles(grid, x.device)
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)

    def _angles(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """``[P, h/2]``: row times the frequencies, then column times the same ones."""
        quarter = self.head_dim // 4
        exponent = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
        frequency = 1.0 / self.theta**exponent
        rows, columns = grid
        row = torch.arange(rows, device=device).repeat_interleave(columns)
        column = torch.arange(columns, device=device).repeat(rows)
        return torch.cat((row.unsqueeze(1) * frequency, column.unsqueeze(1) * frequency), dim=1)


def _rotate_half_split(x_PNH: Tensor, angles: Tensor) -> Tensor:
    """Channel ``c`` pairs with ``c + h/2``."""
    first, second = widen(x_PNH).chunk(2, dim=-1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_PNH.dtype)


class Aligner(nn.Module):
    """Cells of ``3 x 3`` patches to the width of the text model."""

    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        self.cell = config.vision_downsample_ratio
        self.w1 = Linear(config.vision_dim * self.cell**2, config.dim, None, spec, bias=True)
        self.w2 = Linear(config.dim, config.dim, None, spec, bias=True)

    def forward(self, x_PD: Tensor, grid: tuple[int, int]) -> Tensor:
        """``[P, D_vision]`` to ``[cells, D]`` in reading order; short edges are padded with 0."""
        rows, columns = grid
        image = x_PD.view(rows, columns, -1).permute(2, 0, 1)
        padded = F.pad(image, (0, -columns % self.cell, 0, -rows % self.cell))
        # Inside a cell: channel, then row, then column.
        cells = F.pixel_unshuffle(padded, self.cell).flatten(1).transpose(0, 1)
        return self.w2(F.gelu(self.w1(cells)))


def place_images(
    x_TD: Tensor, types_T: Tensor, features_ID: Tensor, start: Tensor, newline: Tensor, end: Tensor
) -> Tensor:
    """Put image features and learned delimiters where ``types`` says; the id's row is not used.

    Raises `RequestError` when the spans do not hold as many image tokens as there are features.
    """
    wanted = int((types_T == IMAGE).sum())
    if wanted != len(features_ID):
        raise RequestError(
            f"the batch has {wanted} image positions but its images give {len(features_ID)} "
            "features. Build spans with cedar.inputs.images.span_types of the same grid."
        )
    x = x_TD.masked_scatter((types_T == IMAGE).unsqueeze(1), features_ID.to(x_TD.dtype))
    for kind, row in ((START, start), (NEWLINE, newline), (END, end)):
        x = torch.where((types_T == kind).unsqueeze(1), row.to(x.dtype), x)
    return x
