"""The hooks by which a tensor type says what the gradient of its parameter is on the wire.

``fsdp_pre_reduce_scatter`` of the local shard turns the parts of a gradient, one for each rank,
into the tensors that travel; ``fsdp_post_reduce_scatter`` sums those that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard.core.comms.objects import gather_objects
from composable_shard.core.params.extension import GRAD_POST, GRAD_PRE, Format, bound_hook
from composable_shard.core.params.param import ShardedParam
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh

Formats = tuple[Format, ...]


class GradExtension:
    """The hooks of one parameter, and what they return for gradients of one dtype.

    Attributes:
        param: The parameter.
        formats: What one rank sends another; agreed once some rank has had a gradient.
    """

    def __init__(self, param: ShardedParam) -> None:
        self.param = param
        self.formats: Formats | None = None
        self._metadata: Any = None

    def encode(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Call the first hook; return what travels, a row for each rank.

        Args:
            parts: What of the gradient goes to each rank, [num_shards, shard_numel].
        """
        result = self._hook(GRAD_PRE)(parts, self.param.mesh.shard_axis)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise self._broken(GRAD_PRE, "(tensors, metadata)", type(result).__name__)
        tensors, self._metadata = result
        if not isinstance(tensors, tuple) or not all(map(torch.is_tensor, tensors)):
            raise self._broken(GRAD_PRE, "a tuple of tensors and metadata", type(tensors).__name__)
        shapes = [list(tensor.shape) for tensor in tensors]
        if any(shape[:1] != [len(parts)] for shape in shapes):
            raise self._broken(
                GRAD_PRE, f"tensors with a row for each of {len(parts)} ranks", shapes
            )
        formats = formats_of(tensors)
        if self.formats not in (None, formats):
            assert self.formats is not None
            raise self._broken(GRAD_PRE, f"{_in_words(self.formats)} as before", _in_words(formats))
        return list(tensors)

    def decode(self, received: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Call the second hook, which fills ``out``, [shard_numel], with the sum over all ranks.

        Args:
            received: What all ranks sent here, a row from each.
            out: What to fill.
        """
        self._hook(GRAD_POST)(received, self._metadata, out)

    def _hook(self, name: str) -> Any:
        local = self.param.local
        return bound_hook(getattr(local, name), local)

    def _broken(self, hook: str, expected: str, got: object) -> ExtensionError:
        return ExtensionError(
            f"Expected {hook} of {self.param.name} to return {expected}, got {got}"
        )


def formats_of(tensors: Sequence[torch.Tensor]) -> Formats:
    """Return what of ``tensors`` one rank gets."""
    return tuple(Format(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors)


def agree_formats(
    extensions: Sequence[GradExtension],
    said: list[Formats | None] | str,
    mesh: ShardMesh,
    cause: Exception | None = None,
) -> None:
    """Exchange what the hooks returned where it is not known yet.

    Args:
        extensions: The hooks of some parameters.
        said: What those of this rank returned, ``None`` where it has no gradient; or how one
            failed.
        mesh: The ranks.
        cause: What one raised on this rank, for the traceback.

    Raises:
        ExtensionError: On all ranks, if a hook failed on one, or returned something else than on
            another.

    Collective: one all-gather of a small object over the shards, and one over the replicas.
    """
    for group in (mesh.shard_group, mesh.replica_group):
        if group is not None and group.size() > 1:
            heard = gather_objects(said, group, "agreeing on what gradients are on the wire")
            ranks = dist.get_process_group_ranks(group)
            said = _merged(extensions, dict(zip(ranks, heard, strict=True)))
    if isinstance(said, str):
        raise ExtensionError(said) from cause
    for extension, formats in zip(extensions, said, strict=True):
        if formats is not None:  # else no rank has the gradient this time
            extension.formats = formats


def _merged(
    extensions: Sequence[GradExtension], heard: dict[int, list[Formats | None] | str]
) -> list[Formats | None] | str:
    """Return what the ranks said together: how they failed or differ, else all that is known."""
    failures = [text for text in heard.values() if isinstance(text, str)]
    if failures:
        return "; ".join(dict.fromkeys(failures))
    merged: list[Formats | None] = []
    for index, extension in enumerate(extensions):
        said = [(rank, one[index]) for rank, one in heard.items() if not isinstance(one, str)]
        known = [(rank, formats) for rank, formats in said if formats is not None]
        for rank, formats in known:
            if formats != known[0][1]:
                return (
                    f"Expected {GRAD_PRE} of {extension.param.name} to return the same on all "
                    f"ranks, got {_in_words(known[0][1])} on rank {known[0][0]} and "
                    f"{_in_words(formats)} on rank {rank}"
                )
        merged.append(known[0][1] if known else None)
    return merged


def _in_words(formats: Formats) -> str:
    return f"[{', '.join(map(str, formats))}]"
