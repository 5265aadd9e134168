"""Communication of tensor subclasses: their hooks, the formats of sent tensors, and `Codec`.

The hooks of a local shard choose the tensors to send (``fsdp_pre_all_gather``), and build the
unsharded parameter from the gathered tensors (``fsdp_post_all_gather``). Without these hooks, a
wrapper subclass (a class with ``__tensor_flatten__``) is sent inner tensor by inner tensor. The
hooks ``fsdp_pre_reduce_scatter`` and ``fsdp_post_reduce_scatter`` encode and sum gradients.
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
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"  # an optional hook
GRAD_PRE, GRAD_POST = "fsdp_pre_reduce_scatter", "fsdp_post_reduce_scatter"


def has_extension(tensor: torch.Tensor, pre: str = PRE, post: str = POST) -> bool:
    """Return whether a local shard has the all-gather hooks, on its class or on the instance.

    Args:
        tensor: The local shard.
        pre: The name of the first hook, to look for another pair of hooks.
        post: The name of the second hook.

    Raises:
        TypeError: If it defines only one of the two methods.
    """
    has_pre, has_post = hasattr(tensor, pre), hasattr(tensor, post)
    if has_pre != has_post:
        present, missing = (pre, post) if has_pre else (post, pre)
        raise TypeError(
            f"Expected both {pre} and {post} on {type(tensor).__name__}, got only {present}; "
            f"define {missing} too"
        )
    return has_pre


def has_grad_extension(tensor: torch.Tensor) -> bool:
    """Return whether the class of a local shard, or the tensor itself, has the gradient hooks.

    Raises:
        TypeError: If it defines only one of the two methods.
    """
    return has_extension(tensor, GRAD_PRE, GRAD_POST)


def needs_extension(tensor: torch.Tensor) -> bool:
    """Return whether a local shard cannot be part of a flat bucket, which holds plain tensors."""
    has_hooks = has_extension(tensor) or has_grad_extension(tensor)
    return has_hooks or _torch.is_user_subclass(tensor)


def hook_of(tensor: torch.Tensor, name: str) -> Any:
    """Return a hook of a tensor.

    A plain function that a user has set on the tensor is bound if it takes ``self`` first.
    """
    hook = getattr(tensor, name)
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
    if not _is_pair(result) or not _are_tensors(result[0]):
        raise wrong_result(hook, name, "(tensors, metadata)", _kind_of(result))
    return result


def checked_post_result(name: str, result: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return the unsharded tensor and its inner tensors from the result of a post hook.

    Args:
        name: The name of the parameter, for error messages.
        result: The result of the hook.

    Raises:
        ExtensionError: If the result is not a pair of a tensor and inner tensors.
    """
    if not _is_pair(result) or not torch.is_tensor(result[0]) or not _are_tensors(result[1]):
        expected = "(tensor, inner tensors) when out is None"
        raise wrong_result(POST, name, expected, _kind_of(result))
    return result


def asks_to_release(name: str, shard: Any) -> bool:
    """Return whether the gathered tensors may be freed once the post hook has run.

    Args:
        name: The name of the parameter, for error messages.
        shard: The local shard, which may have the optional hook.

    Raises:
        ExtensionError: If the hook does not return a bool.
    """
    hook = getattr(shard, RELEASE, None)
    answer = False if hook is None else hook()
    if not isinstance(answer, bool):
        raise wrong_result(RELEASE, name, "a bool", _kind_of(answer))
    return answer


def _is_pair(result: Any) -> bool:
    """Return whether a result is a tuple of two items."""
    return isinstance(result, tuple) and len(result) == 2


def _are_tensors(value: Any) -> bool:
    """Return whether a value is a sequence of tensors."""
    return isinstance(value, Sequence) and all(map(torch.is_tensor, value))


def _kind_of(result: Any) -> str:
    """Return the type of a result as text; for a pair, both types."""
    if _is_pair(result):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__


def wrong_result(hook: str, name: str, expected: str, got: object) -> ExtensionError:
    """Return the error for a wrong result of a hook of the parameter ``name``."""
    return ExtensionError(f"Expected {hook} of {name} to return {expected}, got {got}")


# The tensors that are sent -----------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """The dtype and shape of a tensor that one rank sends.

    A gather concatenates the tensors of all ranks along dim 0.
    """

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
    """Raise ``ExtensionError`` unless the formats of all ranks agree, except for the size of dim 0.

    Args:
        hook: The name of the hook that returned the tensors.
        name: The name of the parameter, for error messages.
        formats: The formats of the tensors that each rank sends, by rank.
    """
    first_rank, first = next(iter(formats.items()), (0, ()))
    for rank, theirs in formats.items():
        if [(f.dtype, f.shape[1:]) for f in theirs] != [(f.dtype, f.shape[1:]) for f in first]:
            expected = "tensors of the same number, dtypes and trailing dims on all ranks"
            got = f"{to_text(first)} on rank {first_rank} and {to_text(theirs)} on rank {rank}"
            raise wrong_result(hook, name, expected, got)


@dataclass(frozen=True)
class Codec:
    """Splits a wrapper subclass into plain tensors, and rebuilds it from other plain tensors.

    Attributes:
        kind: The wrapper subclass; ``None`` for a plain tensor, which is left as it is.
        context: The context that ``__tensor_flatten__`` returned.
        inner: The names of the inner tensors, and their codecs.
    """

    kind: type | None
    context: Any = None
    inner: tuple[tuple[str, Codec], ...] = ()

    @property
    def names(self) -> list[str]:
        """The attribute path of each plain tensor, such as ``a.b``; empty for the tensor itself."""
        if self.kind is None:
            return [""]
        return [f"{name}.{n}".rstrip(".") for name, codec in self.inner for n in codec.names]

    def inner_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the plain tensors of a subclass."""
        return [attrgetter(name)(tensor) if name else tensor for name in self.names]

    def rebuild(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        """Build a subclass from the next plain tensors of an iterator."""
        if self.kind is None:
            return next(tensors)
        inner = {name: codec.rebuild(tensors) for name, codec in self.inner}
        first = inner[self.inner[0][0]]  # all inner tensors have the outer shape, see `flatten`
        unflatten = self.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        return unflatten(inner, self.context, first.shape, first.stride())


def codec_of(tensor: torch.Tensor) -> Codec:
    """Return the codec of a tensor."""
    if not _torch.is_wrapper_subclass(tensor):
        return Codec(None)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = tuple((name, codec_of(getattr(tensor, name))) for name in names)
    return Codec(type(tensor), context, inner)


def flatten(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """Split wrapper subclasses into plain tensors; return these and the inverse function."""
    codecs = list(map(codec_of, tensors))
    flat: list[torch.Tensor] = []
    for tensor, codec in zip(tensors, codecs, strict=True):
        is_opaque = codec.kind is None and _torch.is_user_subclass(tensor)
        inner = [] if is_opaque else codec.inner_tensors(tensor)
        if is_opaque or any(plain.shape != tensor.shape for plain in inner):
            raise ExtensionError(
                f"Expected {type(tensor).__name__} to have inner tensors of its shape "
                f"{list(tensor.shape)}, got {[list(plain.shape) for plain in inner]}; "
                f"define {PRE} and {POST} on it"
            )
        flat += inner

    def rebuild(plain: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        rest = iter(plain)
        return tuple(codec.rebuild(rest) for codec in codecs)

    return flat, rebuild


# Memory of tensors that are sent ------------------------------------------------------------------


def storage_views(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return a flat view of each resizable storage of some tensors, by the id of the storage.

    A resizable storage can be freed and allocated again. Its view has dtype uint8 if the storage
    does not hold a whole number of elements.
    """
    views: dict[int, torch.Tensor] = {}
    for leaf in (leaf for tensor in tensors for leaf in _torch.leaves(tensor)):
        storage, dtype = leaf.untyped_storage(), leaf.dtype
        if storage.resizable():
            dtype = torch.uint8 if storage.nbytes() % dtype.itemsize else dtype
            whole = torch.empty(0, dtype=dtype, device=storage.device)
            whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
            views[_torch.storage_number(leaf)] = whole
    return views


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad a tensor with zeros to ``rows`` rows, and flatten it."""
    if tensor.shape[0] == rows:
        return tensor.view(-1)
    # The launched gather must keep a reference to this tensor. Tests check that: when the last
    # reference is gone, they poison the memory.
    longer = _torch.poison_when_unused(tensor.new_zeros(rows, *tensor.shape[1:]))
    longer[: tensor.shape[0]] = tensor
    return longer.view(-1)


# Attributes that users set on a parameter ---------------------------------------------------------


_IS_PARAM = "_is_param"  # torch's mark of a subclass tensor that is a parameter


def share_attributes(sharded: nn.Parameter, unsharded: nn.Parameter) -> AttributeCopier | None:
    """Make attributes that users set on one form of a parameter visible on its other form.

    The forms are the sharded and the unsharded parameter. They share one ``__dict__``, unless the
    unsharded form is a tensor subclass: the class keeps its own attributes in ``__dict__``.

    Args:
        sharded: The sharded parameter.
        unsharded: An unsharded parameter that was just created.

    Returns:
        An object that copies attributes between both; ``None`` if they share a ``__dict__``.
    """
    if type(unsharded) in (nn.Parameter, DTensor):
        unsharded.__dict__ = sharded.__dict__
        return None
    return AttributeCopier(sharded, unsharded)


class AttributeCopier:
    """Copies changes of user attributes between the two forms of a parameter."""

    def __init__(self, sharded: nn.Parameter, unsharded: nn.Parameter) -> None:
        self.sharded, self._unsharded = sharded, unsharded
        self._class_attrs = {_IS_PARAM, *unsharded.__dict__}
        self._copied: dict[str, object] = {}
        self.copy_to_unsharded()

    def copy_to_unsharded(self) -> None:
        """Copy changes to the unsharded form, which is about to be registered."""
        self._copy_changes(self.sharded.__dict__, self._unsharded.__dict__)

    def copy_to_sharded(self) -> None:
        """Copy changes to the sharded form, which is about to be registered."""
        of_user = dict(filter(self._is_of_user, self._unsharded.__dict__.items()))
        self._copy_changes(of_user, self.sharded.__dict__)

    def _is_of_user(self, item: tuple[str, object]) -> bool:
        """Return whether a user, and not the class, has set an attribute of the unsharded form.

        An attribute that was copied before is the user's. A new attribute counts as the class's if
        the class declares it (``functools.cached_property``), or if it holds tensors: the next
        gather would make these stale.
        """
        name, value = item
        if name in self._copied or name in self.sharded.__dict__:
            return True
        is_declared = hasattr(getattr(type(self._unsharded), name, None), "__get__")
        return not is_declared and next(tensors_in(value), None) is None

    def _copy_changes(self, source: dict[str, object], target: dict[str, object]) -> None:
        """Apply changes of ``source`` to ``target``: attributes that were set or deleted.

        The changes are those since the last copy in either direction.
        """
        current = {name: value for name, value in source.items() if name not in self._class_attrs}
        for name in self._copied.keys() - current.keys():
            target.pop(name, None)
        for name, value in current.items():
            if name not in self._copied or self._copied[name] is not value:
                target[name] = value
        self._copied = current


def attributes_of_user(param: nn.Parameter) -> dict[str, object]:
    """Return the attributes that users have set on a parameter, without those of its class."""
    class_attrs = {_IS_PARAM, *param.detach().__dict__}  # `detach` keeps those of the class
    return {name: value for name, value in param.__dict__.items() if name not in class_attrs}
