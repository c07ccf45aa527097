"""The prompt protocol: requests of three APIs to prompts, generated text to their replies."""

from cedar.inputs.chat.fields import PARAMETERS, Effect, Parameter
from cedar.inputs.chat.protocol import ChatProtocol
from cedar.inputs.chat.reply import Reply
from cedar.inputs.chat.types import (
    Api,
    ChatRequest,
    Constraint,
    ConstraintKind,
    Event,
    ImageRef,
    ProtocolError,
    TokenScore,
    UsageDetails,
)

__all__ = [
    "PARAMETERS",
    "Api",
    "ChatProtocol",
    "ChatRequest",
    "Constraint",
    "ConstraintKind",
    "Effect",
    "Event",
    "ImageRef",
    "Parameter",
    "ProtocolError",
    "Reply",
    "TokenScore",
    "UsageDetails",
]
