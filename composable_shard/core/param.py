"""One parameter: the shard that the optimizer sees and the tensor that compute sees.

Hazard: a loss that is computed only from tensors kept where the hooks do not look (a global list,
a closure) starts a backward that gathers nothing, and reads freed memory. Guard: while parameters
are freed their version counters stand elsewhere, so that autograd raises its error about saved
tensors that were changed. Tested in ``tests/training/test_losses.py``.

The tensors a parameter goes through:

- original: what the module held when it was sharded; gone afterwards
- sharded: a DTensor parameter on the module outside of compute; its local tensor is the local
  shard, usually a view of a flat bucket
- unsharded: a plain parameter on the module during compute (under tensor parallelism, a DTensor of
  the kind that the original was), the leaf of autograd. The object lives as long as the group; only
  its storage comes and goes, so that saved tensors stay valid
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.codec import Attributes, attributes_of_user, has_extension
from composable_shard.core.layout import ParamLayout
from composable_shard.core.placement import (
    GradStage,
    plan_dense,
    plan_placement,
)
from composable_shard.mesh import ShardMesh
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, of_its_kind

LIFTED = "_composable_shard_lifted"
"""On a parameter whose ``grad_dtype`` the library, and not the user, has set to ``None``."""

_UNSAFE_VARIABLES = ("COMPOSABLE_SHARD_UNSAFE_SETATTR", "FSDP_USE_UNSAFE_SETATTR")


_stand_ins: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[ShardedParam]]] = {}
"""By id, unsharded parameters and full copies that modules hold or have held."""


def remember_stand_in(tensor: torch.Tensor, param: ShardedParam) -> None:
    """Note that a module holds, or has held, ``tensor`` in the place of a sharded parameter.

    Only weak references to the tensor itself are possible: torch does not convert a module with a
    parameter, such as the sharded one, that is weakly referred to.
    """
    key = id(tensor)
    known = weakref.ref(tensor, lambda _: _stand_ins.pop(key, None))
    _stand_ins[key] = known, weakref.ref(param)


def sharded_form(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sharded parameter that an unsharded one stands for; any other tensor itself."""
    known = _stand_ins.get(id(tensor))
    param = None if known is None else known[1]()
    return tensor if param is None else param.sharded


def num_standing_for_sharded(ids: Set[int]) -> int:
    """Count those that a module holds, or has held, in the place of a sharded parameter.

    Args:
        ids: Of some tensors that are alive.
    """
    return 0 if ids.isdisjoint(_stand_ins) else len(ids & {*_stand_ins})


class Place(NamedTuple):
    """Where a shard lies among others.

    Attributes:
        buffer: All of them, flat.
        start: Where it begins there, in elements.
        following: Where the next one begins; ``None`` behind the last one.
    """

    buffer: torch.Tensor
    start: int
    following: int | None


class Slot(NamedTuple):
    """A place where a parameter is registered; tied parameters have several.

    Attributes:
        module: Where.
        attribute: Under which name.
        calls_setattr: Whether the module wants to be told, by a ``__setattr__`` of its own.
    """

    module: nn.Module
    attribute: str
    calls_setattr: bool = False

    @classmethod
    def of(cls, module: nn.Module, attribute: str) -> Slot:
        """Return the place of an attribute, as the environment says if it is told."""
        is_plain = type(module).__setattr__ is nn.Module.__setattr__
        is_unsafe = any(os.environ.get(name) == "1" for name in _UNSAFE_VARIABLES)
        return cls(module, attribute, not is_plain and not is_unsafe)

    def put(self, param: nn.Parameter) -> None:
        if self.calls_setattr:
            setattr(self.module, self.attribute, param)
        else:
            self.module._parameters[self.attribute] = param

    def get(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.attribute)


class ShardedParam:
    """The sharded and the unsharded form of one parameter.

    Attributes:
        name: Name within the module that was sharded; for messages.
        slots: Where it is registered.
        mesh: Over which ranks it is sharded and replicated.
        policy: Its dtypes, which may differ from those of other parameters of the group.
        placement: Mesh and placements of its DTensor and of its gradient's.
        form: How the elements that this rank's peers share are laid out and cut.
        offload: How it is kept on the CPU; ``None`` if it is not.
        device: Where the local shard belongs.
        spec: Mesh, placements and global shape of the sharded DTensor.
        specs: Those of gradients, by stage and dtype, as far as they were needed.
        sharded: The DTensor parameter.
        local: The local tensor of ``sharded``, to notice when somebody replaces it.
        began_on_meta: Whether it was sharded before it had values.
        unsharded: The parameter of compute, once it was gathered.
        attributes: What users set on either; ``None`` before it was gathered.
        is_subclass: Whether ``unsharded`` is made of inner tensors.
        parts: What autograd may save of a subclass by itself and is freed with ``unsharded``.
        encodes_grad: Whether the local shard says what its gradient looks like on the wire.
        place: Where its shard lies among others; ``None`` for one that is gathered by itself.
        shares_storage: Whether the unsharded parameter is the shard itself, which is never freed.
        is_unsynced: Whether gradients of it were accumulated that the ranks have not reduced yet,
            on this rank or on others; the next reduction takes it in, frozen or not.
        adds_to_synced: Whether those were added to a gradient that was reduced before.
        accumulator: The node that accumulates into ``unsharded.grad``; held, so that it is the
            same in every graph. ``None`` if the parameter has been frozen since it was made.
    """

    def __init__(
        self,
        name: str,
        slots: tuple[Slot, ...],
        original: nn.Parameter,
        dim: int | None,
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        self.name = name
        self.slots = slots
        self.mesh = mesh
        self.policy = policy
        self.offload = offload
        self.placement = plan_placement(name, original, dim, mesh)
        self.form = plan_dense(_torch.local_part(original), dim, mesh.num_shards)
        keeps_strides = self.form.order is not None or isinstance(original, DTensor)
        shape, stride = original.shape, original.stride() if keeps_strides else None
        if stride is None:
            stride = torch.empty(shape, device="meta").stride()
        meta = _torch.TensorMeta(shape, stride, original.dtype)
        self.spec = _torch.make_spec(self.placement.mesh, self.placement.sharded, meta)
        self.device = torch.device("cpu") if offload is not None else mesh.device
        self.specs: dict[tuple[GradStage, torch.dtype], _torch.DTensorSpec] = {}
        self.sharded: nn.Parameter
        self.local: torch.Tensor
        self.unsharded: nn.Parameter | None = None
        self.attributes: Attributes | None = None
        self._dict: dict[str, object] = {}
        self.parts: Sequence[torch.Tensor] = ()
        self.is_subclass = self.encodes_grad = self.shares_storage = False
        self.place: Place | None = None
        self.is_unsynced = self.adds_to_synced = self._is_watched = False
        self.accumulator: Node | None = None
        self._kind = _torch.class_in_memory(original)
        self._has_asked = False
        self._asked_grad_dtype: torch.dtype | None = None
        self._shown_grad_dtype: torch.dtype | None = original.dtype

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the sharded form alone; a loaded one is asked for what was remembered."""
        self.remember_grad_dtype()
        left_out = {"local", "place", "unsharded", "attributes", "accumulator", "parts"}
        left_out |= {"_dict", "specs"}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.specs, self._is_watched, self.is_unsynced = {}, False, False
        self.place = None
        self.forget_unsharded()
        if not self.sharded.is_leaf:  # torch loads a DTensor on the meta device as a view
            local = _torch.local_tensor(self.sharded).detach()
            leaf = _torch.parameter_of(
                _torch.from_local(local, self.spec), self.sharded.requires_grad
            )
            leaf.__dict__.update(self.sharded.__dict__)
            torch.utils.swap_tensors(self.sharded, leaf)
        self.hold(self.sharded)
        for spec in (self.spec, self.placement.model, _torch.spec_of(self.sharded)):
            if spec is not None:
                _torch.rebind(spec.mesh)
        self.local = _torch.local_tensor(self.sharded)

    @property
    def layout(self) -> ParamLayout:
        return self.form.layout

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.spec.shape

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor: of one like the original, or of a plain one."""
        return self.form.shard_of(self.model_part(full), self.mesh.shard_rank).detach()

    def model_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return what of a full tensor this rank and those it shares shards with hold together."""
        if isinstance(full, DTensor):
            return _torch.local_tensor(full)
        model = self.placement.model
        if model is None:
            return full
        return _torch.cut(full, model.mesh, model.placements)

    def create_sharded(self, local: torch.Tensor, original: nn.Parameter) -> None:
        """Make the DTensor parameter around ``local``, with what users hung on the original."""
        self.hold(_torch.parameter_of(_torch.from_local(local, self.spec), original.requires_grad))
        self.sharded.__dict__.update(attributes_of_user(original))
        _torch.share_hooks(original, self.sharded)
        if original.grad_dtype != original.dtype:
            self.sharded.grad_dtype = original.grad_dtype
            self.remember_grad_dtype()
        self.local = _torch.local_tensor(self.sharded)
        self.began_on_meta = local.is_meta

    def hold(self, sharded: nn.Parameter) -> None:
        """Let ``sharded`` be the DTensor parameter, with the attributes that it has."""
        self.sharded, self._dict = sharded, sharded.__dict__
        self._keep_grad_dtype(sharded)

    def adopt_local(self, local: torch.Tensor) -> None:
        """Let ``local``, which holds the same values, be the local shard from now on."""
        self.spec = _torch.spec_with_dtype(self.spec, local.dtype)
        _torch.set_local_tensor(self.sharded, local)
        self.local = local

    def create_unsharded(self, tensor: torch.Tensor) -> nn.Parameter:
        """Make the leaf of autograd around ``tensor``; once in the life of its storage."""
        model = self.placement.model
        with torch.inference_mode(False), torch.no_grad():
            if model is not None:
                tensor = _torch.from_local(tensor, _torch.spec_with_dtype(model, tensor.dtype))
            self.unsharded = self.leaf_around(tensor)
        self._choose_unsharded_grad_dtype()
        remember_stand_in(self.unsharded, self)
        self.attributes = Attributes(self.sharded, self.unsharded)
        self.is_subclass = _torch.is_wrapper_subclass(self.unsharded_local())
        self.accumulator, self._is_watched = None, False
        return self.unsharded

    def _choose_unsharded_grad_dtype(self) -> None:
        """Say in which dtype autograd adds up the gradients of several uses.

        In that of compute, as it does for any parameter. Where the reduction is wider, and where it
        takes any dtype, they stay as they come, so that a wider one is not rounded.
        """
        if self.unsharded is None or self.policy.rounds_gradients:
            return
        with _torch.without_overrides():  # those of its class may want its attributes
            compute = self.unsharded.dtype
            is_wider = self.takes_any_grad or self.reduction_dtype().itemsize > compute.itemsize
            self.unsharded.grad_dtype = None if is_wider else compute

    def leaf_around(self, tensor: torch.Tensor) -> nn.Parameter:
        """Make a parameter of a full tensor, of the class that this one had.

        With hooks for its gather a class says by itself what the tensor is.
        """
        requires_grad = self.sharded.requires_grad
        if self._kind is None or has_extension(self.local):
            return _torch.parameter_of(tensor, requires_grad)
        return _torch.parameter_of_class(tensor, self._kind, requires_grad)

    def unsharded_local(self) -> torch.Tensor:
        """Return what this rank holds of the unsharded parameter."""
        assert self.unsharded is not None
        return _torch.local_part(self.unsharded)

    def remember_grad_dtype(self) -> torch.dtype | None:
        """Return the dtype that the user asked of this parameter's gradients, if any.

        What a conversion has made of it, which :meth:`recover` has not seen yet, asks for nothing.
        """
        shown = self.sharded.grad_dtype
        if shown != self._shown_grad_dtype and self.sharded.__dict__ is self._dict:
            self._shown_grad_dtype = shown
            if shown is not None or LIFTED not in self.sharded.__dict__:
                self._has_asked, self._asked_grad_dtype = True, shown
                self._choose_unsharded_grad_dtype()
        return self._asked_grad_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        return self.policy.compute_dtype(self.local.dtype)

    @property
    def takes_any_grad(self) -> bool:
        """Whether gradients are reduced in whatever dtype autograd gives them.

        So asks a ``grad_dtype`` that was set to ``None``, where the policy has no ``reduce_dtype``.
        """
        asked = self.remember_grad_dtype()
        return self._has_asked and asked is None and self.policy.reduce_dtype is None

    def facts(self) -> tuple[Sequence[int], int | None, object]:
        """Return shape, sharded dim and the dtype asked of gradients: those ranks agree on."""
        asked = "any dtype" if self.takes_any_grad else self._asked_grad_dtype
        return self.form.shape, self.form.dim, asked

    def reduction_dtype(self) -> torch.dtype:
        """Return the dtype in which the gradient is summed, by itself and without a wider one."""
        if self.takes_any_grad:
            return self.compute_dtype
        return self.policy.reduction_dtype(self.local.dtype, self._asked_grad_dtype)

    def final_grad_dtype(self, reduced: torch.dtype) -> torch.dtype:
        """Return the dtype in which users get a gradient.

        Args:
            reduced: That of the reduction, which stays if the user lets gradients be of any.
        """
        asked = self.remember_grad_dtype()
        if self._has_asked and asked is None:
            return reduced
        own = self.local.dtype
        final = asked or self.policy.grad_dtype or own
        return final if final is own else of_its_kind(final, own)

    def forget_unsharded(self) -> None:
        """Let go of the unsharded parameter; the next gather makes another."""
        self.unsharded, self.accumulator, self.is_subclass = None, None, False
        self.parts, self.attributes = (), None

    def register_sharded(self) -> None:
        for slot in self.slots:
            slot.put(self.sharded)

    def register_unsharded(self) -> None:
        assert self.unsharded is not None
        for slot in self.slots:
            slot.put(self.unsharded)

    def follow_requires_grad(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Give the unsharded parameter the ``requires_grad`` of the sharded one.

        A graph from before it was frozen runs its node and calls ``on_gradient`` all the same, so
        the node stays one that may be waited for.

        Args:
            on_gradient: Called whenever a backward has accumulated into the parameter.
        """
        assert self.unsharded is not None
        wanted = self.sharded.requires_grad
        self.unsharded.requires_grad_(wanted)
        if wanted and self.accumulator is None:
            self.accumulator = _torch.accumulate_node(self.unsharded)
        if wanted and not self._is_watched:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)
            self._is_watched = True

    def found(self, form: nn.Parameter | None) -> nn.Parameter | None:
        """Return what stands in its places: ``form``, or what has replaced that in any of them."""
        return next((one for slot in self.slots if (one := slot.get()) is not form), form)

    def is_intact(self) -> bool:
        """Tell whether module and DTensor still hold what this object put there."""
        is_there = self.found(self.sharded) is self.sharded
        return is_there and _torch.local_tensor(self.sharded) is self.local

    def misfit(self) -> str | None:
        """Tell what stands in its place instead of a shard of it; ``None`` if there is one."""
        current = self.found(self.sharded)
        if current is None:
            return f"none for '{self.name}'"
        if not isinstance(current, DTensor):
            return f"a plain tensor for '{self.name}'"
        got, own = _torch.spec_of(current), self.spec
        for kind, one, other in (
            ("shape", list(got.shape), list(own.shape)),
            ("placements", got.placements, own.placements),
            ("mesh", got.mesh, own.mesh),
            ("local shape", [*_torch.local_tensor(current).shape], [*self.local.shape]),
        ):
            if one != other:
                return f"one of {kind} {one} for '{self.name}' of {kind} {other}"
        return None

    def recover(self) -> None:
        """Take over what replaced ours and fits (loading, ``to``, ...)."""
        current = self.found(self.sharded)
        assert current is not None
        if current is not self.sharded:
            self.hold(current)
        self.keep_attributes(self.sharded)
        for slot in self.slots:
            slot.put(self.sharded)
        self.local = _torch.local_tensor(self.sharded)
        self.spec = _torch.spec_with_dtype(self.spec, self.local.dtype)

    def keep_attributes(self, param: nn.Parameter) -> None:
        """Give ``param``, what a conversion or a load has made of the sharded form, its attributes.

        Hazard: torch exchanges the dicts, too, when it exchanges two tensors.
        """
        if param.__dict__ is not self._dict:
            for name, value in self._dict.items():
                if name != LIFTED:
                    param.__dict__.setdefault(name, value)
            self._dict = param.__dict__
            self._keep_grad_dtype(param)

    def _keep_grad_dtype(self, param: nn.Parameter) -> None:
        """Ask of ``param``, which takes the place of the sharded form, what was asked of that.

        Unless it asks for something itself, or has a gradient of another dtype, to which torch
        would object.
        """
        if not param.is_leaf or param.grad_dtype != param.dtype:
            return
        param.__dict__.pop(LIFTED, None)
        asked, grad = self._asked_grad_dtype, param.grad
        if self._has_asked and (grad is None or asked in (None, grad.dtype)):
            param.grad_dtype = asked
        self._shown_grad_dtype = param.grad_dtype

    def version(self) -> int:
        """Return a number that grows when the sharded values change in place."""
        return self.sharded._version + self.local._version

    def spec_of_grad(self, stage: GradStage, dtype: torch.dtype) -> _torch.DTensorSpec:
        """Describe a gradient that has come as far as one of the placements."""
        key = (stage, dtype)
        spec = self.specs.get(key)
        if spec is None:
            meta = self.spec.tensor_meta
            assert meta is not None
            like = _torch.TensorMeta(meta.shape, meta.stride, dtype)
            placements = getattr(self.placement, stage)
            spec = self.specs[key] = _torch.make_spec(self.placement.mesh, placements, like)
        return spec

    def __deepcopy__(self, memo: object) -> ShardedParam:
        """Return itself: who copies its group has made the copy; left are those given back."""
        return self

    def __repr__(self) -> str:
        return f"ShardedParam({self.name}, shape={tuple(self.shape)}, {self.placement.sharded})"
