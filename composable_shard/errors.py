"""The errors of the library.

Wrong arguments raise ``ValueError`` or ``TypeError`` at the call that receives them. The errors
below report a wrong state: the arguments are valid, but the model cannot do what the call asks.
"""

from __future__ import annotations


class ShardError(RuntimeError):
    """The arguments of a call are valid, but the state of the sharded module does not allow it."""


class MaterializationError(ShardError):
    """Parameters are still on the meta device, or on another wrong device, when they are needed."""


class ExtensionError(ShardError):
    """A tensor subclass does not follow the protocol for gathers or for gradients.

    All ranks raise it, unless ``fsdp_post_all_gather`` fails on only some ranks.
    """


class StaleParameterError(ShardError):
    """A parameter was replaced between a forward and its backward."""


class CommunicationError(ShardError):
    """A collective failed because a rank has ended, did not join in time or could not be reached.

    The process group cannot be used any more. Restart all ranks from a checkpoint.
    """


class RankMismatchError(ShardError):
    """Ranks have different models, or run different operations; all ranks raise it."""


class TorchStateError(ShardError, AttributeError):
    """Code read an attribute of torch's private state that a sharded module does not have."""
