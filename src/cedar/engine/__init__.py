"""From a checkpoint and a prompt to text."""

from cedar.engine.build import LoadedModel, load_model
from cedar.engine.generate import Generation, generate
from cedar.engine.sampler import Sampler, SamplingParams

__all__ = ["Generation", "LoadedModel", "Sampler", "SamplingParams", "generate", "load_model"]
