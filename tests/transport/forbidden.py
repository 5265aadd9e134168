"""A rank that may not look into other processes, as where Yama or a container forbids it.

It makes itself not dumpable, so that the system treats
it like a process of another user, installs a filter that refuses what reads or writes the memory of
other processes or takes their descriptors, and then trains.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import fully_shard
from composable_shard.core.transport.gloo.mailbox import why_not_shared

SET_DUMPABLE, SET_NO_NEW_PRIVILEGES, SET_FILTER = 4, 38, 22
CALLS = {
    "x86_64": {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311},
    "aarch64": {"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271},
}[platform.machine()]
PIDFD_GETFD = 438
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def forbid() -> str:
    """Refuse the calls from now on; return what they answer."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_DUMPABLE, 0)
    libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    code = [struct.pack("HBBI", LOAD, 0, 0, 0)]
    for number in (*CALLS.values(), PIDFD_GETFD):
        code.append(struct.pack("HBBI", JUMP_IF_EQUAL, 0, 1, number))
        code.append(struct.pack("HBBI", RETURN, 0, 0, REFUSE))
    code.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    text = ctypes.create_string_buffer(b"".join(code))
    program = _Program(len(code), ctypes.addressof(text))
    if libc.prctl(SET_FILTER, 2, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "no filter")
    answers = []
    for number in CALLS.values():
        answers.append(libc.syscall(number, os.getpid(), 0, 0, 0, 0, 0))
        assert answers[-1] == -1
        answers[-1] = errno.errorcode[ctypes.get_errno()]
    return " ".join(answers)


def main() -> None:
    refused = forbid()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, whole = nn.Linear(40, 40), nn.Linear(40, 40)
    whole.load_state_dict(model.state_dict())
    fully_shard(model)
    for one in (model, whole):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(3):
            one(torch.full((2, 40), 1.0 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same = torch.equal(model.weight.full_tensor(), whole.weight)
    assert dist.group.WORLD is not None
    shares = why_not_shared(dist.group.WORLD) == {}
    print(f"refused: {refused}; {'shares' if shares else 'sends'}; {'exact' if same else 'wrong'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
