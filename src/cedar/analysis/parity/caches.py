"""Comparing what a prefill left in the store with golden caches."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from cedar.analysis.parity.judge import FP4_RMS, FP8_RMS, Judge
from cedar.analysis.parity.report import Kind
from cedar.cache import DenseKV
from cedar.config.model import ModelConfig

__all__ = ["compare_caches"]

_CACHE = re.compile(
    r"(?P<part>layers|mtp)\.(?P<number>\d+)\.attn\."
    r"(?P<what>window_kv_cache|compress_kv_cache|indexer\.k_cache"
    r"|compressor\.kv_state|compressor\.score_state)"
)


def compare_caches(
    judge: Judge,
    config: ModelConfig,
    store: DenseKV,
    wanted: Mapping[str, str],
    *,
    length: int,
    how: Kind,
) -> None:
    """Compare the caches of the stored sequences after a prefill of ``length`` tokens.

    wanted: keys and their names without prefix. Window rings are golden by slot (position
    modulo window), residues by place in the group. how: ``FLOAT32``, ``SHOWN``, or ``BFLOAT16``
    for a store that was filled from golden inputs.
    """
    for key, name in wanted.items():
        match = _CACHE.fullmatch(name)
        if match is None:
            continue
        draft = match["part"] == "mtp"
        layer = int(match["number"]) + (config.n_layers if draft else 0)
        golden = judge.golden.tensors[key][: store.num_sequences]
        try:
            pairs = [
                _cached(match["what"], layer, slot, store, golden[slot], length)
                for slot in range(len(golden))
            ]
        except KeyError:
            continue  # this model keeps no such thing: the key stays open and fails
        ours = torch.stack([ours for ours, _ in pairs])
        theirs = torch.stack([there for _, there in pairs])
        if how is Kind.FLOAT32:
            judge.float32(key, ours, golden=theirs)
        elif how is Kind.BFLOAT16:
            limit = FP8_RMS if match["what"] == "window_kv_cache" else FP4_RMS
            judge.relative_rms(key, ours, golden=theirs, limit=limit)
        else:
            judge.shown(key, ours, golden=theirs)


def _cached(
    what: str, layer: int, slot: int, store: DenseKV, golden: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Ours and the part of the golden cache that corresponds to it."""
    if what == "window_kv_cache":
        ring = store.window(layer, slot)
        places = torch.arange(length - len(ring), length) % golden.shape[0]
        return ring, golden[places]
    if what == "compress_kv_cache":
        return store.entries(layer, slot)[0], golden
    if what == "indexer.k_cache":
        return store.entries(layer, slot)[1], golden
    values, gates = store.residue(layer, slot)
    ours = values if what == "compressor.kv_state" else gates
    # The golden buffer has room for a whole group; what an earlier group left means nothing.
    return ours, golden[: length % golden.shape[0]]
