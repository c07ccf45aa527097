"""From what a user names to a directory on disk."""

from importlib.resources import files
from pathlib import Path

from cedar.errors import CheckpointError

__all__ = ["bundled_checkpoints", "locate_checkpoint"]


def bundled_checkpoints() -> dict[str, Path]:
    """The checkpoints that come with Cedar, by name."""
    root = Path(str(files("cedar"))) / "bundled"
    return {path.name: path for path in sorted(root.iterdir()) if (path / "config.json").exists()}


def locate_checkpoint(name: str | Path) -> Path:
    """A checkpoint directory: an existing path, or the name of a bundled one.

    Raises `CheckpointError` when it is neither.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        raise CheckpointError(
            f"{path} has no config.json; expected a checkpoint directory with config.json, "
            "tokenizer.json and *.safetensors."
        )
    bundled = bundled_checkpoints()
    if str(name) in bundled:
        return bundled[str(name)]
    raise CheckpointError(
        f"{name} is neither a directory nor a bundled checkpoint "
        f"(bundled: {', '.join(bundled) or 'none'}). Check the path."
    )
