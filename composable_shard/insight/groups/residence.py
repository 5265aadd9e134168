"""How long the unsharded parameters of a group stay, and why."""

from __future__ import annotations

from collections.abc import Iterator

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.params.param import ShardedParam
from composable_shard.core.passes.schedule import OrderRecord, stays_for_backward
from composable_shard.insight.groups.plan import Residence


def residence_of(group: ParamGroup) -> Residence:
    """Tell how the parameters of a group come back for backward.

    What the passes have recorded decides. Before the first one, it is taken that groups run in the
    order in which they are registered.
    """
    settings, context = group.settings, group.context
    if not group.params or not settings.unshards_in_backward:
        why = "nothing is gathered" if not group.params else "set_unshard_in_backward(False)"
        return Residence("unread", 0, f"backward reads no parameters of this group: {why}")
    if not _has_backward(group):
        return Residence(
            "unread", 0, "backward does not come here: nothing before or in it is trained"
        )
    reshard = settings.reshard_after_forward
    if reshard is None:
        if group is context.root:
            return Residence(
                "kept", 0, "it is the root, whose parameters backward needs first, so they are kept"
            )
        reshard = True
    if not reshard:
        return Residence(
            "kept", 0, "reshard_after_forward=False keeps the parameters until backward"
        )
    if _ends_forward_and_opens_backward(group):
        return Residence(
            "kept",
            0,
            "it ends forward and opens backward, so from the second step on it is kept between",
        )
    if isinstance(reshard, bool):
        why = "the parameters are freed after forward and gathered again for backward"
        if settings.keeps_unsharded_storage:
            why = "the parameters are gathered again for backward, into memory that is kept"
        return Residence("gathered", 0, why)
    return Residence(
        "regathered",
        reshard,
        f"after forward each of {reshard} neighbours keeps a part of all parameters, from which "
        "backward gathers them again",
    )


def _ends_forward_and_opens_backward(group: ParamGroup) -> bool:
    forward, backward = OrderRecord[ParamGroup](), OrderRecord[ParamGroup]()
    forward.recorded = group.context.forward.recorded(group.context.root)
    backward.recorded = group.context.backward.record.recorded
    if not forward.recorded or not backward.recorded:
        forward.recorded = tuple(_with_params(group))
        backward.recorded = _opening_backward(group)
    return stays_for_backward(group, forward, backward)


def _with_params(group: ParamGroup) -> list[ParamGroup]:
    return [member for member in group.context.groups if member.params]


def _opening_backward(group: ParamGroup) -> tuple[ParamGroup, ...]:
    """Return whom the first gradient reaches: the outermost group around the one that ran last."""
    ran = _with_params(group)
    last = ran[-1]
    around = [one for one in ran if one is last or group.context.encloses(one, last)]
    return tuple(around[:1])


def _has_backward(group: ParamGroup) -> bool:
    recorded = group.context.backward.record.recorded
    if recorded:
        return group in recorded
    return any(_is_trained(param) for param in _before_the_end_of(group))


def _before_the_end_of(group: ParamGroup) -> Iterator[ShardedParam]:
    """Yield the parameters that are registered before a group ends, its own among them."""
    context = group.context
    modules = [module for top in context.root.modules for module in top.modules()]
    places = {module: place for place, module in enumerate(modules)}
    end = max(places[module] for top in group.modules for module in top.modules())
    for one in context.groups:
        for param in one.params:
            if places[param.slots[0].module] <= end:
                yield param


def _is_trained(param: ShardedParam) -> bool:
    with _torch.without_overrides():
        return param.sharded.requires_grad
