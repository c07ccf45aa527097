"""The kernels, by operation, and what is worth knowing about each. Importing this needs Triton."""

from collections.abc import Callable
from typing import Any, NamedTuple

from cedar.ops.cast import triton as cast
from cedar.ops.compress import triton as compress
from cedar.ops.engram_gate import triton as engram_gate
from cedar.ops.engram_hash import triton as engram_hash
from cedar.ops.engram_rows import triton as engram_rows
from cedar.ops.experts import training as experts
from cedar.ops.experts.mixture import MixtureKernels
from cedar.ops.index_score import prefill as index_prefill
from cedar.ops.index_score import triton as index_score
from cedar.ops.latent import triton as latent
from cedar.ops.linear.kernels import LinearKernels
from cedar.ops.mhc import backward_triton as mhc
from cedar.ops.norm import triton as norm
from cedar.ops.rope import triton as rope
from cedar.ops.route import triton as route
from cedar.ops.select import triton as select
from cedar.ops.sparse_attention import triton as sparse_attention
from cedar.ops.window import triton as window

__all__ = ["Kernel", "kernels"]


class Kernel(NamedTuple):
    """A kernel of an operation, and what is worth knowing about it."""

    call: Callable[..., Any]
    note: str


def kernels(*, hopper: bool) -> dict[str, Kernel]:
    """By operation. hopper: the device has compute capability 9.0."""

    def by_hand(module: Any) -> str:
        """Whether the released shape has a kernel of its own here, or why it has not."""
        if not hopper:
            return "; the one for the released shape is for compute capability 9.0"
        if module.hopper is None:
            return "; this Triton lacks Gluon, which the one for the released shape needs"
        return "; at the released shape one written for Hopper by hand (Gluon)"

    products, attention = LinearKernels(), sparse_attention.AttentionKernels()
    mixture = MixtureKernels(route.router, experts.experts)
    rows = "reads packed rows in place; with gradients, too" + by_hand(sparse_attention)
    few = "few tokens: reads packed weights once, norm and cast of the input included"
    scores = "reads packed index keys in place" + by_hand(index_score)
    choose = "exact, ties to the lowest number"
    return {
        "cast": Kernel(cast.cast, "one launch; with gradients, too"),
        "project": Kernel(products.project, few),
        "project_groups": Kernel(products.project_groups, few),
        "project_output": Kernel(
            products.project_output, few + "; the first product prepares the second one's input"
        ),
        "wide_linear": Kernel(products.wide_linear, "narrow inputs, float32 sums"),
        "rms_norm": Kernel(norm.rms_norm, "one launch"),
        "rotate": Kernel(latent.rotate, "one launch"),
        "rotary_tables": Kernel(rope.rotary_tables, "one launch for all tables of a step"),
        "latent": Kernel(latent.latent, "norm, rotation and cast in one launch"),
        "latents": Kernel(latent.latents, "packs rows where the cache holds them"),
        "window_places": Kernel(window.window_places, "one launch"),
        "compress_ring": Kernel(compress.compress_ring, "one launch; rings read and written"),
        "engram_hash": Kernel(engram_hash.engram_hash, "one launch"),
        "engram_ids": Kernel(engram_hash.engram_ids, "one launch for all layers and the history"),
        "engram_rows": Kernel(engram_rows.engram_rows, "reads packed rows, in host memory, too"),
        "engram_gate": Kernel(engram_gate.engram_gate, "one launch"),
        "sparse_attention": Kernel(attention.sparse_attention, rows),
        "rotated_attention": Kernel(attention.rotated_attention, rows + "; rotations included"),
        "index_prefill": Kernel(
            index_prefill.index_prefill,
            "products of heads stay on the chip; forward only" + by_hand(index_prefill),
        ),
        "index_scan": Kernel(index_score.index_scan, scores),
        "index_pool": Kernel(index_score.index_pool, scores),
        "select_entries": Kernel(select.select_entries, choose),
        "select_scan": Kernel(select.select_scan, choose + "; entries, their rows and blocks"),
        "select_pool": Kernel(select.select_pool, choose + "; entries and their rows"),
        "router": Kernel(route.router, "products, scores and choice in two launches"),
        "experts": Kernel(
            experts.experts,
            "reads packed FP4 weights in place, few tokens with the shared expert; by hand (Gluon) "
            "for widths of whole 128s on compute capability 9.0, where bfloat16 weights have "
            "kernels with gradients, too",
        ),
        "mixture": Kernel(
            mixture.mixture,
            "few tokens on packed weights: router and experts in four launches, on compute "
            "capability 9.0; else as both by themselves",
        ),
        "mhc_step": Kernel(
            mhc.MhcStepTraining(), "one launch a sublayer, 4 streams; with gradients, too"
        ),
    }
