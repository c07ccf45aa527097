"""The model as plain modules: no requests, no pages, no process groups."""

from cedar.model.batch import Batch
from cedar.model.context import KVStore, LayerStats, Probe, TrainSignals
from cedar.model.linear import WeightStorage
from cedar.model.model import Model, ModelOutput

__all__ = [
    "Batch",
    "KVStore",
    "LayerStats",
    "Model",
    "ModelOutput",
    "Probe",
    "TrainSignals",
    "WeightStorage",
]
