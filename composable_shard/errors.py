"""The errors of the library.

Arguments that are wrong raise ``ValueError`` or ``TypeError`` at the call that receives them.
Everything below is about state: the call was well-formed, but the model is not in a condition to
serve it.
"""

from __future__ import annotations


class ShardError(RuntimeError):
    """A sharded module is in a state that cannot serve the call."""


class MaterializationError(ShardError):
    """Parameters are still on the meta device (or on the wrong one) when they are needed."""


class ExtensionError(ShardError):
    """A tensor subclass broke the extension protocol, of gathers or of gradients.

    Raised on every rank, but for a ``fsdp_post_all_gather`` that fails on some ranks alone.
    """


class StaleParameterError(ShardError):
    """A parameter was changed between its forward and its backward."""


class CommunicationError(ShardError):
    """A collective failed, as a rank has ended, was not there in time or could not be reached.

    The process group is lost: start all ranks again, from a checkpoint.
    """


class RankMismatchError(ShardError):
    """The ranks do not hold the same model, or do not do the same; raised on every rank."""


class TorchStateError(ShardError, AttributeError):
    """Something asked for a part of torch's private state that a sharded module does not have."""
