"""The real engine as the server sees it."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cedar.cache.layout import KVLayout
from cedar.config import ModelConfig
from cedar.engine.engine import Engine
from cedar.engine.grammar import GrammarFactory
from cedar.engine.images import place_images
from cedar.engine.output import Output
from cedar.engine.stats import EngineStats
from cedar.errors import RequestError
from cedar.inputs.chat import Constraint
from cedar.inputs.tokenizer import Tokenizer
from cedar.server.protocols import ModelInfo, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ServedEngine"]

_VALUE_BYTES = 2  # bfloat16
_THINKING_ENDS = "</think>"


class ServedEngine:
    """An engine, its model's figures, pictures and grammars; `cedar.server.protocols.EngineLike`.

    max_running: the engine's own setting.
    """

    def __init__(self, engine: Engine, config: ModelConfig, *, max_running: int) -> None:
        self._engine = engine
        limits = engine.limits
        layout = KVLayout.from_config(config, limits.page_tokens)
        self._grammars = GrammarFactory(engine.tokenizer, limits.vocab_size, limits.eos)
        self._info = ModelInfo(
            vocab_size=limits.vocab_size,
            bos=limits.bos,
            eos=limits.eos,
            max_positions=limits.max_positions,
            pool_tokens=limits.num_pages * limits.page_tokens,
            max_running=max_running,
            max_waiting=limits.max_waiting,
            accepts_images=engine.image_settings is not None,
            bytes_per_token=float(layout.bytes_per_token),
            slot_bytes=limits.slot_bytes,
            full_bytes_per_token=full_bytes_per_token(config),
            heads=config.n_heads,
            window_tokens=config.window_size,
            longest_token=longest_token(engine.tokenizer),
        )

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._engine.tokenizer

    @property
    def alive(self) -> bool:
        """False once the engine is closed or has failed."""
        return self._engine.alive

    async def submit(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        *,
        masks: Callable[[], Any] | None = None,
        watch: bool = False,
    ) -> str:
        """Queue a request; returns its id."""
        return await self._engine.submit(
            prompt.tokens, params, images=prompt.images, masks=masks, watch=watch
        )

    def stream(self, id: str) -> AsyncGenerator[Output, None]:
        """Outputs of a request; leaving it cancels the request."""
        return cast(AsyncGenerator[Output, None], self._engine.stream(id))

    def stats(self) -> EngineStats:
        """Figures as they were after the last step."""
        return self._engine.stats()

    def place(self, tokens: Sequence[int], pictures: Sequence["Image"]) -> Prompt:
        """Put pictures where the image tokens stand."""
        settings, token = self._engine.image_settings, self._engine.limits.image_token_id
        if settings is None or token is None:
            raise RequestError("this model takes no images; send text only.")
        ids, images = place_images(tokens, pictures, token, settings)
        return Prompt(tokens=tuple(ids), images=images)

    def masks(
        self, constraint: Constraint, *, thinking: bool, starts_in_tools: bool
    ) -> Callable[[], Any]:
        """The grammars of a constraint, one for each sample."""
        after = self.tokenizer.control_ids[_THINKING_ENDS] if thinking else None
        return self._grammars.check(constraint, after=after, starts_in_tools=starts_in_tools)


def full_bytes_per_token(config: ModelConfig) -> int:
    """What bfloat16 keys and values of all heads in every layer take for one token."""
    return 2 * config.n_layers * config.n_heads * config.head_dim * _VALUE_BYTES


def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token; for tokens without bytes of their own, more than any has."""
    if not tokenizer.byte_level:
        return 1 << 20
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
