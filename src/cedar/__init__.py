"""Cedar: the DeepSeek-V4.1-Flash architecture in one readable code base.

Names are imported when they are first used, so that `import cedar` and `cedar --help` stay fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedar.cache import DenseKV
    from cedar.config import ModelConfig, plan_layers, presets
    from cedar.engine import LLM, Engine, EngineConfig, SamplingParams, generate, load_model
    from cedar.errors import CedarError
    from cedar.model import Batch, Model, TrainSignals, WeightStorage

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Batch",
    "CedarError",
    "DenseKV",
    "Engine",
    "EngineConfig",
    "Model",
    "ModelConfig",
    "SamplingParams",
    "TrainSignals",
    "WeightStorage",
    "__version__",
    "generate",
    "load_model",
    "plan_layers",
    "presets",
]

_HOME = {
    "LLM": "cedar.engine",
    "Engine": "cedar.engine",
    "EngineConfig": "cedar.engine",
    "Batch": "cedar.model",
    "CedarError": "cedar.errors",
    "DenseKV": "cedar.cache",
    "Model": "cedar.model",
    "ModelConfig": "cedar.config",
    "SamplingParams": "cedar.engine",
    "TrainSignals": "cedar.model",
    "WeightStorage": "cedar.model",
    "generate": "cedar.engine",
    "load_model": "cedar.engine",
    "plan_layers": "cedar.config",
    "presets": "cedar.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cedar' has no attribute {name!r}")
    if name == "presets":
        return import_module("cedar.config.presets")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
