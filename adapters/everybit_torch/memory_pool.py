"""Memory that is lent and taken back: a block that comes back is lent again, and is not freed first.

It is for the buffers of units, one of which is needed as another is given back: weights that are gathered, gradients that are sent. On a
host, freed memory of that size goes back to the operating system, and new memory comes from it page by page. torch's allocators for
accelerators keep what is freed by themselves, stream by stream.

Nothing is kept when nothing is lent, and what is kept never adds to the most that was needed: a pool allocates no more than the buffers at
their peak, which there had to be room for anyway.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, UntypedStorage

from everybit_torch import streams
from everybit_torch.torch_internals import tensors


def keeps_memory(device: torch.device) -> bool:
    """Whether pools for a device keep blocks: where freed memory leaves the process, and torch can give a storage other memory."""
    return device.type == "cpu" and not streams.has_streams(device) and tensors.can_exchange_memory()


class Account:
    """The sizes of the blocks that a pool has, in bytes, and the rule by which they are kept. A plan keeps the same account.

    Args:
        keeps: Whether any are kept. False: what comes back is freed.

    Attributes:
        lent: Bytes that are lent.
        beside: Bytes of what grows beside the pool while blocks are lent.
        kept: The sizes of the blocks that nobody has, in the order in which they came back.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.lent = self.beside = self._most = 0
        self.kept: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.lent + sum(self.kept) + self.beside

    def lend(self, nbytes: int) -> bool:
        """Lend a block. Return whether it is one that was kept; others may have been dropped to make room for it."""
        self.lent += nbytes
        if nbytes in self.kept:
            self.kept.remove(nbytes)
            self._make_room()
            return True
        self._make_room()
        return False

    def grow_beside(self, nbytes: int) -> None:
        """So many bytes are allocated beside the pool, or freed there if they are less than none."""
        self.beside += nbytes
        self._make_room()

    def _make_room(self) -> None:
        """Drop blocks, the oldest first, until no more is allocated than was needed at most."""
        self._most = max(self._most, self.lent + self.beside)
        while self.kept and self.nbytes > self._most:
            del self.kept[0]

    def take_back(self, nbytes: int) -> None:
        """A block came back."""
        self.lent -= nbytes
        if self._keeps:
            self.kept.append(nbytes)
        self.settle()

    def settle(self) -> None:
        """Keep nothing if nothing is lent."""
        if self.lent == 0:
            self.drop()

    def drop(self) -> None:
        """Keep nothing."""
        self.kept.clear()
        self._most = self.lent + self.beside


class MemoryPool:
    """Lends memory to 1-d tensors, and takes it back from them.

    A tensor keeps its storage when its memory is taken: views of it, such as those that autograd has saved, have their values again when it
    is lent memory again, and until then there is nothing to read.

    Args:
        keeps: See :class:`Account`, and :func:`keeps_memory`.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps, self._account = keeps, Account(keeps=keeps)
        self._blocks: dict[int, list[UntypedStorage]] = {}
        # A tensor that is dropped, by an error say, takes its memory with it.
        self._lent: weakref.WeakKeyDictionary[UntypedStorage, int] = weakref.WeakKeyDictionary()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of so many elements, whose values are not defined."""
        if not self._keeps:
            return torch.empty(numel, dtype=dtype, device=device)
        x = torch.empty(0, dtype=dtype, device=device)
        self._lend(x.untyped_storage(), numel * dtype.itemsize)
        return x.resize_(numel)

    def refill(self, x: Tensor) -> None:
        """Lend memory to a tensor whose memory was taken back."""
        self._lend(x.untyped_storage(), x.nbytes)

    def take_back(self, x: Tensor | None) -> None:
        """Take a tensor's memory, though somebody else, such as a thread of the communication library, may still hold the tensor."""
        if x is None or not x.untyped_storage().nbytes():
            return
        storage = x.untyped_storage()
        nbytes = self._forget(storage)
        if nbytes is None:
            storage.resize_(0)
            return
        block = UntypedStorage(0, device=storage.device)  # type: ignore[no-untyped-call]
        tensors.exchange_memory(block, storage)
        self._blocks.setdefault(nbytes, []).append(block)
        self._account.take_back(nbytes)
        self._drop()

    def leave(self, x: Tensor) -> None:
        """A tensor's memory stays with whoever holds it, for good."""
        nbytes = self._forget(x.untyped_storage())
        if nbytes is not None:
            self._account.lent -= nbytes
            self._account.settle()
            self._drop()

    def drop(self) -> None:
        """Free what nobody has, though something is lent: a step comes, which needs no buffers of units."""
        self._account.lent = sum(self._lent.values())
        self._account.drop()
        self._drop()

    def grow_beside(self, nbytes: int) -> None:
        """So many bytes are about to be allocated beside the pool, for which it makes room; or were freed, if they are less than none."""
        self._account.lent = sum(self._lent.values())
        self._account.grow_beside(nbytes)
        self._drop()

    def _lend(self, storage: UntypedStorage, nbytes: int) -> None:
        if not self._keeps or nbytes == 0:
            storage.resize_(nbytes)
            return
        self._account.lent = sum(self._lent.values())
        if self._account.lend(nbytes):
            tensors.exchange_memory(storage, self._blocks[nbytes].pop())
            self._drop()
        else:
            self._drop()
            storage.resize_(nbytes)
        self._lent[storage] = nbytes

    def _forget(self, storage: UntypedStorage) -> int | None:
        """Note that a storage has no lent memory any more; return how much it had, None if it was not lent here."""
        self._account.lent = sum(self._lent.values())
        return self._lent.pop(storage, None)

    def _drop(self) -> None:
        """Free the blocks that the account does not have."""
        for nbytes, blocks in self._blocks.items():
            del blocks[self._account.kept.count(nbytes) :]


UNPOOLED = MemoryPool(keeps=False)
"""A pool that keeps nothing."""
