"""The assembly point of the engine: pool, prefix cache, disk, scheduler, runner, loop."""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from cedar.cache.disk import DiskTier
from cedar.cache.layout import KVLayout
from cedar.cache.pages import PageAllocator
from cedar.cache.prefix import PrefixIndex
from cedar.engine.build import LoadedModel
from cedar.engine.core import EngineCore
from cedar.engine.drafting import Drafter
from cedar.engine.limits import EngineLimits
from cedar.engine.runner import Decoding, Replay, Runner
from cedar.engine.scheduler import Scheduler
from cedar.engine.snapshots import Snapshots
from cedar.engine.tiers import PrefixTier
from cedar.errors import ConfigError
from cedar.inputs.images import ImageSettings

__all__ = ["EngineConfig", "build_core"]

_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine uses memory and time. Bad values raise one `ConfigError`.

    pool_tokens: what the paged cache holds, all requests together; None is one sequence of the
        greatest length.
    page_tokens: tokens of a page; None is the smallest that fits the model (`KVLayout`).
    max_running: sequences that run at a time; each has a slot.
    max_waiting: requests that may queue.
    token_budget: tokens of one step; long prompts are run in chunks.
    replay: which shortcuts prefill takes, see `Replay`.
    draft: draft tokens and verify them; tokens are the same, only the speed differs.
    max_draft: drafts verified at once for one sequence; None is the whole block.
    prefix_cache: keep finished prompts in free pages. Always off with ``replay="off"``.
    prefix_hits: "replay" uses all that is cached of a prompt and runs again what `replay` says
        where no snapshot of the windows serves; "exact" uses it up to a snapshot only, so that
        nothing runs again and, with any `replay`, a hit gives what a cold run gives.
    ring_snapshots: how many snapshots of the encoder's windows are kept, 1.34 MB each at the
        released size; a hit that ends at one runs nothing of the prefix again. 0 keeps none.
    disk_cache, disk_bytes: a directory for prefixes that outlive the process, and its cap.
    decoding: who knows where the tokens of a decoding step stand, see `Decoding`; "auto" is
        "graphs" where kernels run and "host" elsewhere.
    batch_invariant: what a request gets depends neither on what runs beside it nor on drafts, to
        the last bit: every decoding pass has the largest size, prompts run alone in chunks of
        ``token_budget`` tokens, and nothing comes from the prefix cache. Slower; not for
        ``decoding="host"``. Does not hold for a request that lost its pages to others on the way.
    check: verify the books after every step; for tests.
    """

    pool_tokens: int | None = None
    page_tokens: int | None = None
    max_running: int = 16
    max_waiting: int = 1024
    token_budget: int = 1024
    replay: str = "decoder"
    draft: bool = False
    max_draft: int | None = None
    prefix_cache: bool = True
    prefix_hits: str = "replay"
    ring_snapshots: int = 64
    disk_cache: str | Path | None = None
    disk_bytes: int = 16 << 30
    decoding: str = "auto"
    batch_invariant: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}; expected an integer of 1 or more"
            for name in (
                "pool_tokens",
                "page_tokens",
                "max_running",
                "max_waiting",
                "token_budget",
                "max_draft",
                "disk_bytes",
            )
            if (value := getattr(self, name)) is not None
            and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
        ]
        if not isinstance(self.ring_snapshots, int) or isinstance(self.ring_snapshots, bool):
            problems.append(f"ring_snapshots is {self.ring_snapshots!r}; expected an integer")
        elif self.ring_snapshots < 0:
            problems.append(f"ring_snapshots is {self.ring_snapshots}; expected 0 or more")
        if self.prefix_hits not in ("replay", "exact"):
            problems.append(f"prefix_hits is {self.prefix_hits!r}; expected one of replay, exact")
        elif self.prefix_hits == "exact" and self.ring_snapshots == 0:
            problems.append(
                'prefix_hits "exact" needs ring_snapshots of 1 or more; without a snapshot nothing '
                "of the cache could be used"
            )
        ways = ["auto", *(way.value for way in Decoding)]
        if self.decoding not in ways:
            problems.append(f"decoding is {self.decoding!r}; expected one of {', '.join(ways)}")
        if self.batch_invariant and self.decoding == Decoding.HOST:
            problems.append(
                'batch_invariant needs passes of one size, which decoding "host" has not; expected '
                "one of auto, device, graphs"
            )
        if self.batch_invariant and self.disk_cache is not None:
            problems.append("disk_cache needs the prefix cache, which batch_invariant excludes")
        modes = [mode.value for mode in Replay]
        if self.replay not in modes:
            problems.append(f"replay is {self.replay!r}; expected one of {', '.join(modes)}")
        elif self.replay == Replay.OFF and self.disk_cache is not None:
            problems.append('disk_cache needs the prefix cache, which replay "off" excludes')
        if not problems and self.token_budget < self.max_running:
            problems.append(
                f"token_budget is {self.token_budget}; expected at least max_running = "
                f"{self.max_running}, one token for each sequence"
            )
        if problems:
            raise ConfigError("engine: " + "; ".join(problems) + ".")

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """What can be set."""
        return tuple(field.name for field in fields(cls))


def build_core(loaded: LoadedModel, config: EngineConfig) -> EngineCore:
    """An engine's loop around a loaded model.

    Raises `ConfigError` for a page that does not fit the model, `RequestError` for drafting
    without a draft head, and what `DiskTier` raises for its directory.
    """
    model = loaded.model.config
    layout = KVLayout.from_config(model, config.page_tokens)
    pool_tokens = config.pool_tokens or model.max_position_embeddings
    num_pages = layout.pages_for(pool_tokens)
    replay = Replay(config.replay)
    runner = Runner(
        loaded,
        layout,
        num_pages=num_pages,
        num_slots=config.max_running,
        replay=replay,
        draft=config.draft,
        decoding=_decoding(loaded, config),
        batch_invariant=config.batch_invariant,
    )
    allocator = PageAllocator(num_pages)
    index = tier = snapshots = None
    if config.prefix_cache and replay is not Replay.OFF and not config.batch_invariant:
        salt = b"memory"
        if config.disk_cache is not None:
            # What an approximate replay made must not pass for exact.
            exact = replay is Replay.DECODER or config.prefix_hits == "exact"
            salt = _fingerprint(loaded, layout, Replay.DECODER if exact else replay)
        index = PrefixIndex(
            allocator, layout.page_tokens, salt, max_snapshots=config.ring_snapshots
        )
        if config.ring_snapshots:
            snapshots = Snapshots(index, window=model.window_size, reach=runner.replay_tokens)
        if config.disk_cache is not None:
            disk = DiskTier(config.disk_cache, max_bytes=config.disk_bytes, layout_tag=salt)
            tier = PrefixTier(index, allocator, runner, disk)
    scheduler = Scheduler(
        allocator,
        index,
        page_tokens=layout.page_tokens,
        num_slots=config.max_running,
        token_budget=config.token_budget,
        max_waiting=config.max_waiting,
        limit_hit=snapshots.exact_hit if snapshots and config.prefix_hits == "exact" else None,
        batch_invariant=config.batch_invariant,
    )
    drafter = None
    if config.draft:
        drafter = Drafter(runner, config.max_draft or model.dspark_block_size)
    return EngineCore(
        runner=runner,
        scheduler=scheduler,
        allocator=allocator,
        tokenizer=loaded.tokenizer,
        limits=EngineLimits(
            vocab_size=model.vocab_size,
            bos=model.bos_token_id,
            eos=model.eos_token_id,
            max_positions=model.max_position_embeddings,
            page_tokens=layout.page_tokens,
            num_pages=num_pages,
            page_bytes=layout.page_bytes,
            slot_bytes=runner.store.slot_nbytes // config.max_running,
            max_waiting=config.max_waiting,
            entry_tokens=runner.entry_tokens,
            image_token_id=model.image_token_id if model.vision_n_layers else None,
        ),
        image_settings=ImageSettings.from_config(model) if model.vision_n_layers else None,
        drafter=drafter,
        snapshots=snapshots,
        tier=tier,
        check=config.check,
    )


def _decoding(loaded: LoadedModel, config: EngineConfig) -> Decoding:
    on_gpu = loaded.device.type == "cuda"
    if config.decoding == Decoding.GRAPHS and not on_gpu:
        raise ConfigError(
            f'engine: decoding is "graphs", but the model is on {loaded.device}. CUDA graphs need '
            'a CUDA device; use "auto".'
        )
    if config.decoding != "auto":
        return Decoding(config.decoding)
    kernels = on_gpu and loaded.model.ops.has_kernels
    # Kernels are written for bfloat16; the plain operations behind others ask the device.
    if kernels and loaded.model.compute_dtype is torch.bfloat16:
        return Decoding.GRAPHS
    return Decoding.DEVICE if config.batch_invariant else Decoding.HOST


def _fingerprint(loaded: LoadedModel, layout: KVLayout, replay: Replay) -> bytes:
    """Names everything but the tokens that cached entries depend on.

    Of the weight files it takes names, sizes, both ends and evenly spaced blocks: any training
    changes those, and half a terabyte need not be read.
    """
    model = loaded.model
    digest = hashlib.sha256(b"cedar prefix 1\n")
    digest.update(json.dumps(model.config.to_flat(), sort_keys=True).encode())
    digest.update(f"{layout!r} {model.compute_dtype} {loaded.device.type} {replay}".encode())
    for path in sorted(loaded.directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as file:
            last = max(size - _BLOCK_BYTES, 0)
            for number in range(_SAMPLED_BLOCKS):
                file.seek(last * number // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.digest()
