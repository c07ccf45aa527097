"""Every error that a user's input can cause.

CedarError
├── ConfigError          the model configuration is inconsistent or unknown
├── CheckpointError      a checkpoint file is missing, damaged or does not fit the configuration
├── RequestError         a prompt, an image or a sampling parameter cannot be served
├── CapacityError        a store or a machine is too small for what was asked
├── BackendUnavailable   an implementation was asked for that this machine cannot run
├── DataError            a corpus, tokenizer or data file is missing or malformed
└── TrainingError        a training run cannot start, resume or go on

A message says what, where, found, expected and the remedy. The command line prints it without
a traceback; anything else that escapes is our own fault.
"""

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "CedarError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "RequestError",
    "TrainingError",
]


class CedarError(Exception):
    """Base of all errors that are caused by input rather than by a fault in Cedar."""


class ConfigError(CedarError):
    """The model configuration is inconsistent, incomplete or of an unknown form."""


class CheckpointError(CedarError):
    """A checkpoint file is missing, damaged, hostile or does not fit the configuration."""


class RequestError(CedarError):
    """A prompt, an image or a sampling parameter cannot be served."""


class CapacityError(CedarError):
    """A store or a machine is too small for what was asked."""


class BackendUnavailable(CedarError):
    """An implementation was asked for that this machine cannot run."""


class DataError(CedarError):
    """A corpus, tokenizer or data file is missing or malformed."""


class TrainingError(CedarError):
    """A training run cannot start, resume or go on."""
