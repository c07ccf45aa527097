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
from cedar.model.attention import Attention
from cedar.model.context import KVStore, LayerStats, Rotary, Streams
from cedar.model.layer import Block
from cedar.model.layout import rotary, window_slots
from cedar.model.linear import BuildSpec, Linear, Norm, Weight
from cedar.ops import widen
from cedar.ops.sparse_attention import Rows, Source
from cedar.quant import FP8_BLOCK

__all__ = ["DraftBlock", "DraftHead", "DraftOutput", "DraftProposal"]


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
        self, streams: Streams, main: Source, block_slots: Tensor, at: Rotary
    ) -> tuple[Streams, LayerStats]:
        """All positions of a block see the same main states and the whole block."""
        attn = self.attn
        streams, mix, x_TD = self.open(streams, "attn")
        c_q, latent = attn.latents(x_TD)
        sources = (main, Rows(attn.window_kv(latent, at), block_slots))
        y_TD = attn.attend(attn.queries(c_q), sources, at)
        streams, mix, x_TD = self.open(self.close(streams, y_TD, mix), "ffn")
        y_TD, routing = self.ffn(x_TD, None)
        stats = LayerStats(self.plan.index, routing.experts_TA, self.ffn.num_experts)
        return self.close(streams, y_TD, mix), stats


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

    def attentions(self) -> dict[int, Attention]:
        """Every block's attention by the number of its window ring."""
        return {self.config.n_layers + i: block.attn for i, block in enumerate(self)}  # type: ignore[misc]

    def window_entries(self, main_TD: Tensor, at: Rotary) -> dict[int, Tensor]:
        """Every ring's window entries ``[T, H]`` of the same main states (no ``attn_norm``)."""
        return {
            layer: attn.window_kv(attn.wkv(main_TD), at)
            for layer, attn in self.attentions().items()
        }

    def stored(self, slots: tuple[int, ...], store: KVStore) -> tuple[Source, ...]:
        """What the ring of each block holds, and what of it each sequence sees."""
        rings = [[store.window(layer, slot) for slot in slots] for layer in self.attentions()]
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
        return tuple(Rows(torch.cat(ring), every[newest]) for ring in rings)

    def run(
        self,
        tokens_NB: Tensor,
        positions_N: Tensor,
        main: tuple[Source, ...],
        frequencies: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> DraftOutput:
        """Base logits for all positions of every block at once.

        main: for every block window entries, and which of them each sequence sees ``[N, W]``.
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
        slots = main[0].slots_TK.repeat_interleave(block, dim=0)
        stats: tuple[LayerStats, ...] = ()
        for layer, source in zip(self, main, strict=True):
            seen = source._replace(slots_TK=slots)
            streams, report = layer(streams, seen, block_slots, at)
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
