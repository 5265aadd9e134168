"""Communication of tensor subclasses: their hooks, the formats of sent tensors, and rebuilding.

A local shard with ``fsdp_pre_all_gather`` / ``fsdp_post_all_gather`` chooses the tensors to send
and builds the result from them. A wrapper subclass without these hooks is sent inner tensor by
inner tensor. ``fsdp_pre_reduce_scatter`` / ``fsdp_post_reduce_scatter`` do the same for gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.nested import tensors_in
from composable_shard.errors import ExtensionError

# The hooks of a class ----------------------------------------------------------------------------

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
GRAD_PRE, GRAD_POST = "fsdp_pre_reduce_scatter", "fsdp_post_reduce_scatter"


def has_extension(tensor: torch.Tensor) -> bool:
    """Return whether a local shard has the all-gather hooks, from its class or as attributes.

    Raises:
        TypeError: If it defines only one of the two methods.
    """
    return _has_both(tensor, PRE, POST)


def has_grad_extension(tensor: torch.Tensor) -> bool:
    """Return whether a local shard has the reduce-scatter hooks for its gradient.

    Raises:
        TypeError: If it defines only one of the two methods.
    """
    return _has_both(tensor, GRAD_PRE, GRAD_POST)


def _has_both(tensor: torch.Tensor, pre: str, post: str) -> bool:
    has_pre, has_post = hasattr(tensor, pre), hasattr(tensor, post)
    if has_pre != has_post:
        found, missing = (pre, post) if has_pre else (post, pre)
        raise TypeError(
            f"Expected both {pre} and {post} on {type(tensor).__name__}, got only {found}; "
            f"define {missing} too"
        )
    return has_pre


def needs_extension(tensor: torch.Tensor) -> bool:
    """Return whether a local shard cannot be part of a flat bucket, which holds plain tensors."""
    brings_hooks = has_extension(tensor) or has_grad_extension(tensor)
    return brings_hooks or _torch.is_subclass_of_user(tensor)


def bound_hook(hook: Any, tensor: torch.Tensor) -> Any:
    """Bind a plain function that was set on a tensor object and expects the tensor as ``self``."""
    if inspect.isfunction(hook) and next(iter(inspect.signature(hook).parameters), "") == "self":
        return hook.__get__(tensor)
    return hook


def checked_result(hook: str, name: str, result: Any) -> tuple[Sequence[torch.Tensor], Any]:
    """Return the tensors and the metadata from the result of a pre hook.

    Args:
        hook: The name of the hook.
        name: The name of the parameter, for error messages.
        result: The result of the hook.

    Raises:
        ExtensionError: If the result is not a pair of tensors and metadata.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ExtensionError(
            f"Expected {hook} of {name} to return (tensors, metadata), got {type(result).__name__}"
        )
    tensors, metadata = result
    if not isinstance(tensors, Sequence) or not all(map(torch.is_tensor, tensors)):
        raise ExtensionError(
            f"Expected {hook} of {name} to return a tuple of tensors and metadata, got "
            f"{type(tensors).__name__} as its first element"
        )
    return tensors, metadata


# The tensors that are sent -----------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """The dtype and shape of a tensor that one rank sends; its first dim is gathered."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


Formats = tuple[Format, ...]


def formats_of(tensors: Sequence[torch.Tensor]) -> Formats:
    """Return the formats of some tensors."""
    return tuple(Format(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def to_text(formats: Formats) -> str:
    """Return a list of formats as text, for error messages."""
    return f"[{', '.join(map(str, formats))}]"


def check_same_formats(hook: str, name: str, formats: Mapping[int, Formats]) -> None:
    """Raise ``ExtensionError`` unless the tensors of all ranks differ in their first dim alone.

    Args:
        hook: The hook that has returned them.
        name: The name of the parameter, for error messages.
        formats: The formats that each rank sends, by rank.
    """
    first_rank, first = next(iter(formats.items()))
    for rank, theirs in formats.items():
        alike = len(theirs) == len(first) and all(
            a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
            for a, b in zip(theirs, first, strict=True)
        )
        if not alike:
            raise ExtensionError(
                f"Expected {hook} of {name} to return tensors of the same number, dtypes and "
                f"trailing dims on all ranks, got {to_text(first)} on rank {first_rank} and "
                f"{to_text(theirs)} on rank {rank}"
            )


@dataclass(frozen=True)
class Codec:
    """Splits a wrapper subclass into plain tensors, and rebuilds it from other plain tensors.

    Attributes:
        kind: Its class.
        context: The context that ``__tensor_flatten__`` returned.
        inner: Its inner tensors by name, with their own codecs if they are wrapper subclasses.
    """

    kind: type
    context: Any
    inner: tuple[tuple[str, Codec | None], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes of the plain tensors, with dots if wrapper subclasses are nested."""
        found = list[str]()
        for name, codec in self.inner:
            found += [name] if codec is None else [f"{name}.{n}" for n in codec.names]
        return tuple(found)

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the plain tensors."""
        return [attrgetter(name)(tensor) for name in self.names]

    def rebuild(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """Build a tensor from the next plain tensors."""
        made = {
            name: next(parts) if codec is None else codec.rebuild(parts)
            for name, codec in self.inner
        }
        like = made[self.inner[0][0]]
        rebuilt: torch.Tensor = self.kind.__tensor_unflatten__(  # type: ignore[attr-defined]
            made, self.context, like.shape, like.stride()
        )
        return rebuilt


def codec_of(tensor: torch.Tensor) -> Codec | None:
    """Return the codec of a wrapper subclass, ``None`` for a tensor of any other kind."""
    if not _torch.is_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = tuple((name, codec_of(getattr(tensor, name))) for name in names)
    return Codec(type(tensor), context, inner)


def flatten(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """Split wrapper subclasses into plain tensors; return these and a function to rebuild them."""
    codecs = [codec_of(tensor) for tensor in tensors]
    flat: list[torch.Tensor] = []
    for tensor, codec in zip(tensors, codecs, strict=True):
        inner = [tensor] if codec is None else codec.parts(tensor)
        if codec is None and _torch.is_subclass_of_user(tensor):
            raise ExtensionError(
                f"Expected a wrapper subclass, got {type(tensor).__name__} without "
                f"__tensor_flatten__; define {PRE} and {POST} on it"
            )
        if any(part.shape != tensor.shape for part in inner):
            raise ExtensionError(
                f"Expected the inner tensors of {type(tensor).__name__} to have its shape "
                f"{list(tensor.shape)}, got {[list(part.shape) for part in inner]}; "
                f"define {PRE} and {POST} on it"
            )
        flat += inner

    def rebuild(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        left = iter(parts)
        return tuple(next(left) if codec is None else codec.rebuild(left) for codec in codecs)

    return flat, rebuild


# Memory of tensors that travel --------------------------------------------------------------------

Memory = dict[int, torch.Tensor]
"""A flat view of each storage, by the number of the storage."""


def memory_of(tensors: Sequence[torch.Tensor]) -> Memory:
    """Return views of the storages of some tensors, if they can be freed and allocated again.

    A view has dtype uint8 if its storage is not a whole number of elements.
    """
    found: Memory = {}
    for leaf in (leaf for tensor in tensors for leaf in _torch.leaves(tensor)):
        storage, dtype = leaf.untyped_storage(), leaf.dtype
        if storage.resizable():
            dtype = torch.uint8 if storage.nbytes() % dtype.itemsize else dtype
            whole = torch.empty(0, dtype=dtype, device=storage.device)
            whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
            found[_torch.storage_number(leaf)] = whole
    return found


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a flat tensor, padded with zeros to ``rows`` rows."""
    if tensor.shape[0] == rows:
        return tensor.view(-1)
    longer = _torch.poison_when_unused(tensor.new_zeros(rows, *tensor.shape[1:]))
    longer[: tensor.shape[0]] = tensor
    return longer.view(-1)


# Attributes that users set on a parameter ---------------------------------------------------------


def share_attributes(sharded: nn.Parameter, other: nn.Parameter) -> Attributes | None:
    """Make attributes that users set on a parameter (``param.tag = ...``) visible on both forms.

    Both forms share one ``__dict__``, unless the unsharded one is a tensor subclass, which keeps
    attributes of its own there.

    Args:
        sharded: The sharded form.
        other: An unsharded form that was just created.

    Returns:
        An object that copies attributes between two dicts; ``None`` if they share one.
    """
    if type(other) in (nn.Parameter, DTensor):
        other.__dict__ = sharded.__dict__
        return None
    return Attributes(sharded, other)


class Attributes:
    """Copies user attributes that were set, changed or deleted between the forms of a parameter."""

    def __init__(self, sharded: nn.Parameter, other: nn.Parameter) -> None:
        self.sharded, self._other = sharded, other
        self._of_class = {"_is_param", *other.__dict__}
        self._carried: dict[str, object] = {}
        self.give()

    def give(self) -> None:
        """Copy changes of the sharded form to the other, which is about to be registered."""
        self._carry(self.sharded.__dict__, self._other.__dict__)

    def take(self) -> None:
        """Copy changes of the other form to the sharded one, which is about to be registered."""
        found = self._other.__dict__.items()
        self._carry({k: v for k, v in found if self._is_of_user(k, v)}, self.sharded.__dict__)

    def _is_of_user(self, name: str, value: object) -> bool:
        """Return whether a user, and not the class, has set an attribute of the other form.

        Unless users had set it before, an attribute belongs to the class if the class declares it
        (``functools.cached_property``), or if it holds tensors, which the next gather makes stale.
        """
        if name in self._carried or name in self.sharded.__dict__:
            return True
        is_declared = hasattr(getattr(type(self._other), name, None), "__get__")
        return not is_declared and next(tensors_in(value), None) is None

    def _carry(self, source: dict[str, object], target: dict[str, object]) -> None:
        now = {name: value for name, value in source.items() if name not in self._of_class}
        for name in self._carried.keys() - now.keys():
            target.pop(name, None)
        for name, value in now.items():
            if name not in self._carried or self._carried[name] is not value:
                target[name] = value
        self._carried = now


def attributes_of_user(param: nn.Parameter) -> dict[str, object]:
    """Return the attributes that users set on a parameter, without those that its class set."""
    of_class = {"_is_param"}
    if type(param) not in (nn.Parameter, DTensor):
        of_class.update(param.detach().__dict__)
    return {name: value for name, value in param.__dict__.items() if name not in of_class}
