"""State in 8 or 4 bits for each element, and one scale for each block of elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from everybit.base import ComputeDType, Key, materialize, require_member, settle_dtype, uniform
from everybit.formats import block_maps
from everybit.formats.block_maps import MAP_NAMES, Bits, MapName, look_up
from everybit.formats.expansion import POWERS, raised, root
from everybit.formats.protocol import SPLITS_FLOAT32, Parts, PartSpec, Rounding, SlotKind, StateFormat

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Blockwise(StateFormat):
    """Codes of 8 or 4 bits, and for each block of elements its greatest magnitude as their common scale.

    A number is divided by its block's scale, and the code is that of a neighbouring level of a map in [-1, 1]. Blocks are counted from the
    parameter's own first element, so that codes and scales do not depend on how a model is sharded.

    In slots without negative numbers, such as second moments, a number above zero never becomes zero: it becomes the least level above
    zero at least. A step divides by the root of such a number. A block with a number that is not finite has the scale NaN and is NaN
    throughout; no other block is concerned.

    Args:
        map: The levels, for signed numbers and for others.

            * ``"dynamic"``: decades with ever more levels, 5.5e-7 to 1, as bitsandbytes and torchao have them.
            * ``"linear"``: equal distances. In 4 bits without negative numbers sixteenths without zero, as torchao has them.
            * ``"root"``: squares of equal distances, 1.5e-5 to 1 for 255 levels (6.2e-5 for 127).
            * ``"power"``: fourth powers of equal distances, 3.8e-9 to 1, and without a sign eighth powers, 5.6e-20 to 1. In 4 bits squares,
              2.0e-2 to 1, and without a sign fourth powers, 2.0e-5 to 1.
            * ``"float"``: floating-point numbers over the greatest one. In 8 bits e4m3, 4.4e-6 to 1, and without a sign e5m3, 6.2e-11 to 1;
              in 4 bits powers of two, 1.6e-2 to 1, and without a sign 6.1e-5 to 1.
            * ``"expanded"``: roots of the levels of ``"float"``, the first, second, fourth or eighth, whichever is the highest by which all
              numbers of a block above zero lie between levels. Each block keeps the logarithm of its power, in a byte. Where numbers of a
              block are alike, levels are up to eight times as close.
        bits: Of a code. Two codes of 4 bits share a byte, the first element in its upper half.
        block: Elements with a common scale: a power of two, 32 to 2048.
        rounding: ``"stochastic"``: to either neighbouring level, at random so that the expectation is right; ``"nearest"``: to the
            nearer level, which stops slow averages and is refused for them.
        scale: dtype of the scales. A bfloat16 is rounded up, so that no number is above its block's scale. The block's greatest number may
            then be stored as a level below 1, so that decoding and encoding again may change numbers; with
            float32 scales it does not.
        kind: The slot's kind; filled in by the policy.

    Raises:
        ValueError: An argument out of range.

    Reference:
        Dettmers et al. 2021, https://arxiv.org/abs/2110.02861 (blocks, the dynamic map); Li et al. 2023,
        https://arxiv.org/abs/2309.01507 (4 bits; zero is left out of second moments); Xi et al. 2024, https://arxiv.org/abs/2410.19313
        (range expansion).
    """

    map: MapName = "dynamic"
    bits: Bits = 8
    block: int = 256
    rounding: Rounding = "stochastic"
    scale: Literal["float32", "bfloat16"] = "float32"
    kind: SlotKind = "signed"

    def __post_init__(self) -> None:
        require_member(self.map, MAP_NAMES, field="Blockwise.map")
        require_member(self.rounding, ("nearest", "stochastic"), field="Blockwise.rounding")
        settle_dtype(self, "scale", ("float32", "bfloat16"), field="Blockwise.scale")
        require_member(self.kind, ("signed", "non-negative"), field="Blockwise.kind")
        if self.bits not in (8, 4) or isinstance(self.bits, bool):
            raise ValueError(f"Blockwise.bits: got {self.bits!r}; accepted are 8 and 4.")
        if self.block not in BLOCKS or isinstance(self.block, bool):
            raise ValueError(f"Blockwise.block: got {self.block!r}; accepted are {', '.join(map(str, BLOCKS))}.")

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Blockwise:
        """Return the format for numbers of this kind."""
        return replace(self, kind=kind)

    @property
    def draws_bits(self) -> bool:
        """Whether ``encode`` rounds at random."""
        return self.rounding == "stochastic"

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to float64 as the compute dtype: levels are numbers of float32."""
        return SPLITS_FLOAT32 if compute == "float64" else None

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the codes, the scales, and the powers of the expanded map."""
        scale = PartSpec("scale", torch.bfloat16 if self.scale == "bfloat16" else torch.float32, self.block)
        codes = PartSpec("codes", torch.uint8, 2)
        if self.bits == 8:
            codes = PartSpec("codes", torch.int8 if self._has_signs else torch.uint8)
        return (codes, scale, PartSpec("power", torch.uint8, self.block)) if self.map == "expanded" else (codes, scale)

    def levels(self, power: int = 1) -> Tensor:
        """The numbers that codes stand for, over the scale of their block, rising: float32, 1-d.

        Args:
            power: The power of the block, 1, 2, 4 or 8, if the map is expanded.

        Raises:
            ValueError: Another power, or a power for another map.
        """
        accepted = [1 << log for log in range(POWERS)] if block_maps.is_expanded(self.map) else [1]
        if power not in accepted or isinstance(power, bool):
            raise ValueError(f"{self}: power: got {power!r}; accepted are {', '.join(map(str, accepted))}.")
        indices = torch.arange(self._greatest + 1, dtype=torch.int32, device="cpu")
        found = self._level(indices, power.bit_length() - 1)
        return torch.cat([-found[1:].flip(0), found]) if self._has_signs else found

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Round the numbers to levels of their blocks.

        Raises:
            RuntimeError: A value that is differentiated: codes carry no derivative.
        """
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                f"{self}: got a value that is differentiated; codes carry no derivative. Accepted in differentiable steps are formats"
                " of floating-point numbers, such as Nearest('float32') or Split(16)."
            )
        exact = x.detach()
        rows = _rows(exact, self.block)
        scale, divisor = self._scales(rows)
        power = self._powers(rows, divisor) if block_maps.is_expanded(self.map) else None
        on_host = exact.device.type == "cpu" and torch.compiler.is_compiling()
        if exact.numel() % self.block or on_host:
            # C++ code goes through a row once for its maximum and once more for its codes, and faster in one loop of all elements.
            values, unit = exact, spread(divisor, self.block, exact.shape)
            each = None if power is None else spread(power, self.block, exact.shape)
        else:
            # In rows, as the maxima are found: Triton code is then one kernel, which keeps a row in registers.
            values, unit = rows, divisor[:, None]
            each = None if power is None else power[:, None]
        index = self._rounded(values, unit, each, key)
        if self._has_signs:
            index = torch.where(values < 0, -index, index)
        index = index.view(exact.shape)
        if self.bits == 4:
            codes = index + self._greatest if self._has_signs else index
            # On a CPU the loop over pairs is scalar, and would otherwise compute the codes, too.
            codes = _packed(materialize(codes.to(torch.uint8)) if on_host else codes, self._zero_code)
        else:
            codes = index.to(torch.int8 if self._has_signs else torch.uint8)
        return (codes, scale) if power is None else (codes, scale, power.to(torch.uint8))

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """The levels, times the scales of their blocks."""
        codes, scale, *rest = parts
        power = spread(rest[0].to(torch.int32), self.block, shape) if rest else None
        index = unpacked(codes, shape) if self.bits == 4 else codes.to(torch.int32)
        if not torch.compiler.is_compiling():
            known = self._known(scale)
            if self._has_signs:
                known = torch.cat([-known[:, 1:].flip(1), known], 1)
                index = index if self.bits == 4 else index + self._greatest
            found = _looked_up(known, index, power)
            return _times(found, scale.float(), self.block)
        if self._has_signs and self.bits == 4:
            index = index - self._greatest
        found = self._level(index.abs(), power)
        if self._has_signs:
            found = torch.where(index < 0, -found, found)
        return found * spread(scale.float(), self.block, shape)

    def resolution(self, compute: ComputeDType) -> float:
        """0 for stochastic rounding; else half the greatest distance of two neighbouring levels, relative to the smaller one."""
        if self.rounding == "stochastic":
            return 0.0
        levels: list[float] = [number for number in self.levels().tolist() if number > 0]
        return max((above - below) / (2.0 * below) for below, above in pairwise(levels))

    @property
    def _has_signs(self) -> bool:
        """Whether codes of negative numbers are those of their magnitude with a sign."""
        return self.kind == "signed" and not block_maps.is_table(self.map)

    @property
    def _greatest(self) -> int:
        return block_maps.greatest_index(self.map, self.bits, self.kind)

    @property
    def _zero_code(self) -> int:
        """The code in 4 bits of a zero, which fills up a buffer, too: the same state has the same bytes however it is laid out."""
        if block_maps.is_table(self.map):
            return block_maps.table(self.bits, self.kind).index(0.0)
        return self._greatest if self._has_signs else 0

    def _level(self, index: Tensor, power: Tensor | int | None) -> Tensor:
        found = block_maps.level(self.map, self.bits, self.kind, index)
        return found if power is None else root(found, power)

    def _known(self, like: Tensor) -> Tensor:
        """The levels of all indices, rising, in a row for each power: float32, beside a tensor."""
        known = block_maps.beside(block_maps.levels(self.map, self.bits, self.kind), like)
        return known.view(-1, self._greatest + 1)

    def _neighbours(self, y: Tensor, power: Tensor | int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the last index with a level not above a number, the index after it, and the levels of both; at the ends one index twice.

        Compiled, levels are arithmetic in the step's one loop, of all three indices at once; uncompiled, where each operation goes through
        memory, the same levels are looked up, of the two that are needed.
        """
        wide = y if power is None else raised(y, power)
        near = block_maps.index_near(self.map, self.bits, self.kind, wide).clamp(0, self._greatest)
        if not torch.compiler.is_compiling():
            known = self._known(y)
            above_near = _looked_up(known, near, power) > y
            low = (near - above_near.to(torch.int32)).clamp(min=0)
            high = (near + ~above_near).clamp(max=self._greatest)
            return low, high, _looked_up(known, low, power), _looked_up(known, high, power)
        before, after = (near - 1).clamp(min=0), (near + 1).clamp(max=self._greatest)
        here = self._level(near, power)
        is_after = here > y
        low, high = torch.where(is_after, before, near), torch.where(is_after, near, after)
        below = torch.where(is_after, self._level(before, power), here)
        above = torch.where(is_after, here, self._level(after, power))
        return low, high, below, above

    def _powers(self, rows: Tensor, unit: Tensor) -> Tensor:
        """The logarithm of each block's power: int32, 1-d.

        It is the greatest by which the block's least magnitude above zero is still a level, or above a level. A block that holds
        levels of some power already keeps that power: otherwise stored numbers would be moved to the levels of another power.
        """
        magnitudes = rows.abs()
        least = torch.where(magnitudes > 0, magnitudes, torch.inf).amin(1)
        y = torch.where(least <= unit, least / unit, 1.0)
        fitting, kept = torch.zeros_like(least, dtype=torch.int32), torch.full_like(least, -1, dtype=torch.int32)
        levels = block_maps.levels(self.map, self.bits, self.kind)
        for power in range(POWERS):
            first = levels[power * (self._greatest + 1) + 1]  # above zero
            fits = (least >= first * unit) & (least < torch.inf)
            _, _, below, above = self._neighbours(y, power)
            stays = fits & ((below * unit == least) | (above * unit == least))
            fitting = torch.where(fits, power, fitting)
            kept = torch.where(stays, power, kept)
        return torch.where(kept < 0, fitting, kept)

    def _scales(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The scales of blocks as they are stored, and what numbers are divided by: float32."""
        greatest = rows.abs().amax(1)
        if self.kind == "signed" and not self._has_signs:
            # The map has no -1. A block with a negative number of greatest magnitude would lose a little of it at every step.
            is_negative = -rows.amin(1) >= greatest
            greatest = torch.where(is_negative, greatest * (-1.0 / block_maps.table(self.bits, self.kind)[0]), greatest)
        if self.kind == "non-negative":
            # So that the least level above zero is a normal number in float32, too: on some devices others are zero.
            least = block_maps.least_scale(self.map, self.bits)
            greatest = torch.where(greatest > 0, greatest.clamp(min=least), greatest)
        greatest = torch.where(greatest < torch.inf, greatest, torch.nan)
        if self.scale == "bfloat16":
            upper = (greatest.view(torch.int32) + 0xFFFF) & -0x10000
            # Only infinity is above bfloat16's greatest number.
            upper = torch.where(greatest == greatest, upper.clamp(max=0x7F7F0000), 0x7FC00000)
            greatest = upper.view(torch.float32)
            stored = (upper >> 16).to(torch.int16).view(torch.bfloat16)
        else:
            stored = greatest
        return stored, torch.where(greatest > 0, greatest, 1.0)

    def _rounded(self, x: Tensor, unit: Tensor, power: Tensor | None, key: Key) -> Tensor:
        """The indices of levels: int32, of the shape of ``x``."""
        magnitude = x if block_maps.is_table(self.map) and self.kind == "signed" else x.abs()
        y = magnitude / unit
        # Of a block that is not finite every code is the same; a bfloat16 scale may be below the greatest float32.
        y = torch.where(y <= 1.0, y, 1.0)
        low, high, below, above = self._neighbours(y, power)
        if self.rounding == "nearest":
            left, right = y - below, above - y
            up = (right < left) | ((right == left) & ((low & 1) == 1))
        else:
            up = (y - below) > uniform(key.bits(x)) * (above - below)
            # A number that is stored already stays as it is: dividing by the scale may have moved it off its level.
            up = (up | (above * unit == magnitude)) & (below * unit != magnitude)
        index = torch.where(up, high, low)
        if self.kind == "non-negative" and block_maps.has_zero(self.map, self.bits, self.kind):
            index = torch.where(x > 0, index.clamp(min=1), index)
        return index


def _looked_up(known: Tensor, index: Tensor, power: Tensor | int | None) -> Tensor:
    """The levels of indices, from a table with a row for each power."""
    return look_up(known.view(-1), index if power is None else index + power * known.shape[1])


def _times(x: Tensor, scale: Tensor, block: int) -> Tensor:
    """Multiply each element by the number of its block, as with :func:`spread`, which makes one more tensor in eager code."""
    if x.numel() % block:
        return x * spread(scale, block, x.shape)
    return (x.reshape(-1, block) * scale[:, None]).view(x.shape)


def _rows(x: Tensor, block: int) -> Tensor:
    """The elements in rows of a block each; zeros in the place of those that the last block lacks."""
    flat = x.reshape(-1)
    lacking = -flat.numel() % block
    if lacking:
        flat = torch.cat([flat, flat.new_zeros(lacking)])
    return flat.view(-1, block)


def spread(scale: Tensor, block: int, shape: torch.Size) -> Tensor:
    """Return the number of its block for each element."""
    found = scale[:, None].expand(-1, block).reshape(-1)
    if shape.numel() % block:
        # Inductor (torch 2.13, CPU) leaves out the elements after the last whole block where it divides indices by the block's length.
        found = materialize(found)[: shape.numel()]
    return found.view(shape)


def _packed(codes: Tensor, last: int) -> Tensor:
    """Pack two codes into a byte, the first into its upper half; ``last`` fills up the last byte."""
    flat = codes.reshape(-1)
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_full((1,), last)])
    pairs = flat.view(-1, 2)
    return (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)


def unpacked(packed: Tensor, shape: torch.Size) -> Tensor:
    """The codes of 4 bits for elements of this shape: int32; the first of two in a byte is in its upper half."""
    wide = packed.to(torch.int32)
    codes = torch.stack([wide >> 4, wide & 0xF], 1).view(-1)
    return (codes if shape.numel() % 2 == 0 else codes[:-1]).view(shape)
