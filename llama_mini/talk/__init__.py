"""What a model says as text: one answer, a conversation, and either of them on a terminal."""

from .answer import Answer, StopStrings
from .conversation import Conversation
from .prompt import prompt_ids

__all__ = ["Answer", "Conversation", "StopStrings", "prompt_ids"]
