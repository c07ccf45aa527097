"""Configuration: official names, all problems at once, and the plan of the layers."""

from cedar.config.model import ModelConfig
from cedar.config.plan import Half, LayerPlan, Mode, plan_layers
from cedar.config.presets import released, tiny
from cedar.config.primes import engram_primes, engram_rows
from cedar.config.validate import ConfigProblems, Problem

__all__ = [
    "ConfigProblems",
    "Half",
    "LayerPlan",
    "Mode",
    "ModelConfig",
    "Problem",
    "engram_primes",
    "engram_rows",
    "plan_layers",
    "released",
    "tiny",
]
