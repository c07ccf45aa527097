"""Reading tensors of a checkpoint, lazily and from memory-mapped files."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedar.checkpoint.header import Header, StoredTensor
from cedar.checkpoint.index import collect_headers
from cedar.checkpoint.names import Storage, TensorSpec, storage_of
from cedar.errors import CheckpointError

# E8M0 scales are handed out as their bytes: a cast, not a view, would turn 2^-7 into 120.
_TORCH_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


class Checkpoint:
    """The tensors of a checkpoint by official name.

    Opening verifies all headers and the index; payload bytes are read only when asked for.
    Tensors that are handed out are copies and stay valid after `close`. Not for concurrent use.
    """

    def __init__(self, path: Path, headers: Iterable[Header]) -> None:
        self.path = path
        self._files = {
            name: (header, tensor) for header in headers for name, tensor in header.tensors.items()
        }
        self._maps: dict[Path, mmap.mmap] = {}
        self._advised: set[str] = set()
        self.specs: dict[str, TensorSpec] = {n: t.spec for n, (_, t) in self._files.items()}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a directory (index, or all ``*.safetensors``) or one safetensors file.

        Raises `CheckpointError` if a header, the index or their agreement is broken.
        """
        headers, problems = collect_headers(path)
        if problems:
            shown = problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20)
            raise CheckpointError("\n".join(shown))
        return cls(Path(path), headers)

    @property
    def storage(self) -> Storage:
        """The storage form: ``"fp8fp4"`` if anything but an Engram table has scales."""
        return storage_of(self.specs)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._find(name)[0].path

    def read(self, name: str) -> Tensor:
        """A copy of one tensor, on the CPU, in its stored type and shape.

        ``F8_E8M0`` arrives as ``uint8``: byte b is the factor 2^(b - 127). Raises
        `CheckpointError` for an unknown name and for scales or FP8 codes that are NaN.
        """
        spec = self._find(name)[1].spec
        return self._tensor(name, self._bytes(name).copy(), spec.shape)

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of the rows ``start <= row < stop`` (dimension 0) of a tensor, as `read`."""
        spec = self._find(name)[1].spec
        rows = self._rows(name)[start:stop]
        return self._tensor(name, rows.copy(), (rows.shape[0], *spec.shape[1:]))

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """The rows (dimension 0) with the numbers ``rows [...]``, as ``[..., *rest]``.

        Only the bytes of those rows are read. Raises `CheckpointError` for a number out of range.
        """
        spec = self._find(name)[1].spec
        wanted = rows.to("cpu", torch.int64).reshape(-1)
        count = spec.shape[0] if spec.shape else 0
        if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= count):
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name!r}: found row numbers "
                f"{int(wanted.min())} to {int(wanted.max())}; expected 0 to {count - 1}. "
                "The configuration does not belong to this table."
            )
        self._expect_scattered_reads(name)
        picked = self._rows(name)[wanted.numpy()]
        return self._tensor(name, picked, (*rows.shape, *spec.shape[1:]))

    def close(self) -> None:
        """Unmap all files."""
        for mapped in self._maps.values():
            # While an error is on its way up, its frames may still look into the file.
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps.clear()
        self._advised.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _find(self, name: str) -> tuple[Header, StoredTensor]:
        if name not in self._files:
            raise CheckpointError(
                f"{self.path}: no tensor {name!r} among {len(self._files)}. "
                "Run `cedar check` to compare the files with the configuration."
            )
        return self._files[name]

    def _map(self, header: Header) -> mmap.mmap:
        if header.path not in self._maps:
            try:
                with header.path.open("rb") as stream:
                    if os.fstat(stream.fileno()).st_size != header.size:
                        raise CheckpointError(
                            f"{header.path}: changed its size since it was opened; expected "
                            f"{header.size} bytes. Open the checkpoint again."
                        )
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{header.path}: cannot be mapped ({error}).") from None
            self._maps[header.path] = mapped
        return self._maps[header.path]

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        header, tensor = self._find(name)
        mapped = self._map(header)
        count = tensor.stop - tensor.start
        return np.frombuffer(mapped, dtype=np.uint8, count=count, offset=tensor.start)

    def _rows(self, name: str) -> NDArray[np.uint8]:
        shape = self._find(name)[1].spec.shape
        flat = self._bytes(name)
        count = shape[0] if shape else 1
        return flat.reshape(count, flat.size // count if count else 0)

    def _expect_scattered_reads(self, name: str) -> None:
        """Ask the system not to read ahead around the rows of a table."""
        if name in self._advised:
            return
        self._advised.add(name)
        if hasattr(mmap, "MADV_RANDOM"):
            header, tensor = self._find(name)
            begin = tensor.start - tensor.start % mmap.PAGESIZE
            self._map(header).madvise(mmap.MADV_RANDOM, begin, tensor.stop - begin)

    def _tensor(self, name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> Tensor:
        dtype = self.specs[name].dtype
        if dtype == "F8_E8M0" and (data == 255).any():
            self._nan(name, "a scale byte of 255 (NaN)", "exponents 0 to 254")
        if dtype == "F8_E4M3" and ((data & 127) == 127).any():
            self._nan(name, "an FP8 code 0x7f or 0xff (NaN)", "numbers")
        flat = torch.from_numpy(data.reshape(-1))
        return flat.view(_TORCH_TYPES[dtype]).reshape(shape)

    def _nan(self, name: str, found: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file_of(name)}: tensor {name!r}: found {found}; expected {expected}. "
            "The file is damaged; get it again."
        )
