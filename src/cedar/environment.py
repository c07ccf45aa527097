"""What a measurement was made with: versions, devices, commit."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["PACKAGES", "describe_run", "devices", "git_commit", "versions"]

PACKAGES = ("cedar-lm", "torch", "numpy", "safetensors", "tokenizers", "triton")


def versions() -> dict[str, str | None]:
    """Python and the packages that matter; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def devices() -> dict[str, str]:
    """The CPU and every GPU, in words."""
    threads = torch.get_num_threads()
    found = {"cpu": f"{platform.machine()}, {threads} threads, {platform.system()}"}
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        capability = f"compute capability {about.major}.{about.minor}"
        memory = f"{about.total_memory / 2**30:.0f} GiB"
        found[f"cuda:{number}"] = f"{about.name}, {memory}, {capability}"
    return found


def git_commit() -> str | None:
    """The commit of the checkout that this package is run from, "+" if it was changed since."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_run() -> dict[str, Any]:
    """What belongs beside every figure: commit, command, versions, devices."""
    return {
        "commit": git_commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "devices": devices(),
    }


def _git(where: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=where, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
