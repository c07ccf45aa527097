"""From a checkpoint and prompts to text: the plain loop, and the engine."""

from cedar.engine.assemble import EngineConfig
from cedar.engine.build import LoadedModel, load_model
from cedar.engine.engine import Engine
from cedar.engine.generate import Generation, generate
from cedar.engine.llm import LLM, Completion
from cedar.engine.sampler import Sampler, SamplingParams

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "Generation",
    "LoadedModel",
    "Sampler",
    "SamplingParams",
    "generate",
    "load_model",
]
