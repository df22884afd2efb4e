"""The fake device itself: of each kind of hazard a wrong program that it has to tell, and a right one that it has to accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from everybit_torch import streams
from tests.support.fake_device.device import FakeDevice
from tests.support.fake_device.memory import HazardError
from tests.support.ranks import run

HERE = torch.device("cpu")  # where the fake device's tensors lie


def ones(numel: int = 16) -> Tensor:
    return torch.ones(numel, device=HERE)


def pinned(numel: int = 16) -> Tensor:
    return torch.empty(numel, device="cpu", pin_memory=True)


def another_reads_what_was_written(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    x.add_(1)
    if right:
        side.wait_stream(device.current)
    with device.on(side):
        x.sum()
    streams.current(HERE).wait_stream(side)


def another_writes_what_is_read(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    event = device.current.record_event()
    with device.on(side):
        side.wait_event(event)
        x.sum()
        read = side.record_event()
    if right:
        device.current.wait_event(read)
    x.zero_()


def an_event_covers_what_came_before_it(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    early = device.current.record_event()
    x.add_(1)
    side.wait_event(device.current.record_event() if right else early)
    with device.on(side):
        x.sum()


def a_view_is_the_same_memory(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    side.wait_stream(device.current)
    x[:8].add_(1)
    with device.on(side):
        x.view(4, 4)[2:].sum() if right else x.view(4, 4)[1:].sum()


def the_host_reads_a_copy(device: FakeDevice, right: bool) -> None:
    x, home = ones(), pinned()
    home.copy_(x, non_blocking=True)
    home[16:].sum()  # nothing of it
    if right:
        device.synchronize()
    home.tolist()


def the_host_reads_a_copy_that_it_waited_for(device: FakeDevice, right: bool) -> None:
    x, home = ones(), pinned()
    home.copy_(x, non_blocking=not right)
    home.sum().item()


def the_host_reads_a_result(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    side.wait_stream(device.current)
    with device.on(side):
        x.mul_(2)
    if right:
        device.current.wait_stream(side)
    x.sum().item()


def the_host_brings_a_tensor_to_its_memory(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    side.wait_stream(device.current)
    with device.on(side):
        x.mul_(2)
        if right:
            x.cpu()
    if not right:
        x.cpu()


def a_pinned_buffer_is_filled_again(device: FakeDevice, right: bool) -> None:
    home = pinned()
    home.zero_()
    x = home.to(HERE, non_blocking=True)
    if right:
        device.synchronize()
    home.add_(1)
    x.sum()


def two_copies_to_a_pinned_buffer(device: FakeDevice, right: bool) -> None:
    home, x, side = pinned(), ones(), device.stream()
    side.wait_stream(device.current)
    home.copy_(x, non_blocking=True)
    if right:
        side.wait_stream(device.current)
    with device.on(side):
        home.copy_(x, non_blocking=True)


def memory_is_freed_while_another_uses_it(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    side.wait_stream(device.current)
    with device.on(side):
        x.sum()
    if right:
        x.record_stream(side)  # type: ignore[arg-type]
    del x
    ones()


def freed_memory_is_used_again_after_the_other_is_done(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    side.wait_stream(device.current)
    with device.on(side):
        x.sum()
    del x
    if right:
        device.current.wait_stream(side)
    ones()


def a_storage_is_emptied_while_another_uses_it(device: FakeDevice, right: bool) -> None:
    side, x = device.stream(), ones()
    side.wait_stream(device.current)
    with device.on(side):
        x.sum()
    if right:
        device.current.wait_stream(side)
    x.untyped_storage().resize_(0)
    ones()


def memory_is_used_before_its_stream_has_allocated_it(device: FakeDevice, right: bool) -> None:
    side = device.stream()
    if right:
        side.wait_stream(device.current)
    x = ones()
    if right:
        side.wait_stream(device.current)
    with device.on(side):
        x.zero_()


def memory_of_the_host_is_freed_during_a_copy(device: FakeDevice, right: bool) -> None:
    x = torch.ones(16).to(HERE, non_blocking=not right)
    torch.ones(16)
    x.sum()


def a_number_is_written_to_the_hosts_memory(device: FakeDevice, right: bool) -> None:
    """For which nobody waits."""
    x, home, numbers = ones(), pinned(), torch.zeros(4)
    home.copy_(x, non_blocking=True)
    numbers[1] = 3.0
    if right:
        device.synchronize()
    home.tolist()


def the_hosts_tensor_meets_the_devices(device: FakeDevice, right: bool) -> None:
    ones() + (torch.ones(()) if right else torch.ones(16))


def numbers_of_two_devices_are_stacked(device: FakeDevice, right: bool) -> None:
    torch.stack([ones().sum(), torch.zeros((), device=HERE) if right else torch.zeros(())])


def hooks_of_one_pass_use_a_buffer(device: FakeDevice, right: bool) -> None:
    """Each on the stream of its parameter's forward pass; what autograd calls at the end comes after all of them."""
    side, main, buffer = device.stream(), device.current, torch.zeros(32, device=HERE)
    called_on = []

    def look() -> None:
        buffer.sum()

    def note(parameter: Tensor) -> None:
        called_on.append(device.current)
        place = buffer[:16] if parameter is first or not right else buffer[16:]
        place.add_(parameter.grad)  # type: ignore[arg-type]
        torch.autograd.Variable._execution_engine.queue_callback(look)

    first, second = (torch.nn.Parameter(ones()) for _ in range(2))
    for parameter in (first, second):
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    side.wait_stream(main)
    with device.on(side):
        there = (first * 2).sum()
    here = (second * 3).sum()
    device.current.wait_stream(side)
    there.record_stream(main)  # type: ignore[arg-type]
    (there + here).backward()  # type: ignore[no-untyped-call]
    assert called_on in ([side, main], [main, side])
    buffer.sum()


PROGRAMS = [
    another_reads_what_was_written, another_writes_what_is_read, an_event_covers_what_came_before_it, a_view_is_the_same_memory,
    the_host_reads_a_copy, the_host_reads_a_copy_that_it_waited_for, the_host_reads_a_result, the_host_brings_a_tensor_to_its_memory,
    a_pinned_buffer_is_filled_again, two_copies_to_a_pinned_buffer, memory_is_freed_while_another_uses_it,
    freed_memory_is_used_again_after_the_other_is_done, a_storage_is_emptied_while_another_uses_it,
    memory_is_used_before_its_stream_has_allocated_it, a_number_is_written_to_the_hosts_memory,
    the_hosts_tensor_meets_the_devices, numbers_of_two_devices_are_stacked,
    hooks_of_one_pass_use_a_buffer,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_wrong_program_is_told_and_a_right_one_is_accepted(program: Callable[[FakeDevice, bool], None]) -> None:
    with FakeDevice().watching() as device:
        program(device, True)
    with FakeDevice().watching() as device, pytest.raises(HazardError, match=r"test_fake_device\.py:\d+"):
        program(device, False)


def test_a_device_without_streams_goes_on_copying_from_memory_that_is_not_pinned() -> None:
    for stages, right in ((True, False), (False, True)):
        with FakeDevice(stages=stages).watching() as device:
            memory_of_the_host_is_freed_during_a_copy(device, right)
    with FakeDevice(stages=False).watching() as device, pytest.raises(HazardError, match="freed"):
        memory_of_the_host_is_freed_during_a_copy(device, False)


def collectives() -> list[str]:
    """What is told of collectives that are under way, by two ranks."""
    said = []
    for name, wrong in (("read", 1), ("written", 2), ("freed", 3), ("host", 4), ("", 0)):
        with FakeDevice().watching():
            rank = dist.get_rank()
            shard, whole = ones() * (rank + 1), torch.empty(32, device=HERE)
            work: Any = dist.all_gather_into_tensor(whole, shard, async_op=True)
            message = torch.tensor([float(rank)])
            other: Any = dist.all_reduce(message, async_op=True)
            try:
                if wrong == 1:
                    whole.sum()
                if wrong == 2:
                    shard.zero_()
                if wrong == 3:
                    shard.untyped_storage().resize_(0)
                    ones()
                if wrong == 4:
                    message.tolist()
                work.wait()
                other.wait()
                sums = [float(whole.sum()), *message.tolist()]
                shard.zero_()
                shard.untyped_storage().resize_(0)
                ones()
                assert sums == [48.0, 1.0]
            except HazardError as error:
                said.append(f"{name}: {error}")
                work.wait()
                other.wait()
    return said


def test_the_buffers_of_a_collective_are_its_own_until_it_was_waited_for() -> None:
    for said in run(2, collectives):
        assert [one.split(":")[0] for one in said] == ["read", "written", "freed", "host"], said
        assert all("test_fake_device.py" in one for one in said)
