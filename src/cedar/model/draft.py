"""DSpark: window-only blocks that draft a block of tokens at once (section 7).

The draft head sees the backbone only through *main states*: the mean over the streams entering
its target layers, projected. Its tokens use the backbone's embedding and output head, which the
caller passes in.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedar.config.model import ModelConfig
from cedar.config.plan import Half, LayerPlan
from cedar.errors import RequestError
from cedar.model.context import KVStore, LayerStats, Rotary, Streams
from cedar.model.layer import Block
from cedar.model.layout import rotary, window_slots
from cedar.model.linear import BuildSpec, Linear, Norm, Weight
from cedar.model.moe import router_stats
from cedar.ops import widen
from cedar.ops.sparse_attention import Rows
from cedar.quant import FP8_BLOCK

__all__ = ["DraftBlock", "DraftHead", "DraftOutput", "DraftProposal", "MainStates"]


class MainStates(NamedTuple):
    """Window entries that the draft blocks see, and which of them each anchor sees.

    rows: one ``[R, H]`` per block; slots ``[N, W]`` are rows, −1 for none.
    """

    rows: tuple[Tensor, ...]
    slots_NW: Tensor


class DraftOutput(NamedTuple):
    """hidden ``[N, block, D]`` (collapsed, not normalised), base logits ``[N, block, V]``."""

    hidden_NBD: Tensor
    logits_NBV: Tensor
    stats: tuple[LayerStats, ...]


class DraftProposal(NamedTuple):
    """Drafted tokens ``[N, block]``, the logits they were chosen from, raw confidences."""

    tokens_NB: Tensor
    logits_NBV: Tensor
    confidence_NB: Tensor


class _MarkovHead(nn.Module):
    """A low-rank bias on the next token's logits from the token before; float32."""

    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        shape = (config.vocab_size, config.dspark_markov_rank)
        self.embed = Weight(shape, None, spec)
        self.head = Weight(shape, None, spec)

    def embedding(self, tokens: Tensor) -> Tensor:
        return widen(F.embedding(tokens, self.embed.weight))

    def bias(self, embedding: Tensor) -> Tensor:
        return F.linear(embedding, self.head.weight.to(embedding.dtype))


class _ConfidenceHead(nn.Module):
    def __init__(self, config: ModelConfig, spec: BuildSpec) -> None:
        super().__init__()
        self.proj = Linear(config.dim + config.dspark_markov_rank, 1, None, spec)


class DraftBlock(Block):
    """One draft block; the first projects main states, the last holds the heads."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, spec: BuildSpec, place: int) -> None:
        super().__init__(
            config, plan, config.dspark_n_routed_experts, config.dspark_n_activated_experts, spec
        )
        if place == 0:
            width = len(config.dspark_target_layer_ids) * config.dim
            self.main_proj = Linear(width, config.dim, FP8_BLOCK, spec)
            self.main_norm = Norm(config.dim, config.norm_eps, spec)
        if place == config.n_mtp_layers - 1:
            self.norm = Norm(config.dim, config.norm_eps, spec)
            self.markov_head = _MarkovHead(config, spec)
            self.confidence_head = _ConfidenceHead(config, spec)

    def forward(
        self, streams: Streams, main: Rows, block_slots: Tensor, at: Rotary
    ) -> tuple[Streams, LayerStats]:
        """All positions of a block see the same main states and the whole block."""
        mix, x = self.mix(streams, "attn")
        x = self.attn_norm(x)
        q = self.attn.query(self.attn.latent_query(x), at)
        sources = (main, Rows(self.attn.window_kv(x, at), block_slots))
        o = self.ops.sparse_attention(q, sources, self.attn.attn_sink, self.attn.scale)
        streams = self.write(streams, self.attn.output(o, at), mix)
        mix, x = self.mix(streams, "ffn")
        y, routing = self.ffn(self.ffn_norm(x), None)
        return self.write(streams, y, mix), router_stats(self.plan.index, routing, None)


class DraftHead(nn.ModuleList):
    """The draft blocks, and how a block of tokens runs through them."""

    def __init__(self, config: ModelConfig, plans: tuple[LayerPlan, ...], spec: BuildSpec) -> None:
        draft = [plan for plan in plans if plan.half is Half.DRAFT]
        super().__init__(DraftBlock(config, plan, spec, i) for i, plan in enumerate(draft))
        self.config = config
        self.ops = spec.ops
        self.block = config.dspark_block_size
        self.noise = config.dspark_noise_token_id

    @property
    def _first(self) -> DraftBlock:
        return self[0]  # type: ignore[return-value]

    @property
    def _last(self) -> DraftBlock:
        return self[len(self) - 1]  # type: ignore[return-value]

    def main_states(self, taps_TX: Tensor) -> Tensor:
        """Main states ``[T, D]`` of what the backbone's taps returned."""
        return self._first.main_norm(self._first.main_proj(taps_TX))

    def window_entries(self, main_TD: Tensor, at: Rotary) -> tuple[Tensor, ...]:
        """Every block's window entries ``[T, H]`` of the same main states (no ``attn_norm``)."""
        return tuple(block.attn.window_kv(main_TD, at) for block in self)  # type: ignore[union-attr, operator]

    def write(
        self,
        main_TD: Tensor,
        at: Rotary,
        bounds: tuple[tuple[int, int], ...],
        slots: tuple[int, ...],
        store: KVStore,
    ) -> None:
        """Append the entries of committed tokens to the draft rings."""
        for i, rows in enumerate(self.window_entries(main_TD, at)):
            for (start, stop), slot in zip(bounds, slots, strict=True):
                store.extend_window(self.config.n_layers + i, slot, rows[start:stop])
        for (start, stop), slot in zip(bounds, slots, strict=True):
            store.advance(slot, Half.DRAFT, stop - start)

    def stored(self, slots: tuple[int, ...], store: KVStore) -> MainStates:
        """What the rings of some sequences hold."""
        rings = [
            [store.window(self.config.n_layers + i, slot) for slot in slots]
            for i in range(len(self))
        ]
        lengths = tuple(len(ring) for ring in rings[0])
        if 0 in lengths:
            raise RequestError(
                f"slot {slots[lengths.index(0)]} has no main state to draft from. Give the draft "
                "rings those of the prompt first (draft_write)."
            )
        # The newest main state of each sequence sees its whole ring.
        every = window_slots(
            lengths, (0,) * len(lengths), self.config.window_size, rings[0][0].device
        )
        newest = torch.tensor(lengths, device=every.device).cumsum(0) - 1
        return MainStates(tuple(torch.cat(ring) for ring in rings), every[newest])

    def run(
        self,
        tokens_NB: Tensor,
        positions_N: Tensor,
        main: MainStates,
        frequencies: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> DraftOutput:
        """Base logits for all positions of every block at once.

        tokens: the committed token, then noise; positions: of the newest main state, so that
        the block stands at the next ``block`` places.
        """
        count, block = tokens_NB.shape
        device = tokens_NB.device
        place = positions_N.unsqueeze(1) + torch.arange(1, block + 1, device=device)
        at = rotary(place.flatten(), frequencies)
        streams = Streams.fresh(embed(tokens_NB.flatten()), self.config.hc_mult)
        own = torch.arange(count * block, device=device).view(count, 1, block)
        block_slots = own.expand(-1, block, -1).reshape(-1, block)
        main_slots = main.slots_NW.repeat_interleave(block, dim=0)
        stats: tuple[LayerStats, ...] = ()
        for layer, rows in zip(self, main.rows, strict=True):
            streams, report = layer(streams, Rows(rows, main_slots), block_slots, at)
            stats = (*stats, report)
        hidden = streams.collapse(self.ops)
        base = logits(self._last.norm(hidden))
        return DraftOutput(
            hidden.unflatten(0, (count, block)), base.unflatten(0, (count, block)), stats
        )

    def block_tokens(self, first_N: Tensor) -> Tensor:
        """``[N, block]``: the committed token, then noise."""
        tokens = torch.full((len(first_N), self.block), self.noise, device=first_N.device)
        tokens[:, 0] = first_N
        return tokens

    def markov_bias(self, previous: Tensor) -> Tensor:
        """float32 bias ``[..., V]`` on the logits after the tokens ``previous``."""
        head: _MarkovHead = self._last.markov_head
        return head.bias(head.embedding(previous))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Raw confidence ``[...]`` (no sigmoid), float32."""
        head: _MarkovHead = self._last.markov_head
        joined = torch.cat((widen(hidden), head.embedding(previous)), dim=-1)
        weight = self._last.confidence_head.proj.weight
        return F.linear(joined, weight.to(joined.dtype)).squeeze(-1)

    def finish(
        self,
        output: DraftOutput,
        first_N: Tensor,
        choose: Callable[[Tensor], Tensor],
    ) -> DraftProposal:
        """Left to right: add the Markov bias of the token before, choose, go on."""
        tokens, logits, confidence = [], [], []
        previous = first_N
        for k in range(output.logits_NBV.shape[1]):
            scores = output.logits_NBV[:, k] + self.markov_bias(previous)
            confidence.append(self.confidence(output.hidden_NBD[:, k], previous))
            previous = choose(scores)
            tokens.append(previous)
            logits.append(scores)
        return DraftProposal(
            torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1)
        )
