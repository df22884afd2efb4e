"""Translates statements of Inductor's loops on a CPU into vector types of the compiler itself: the same operations, the same bits.

Inductor calls a class for each operation on a vector. Here an expression becomes one of g++'s and clang's vector types
(``vector_size``), by :data:`RULES`. Statements that do not depend on the place come before the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

NAMESPACE = r"""
#include <immintrin.h>
namespace everybit_loops {
#ifdef CPU_CAPABILITY_AVX512
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t Octets __attribute__((vector_size(LANES)));
typedef int16_t Pairs __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))
template <class Vector, class T> INLINE Vector load(const T* from) { Vector x; memcpy(&x, from, sizeof x); return x; }
INLINE Ints logical(Ints x, int by) { return __builtin_bit_cast(Ints, __builtin_bit_cast(Unsigned, x) >> (uint32_t)by); }
typedef at::vec::Vectorized<float> Class;
INLINE Floats root(Floats x) {
  return __builtin_bit_cast(Floats, __builtin_bit_cast(Class, x).sqrt());
}
INLINE Floats maximum_of(Floats x, Floats y) {
  return __builtin_bit_cast(Floats, at::vec::maximum(__builtin_bit_cast(Class, x), __builtin_bit_cast(Class, y)));
}
INLINE Floats minimum_of(Floats x, Floats y) {
  return __builtin_bit_cast(Floats, at::vec::minimum(__builtin_bit_cast(Class, x), __builtin_bit_cast(Class, y)));
}
INLINE Floats magnitude(Floats x) { return __builtin_bit_cast(Floats, __builtin_bit_cast(Ints, x) & 0x7fffffff); }
INLINE Ints magnitude(Ints x) { return x < 0 ? -x : x; }
INLINE Floats number(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints wide(Floats x) { return __builtin_bit_cast(Ints, at::vec::convert<int32_t>(__builtin_bit_cast(Class, x))); }
INLINE Ints counting() { Ints x; for (int lane = 0; lane < LANES; lane++) x[lane] = lane; return x; }
#ifdef CPU_CAPABILITY_AVX512
INLINE Ints wide(Halves x) { return __builtin_bit_cast(Ints, _mm512_cvtepi16_epi32(__builtin_bit_cast(__m256i, x))); }
INLINE Ints wide(Bytes x) { return __builtin_bit_cast(Ints, _mm512_cvtepi8_epi32(__builtin_bit_cast(__m128i, x))); }
INLINE Ints wide(Octets x) { return __builtin_bit_cast(Ints, _mm512_cvtepu8_epi32(__builtin_bit_cast(__m128i, x))); }
INLINE Floats number(Halves x) {
  return __builtin_bit_cast(Floats, _mm512_slli_epi32(_mm512_cvtepu16_epi32(__builtin_bit_cast(__m256i, x)), 16));
}
INLINE Halves lower(Ints x) { return __builtin_bit_cast(Halves, _mm512_cvtepi32_epi16(__builtin_bit_cast(__m512i, x))); }
INLINE Bytes lowest(Ints x) { return __builtin_bit_cast(Bytes, _mm512_cvtepi32_epi8(__builtin_bit_cast(__m512i, x))); }
INLINE Halves upper(Ints x) {
  Pairs all = __builtin_bit_cast(Pairs, x);
  return __builtin_shufflevector(all, all, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#else
INLINE Ints wide(Halves x) { return __builtin_bit_cast(Ints, _mm256_cvtepi16_epi32(__builtin_bit_cast(__m128i, x))); }
INLINE Ints wide(Bytes x) {
  return __builtin_bit_cast(Ints, _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(__builtin_bit_cast(int64_t, x))));
}
INLINE Ints wide(Octets x) {
  return __builtin_bit_cast(Ints, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(__builtin_bit_cast(int64_t, x))));
}
INLINE Floats number(Halves x) {
  return __builtin_bit_cast(Floats, _mm256_slli_epi32(_mm256_cvtepu16_epi32(__builtin_bit_cast(__m128i, x)), 16));
}
INLINE __m128i picked(Ints x, __m256i which) {
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8(__builtin_bit_cast(__m256i, x), which), 8));
}
INLINE Halves lower(Ints x) {
  return __builtin_bit_cast(Halves, picked(x, _mm256_setr_epi8(
    0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1)));
}
INLINE Halves upper(Ints x) {
  return __builtin_bit_cast(Halves, picked(x, _mm256_setr_epi8(
    2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1, 2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1)));
}
INLINE Bytes lowest(Ints x) {
  __m256i both = _mm256_shuffle_epi8(__builtin_bit_cast(__m256i, x), _mm256_setr_epi8(
    0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  __m128i one = _mm_unpacklo_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  return __builtin_bit_cast(Bytes, (int64_t)_mm_cvtsi128_si64(one));
}
#endif
}
"""

_PART_LOAD = re.compile(
    r"\[&\]\(\) \{ typedef char __attribute__\(\(vector_size\(\d+\)\)\) Part; .*?memcpy\(&part, (.*?), \d+\);.*?"
    r"__builtin_bit_cast\((at::vec::Vectorized<[\w:]+>), .*\}\(\)"
)
_NARROWED = re.compile(r"\[&\]\(\) \{ typedef int16_t .*?auto all = __builtin_bit_cast\(Halves, (\w+)\).*\}\(\)")
_WIDENED = re.compile(r"\[&\]\(\) \{ typedef int16_t .*?__builtin_bit_cast\(Room, (\w+)\).*\}\(\)")
_CLASSES = {
    "at::vec::Vectorized<int32_t>": "Ints",
    "at::vec::Vectorized<float>": "Floats",
    "at::vec::Vectorized<at::BFloat16>": "Halves",
    "at::vec::Vectorized<int16_t>": "Halves",
    "at::vec::Vectorized<int8_t>": "Bytes",
    "at::vec::Vectorized<uint8_t>": "Octets",
    "static_cast<int64_t>": "",
    "at::vec::": "",
    "__builtin_bit_cast": "bits",
}


class UnknownCodeError(Exception):
    """A statement that no rule knows, or code of another shape."""


@dataclass
class _Loop:
    """A translation of the body of a loop.

    Attributes:
        once: Statements that come before the loop.
        row: Statements that come before each row of a loop over rows.
        body: Statements of the loop.
        levels: Where a value is known: 0 before the loop, 1 before a row, 2 in the loop.
        kinds: The type of each translated value.
        names: Values that go by another's name, since a reinterpretation between them is none here.
        literals: Constants, by value; and vectors of one constant.
        scalars: Vectors of one scalar, and the scalar.
        shifted: Values that are others shifted to the right, and by how much.
        negated: Masks that were made into integers 0 and 1, or their negatives, and the mask.
        choices: Masks that are one scalar everywhere.
        counts: Vectors of the places in the whole: place, place + 1, and so on.
        compared: Masks of the places from a scalar on, and the scalar.
    """

    once: list[str] = field(default_factory=list)
    row: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    levels: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    literals: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)
    shifted: dict[str, tuple[str, int]] = field(default_factory=dict)
    negated: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    counts: set[str] = field(default_factory=set)
    compared: dict[str, str] = field(default_factory=dict)

    def name(self, value: str) -> str:
        return self.names.get(value, value)

    def put(self, value: str, kind: str, expression: str, level: int = 2) -> None:
        self.kinds[value], self.levels[value] = kind, level
        word = "auto" if kind == "scalar" else kind
        (self.once, self.row, self.body)[level].append(f"{word} {value} = {expression};")

    def same(self, value: str, other: str, kind: str) -> None:
        self.names[value], self.kinds[value] = self.name(other), kind

    def require(self, value: str, *kinds: str) -> None:
        if self.kinds.get(self.name(value)) not in kinds:
            raise UnknownCodeError(value)

    # -- rules: each has the value's name, and the groups of its pattern ------------------------------------------------------------

    def element(self, value: str, pointer: str, index: str) -> None:
        level = 2 if "place" in index else 1 if "x0" in index else 0
        self.put(value, "scalar", f"{pointer}[{index}]", level)

    def loaded(self, value: str, kind: str, pointer: str) -> None:
        if kind not in _CLASSES.values():
            raise UnknownCodeError(kind)
        self.put(value, kind, f"load<{kind}>({pointer} + place)")

    def constant(self, value: str, of: str, text: str) -> None:
        self.literals[value] = text
        self.put(value, "scalar", f"({of})({text})", 0)

    def special(self, value: str, of: str) -> None:
        self.constant(value, "float", {"infinity": "__builtin_inff()", "quiet_NaN": '__builtin_nanf("")'}[of])

    def place(self, value: str, of: str = "") -> None:
        if of:
            self.require(of, "place")
        self.kinds[value] = "place"

    def scalar(self, value: str, expression: str, *operands: str) -> None:
        for one in operands:
            self.require(one, "scalar")
        self.put(value, "scalar", expression, max(self.levels[one] for one in operands))

    def compared_scalars(self, value: str, left: str, operator: str, right: str) -> None:
        self.scalar(value, f"{left} {operator} {right}", left, right)

    def chosen_scalar(self, value: str, where: str, then: str, otherwise: str) -> None:
        self.scalar(value, f"{where} ? {then} : {otherwise}", where, then, otherwise)

    def extreme_scalar(self, value: str, function: str, left: str, right: str) -> None:
        self.scalar(value, f"{function}({left}, {right})", left, right)

    def splat(self, value: str, kind: str, of: str) -> None:
        if self.kinds.get(of) == "place" and kind == "Ints":
            self.put(value, kind, "Ints{} + (int32_t)place")
            return
        self.require(of, "scalar")
        if of in self.literals:
            self.literals[value] = self.literals[of]
        else:
            self.scalars[value] = of
        self.put(value, kind, f"{kind}{{}} + {of}", self.levels[of])

    def count(self, value: str, of: str) -> None:
        self.require(of, "place")
        self.counts.add(value)
        self.once.append(f"Ints lane_{value} = counting();")
        self.put(value, "Ints", f"(Ints{{}} + (int32_t)place) + lane_{value}")

    def reinterpreted(self, value: str, kind: str, of: str) -> None:
        if self.kinds[self.name(of)] == kind:
            self.same(value, of, kind)
        else:
            self.put(value, kind, f"__builtin_bit_cast({kind}, {self.name(of)})")

    def to_float(self, value: str, of: str) -> None:
        self.require(of, "Halves", "Ints")
        self.put(value, "Floats", f"number({self.name(of)})")

    def to_int(self, value: str, of: str) -> None:
        self.require(of, "Halves", "Bytes", "Octets", "Floats")
        self.put(value, "Ints", f"wide({self.name(of)})")

    def narrowed(self, value: str, of: str) -> None:
        source = self.name(of)
        if source in self.shifted and self.shifted[source][1] == 16:
            self.put(value, "Halves", f"upper({self.shifted[source][0]})")
        else:
            self.put(value, "Halves", f"lower({source})")

    def to_bytes(self, value: str, of: str) -> None:
        self.require(of, "Ints")
        self.put(value, "Bytes", f"lowest({self.name(of)})")

    def chosen(self, value: str, scalar: str) -> None:
        self.require(scalar, "scalar")
        self.choices[value], self.kinds[value] = scalar, "choice"

    def mask(self, value: str, left: str, operator: str, right: str) -> None:
        if operator == ">=" and left in self.counts and right in self.scalars:
            self.compared[value] = self.scalars[right]
        self.put(value, "Ints", f"({self.name(left)} {operator} {self.name(right)})")

    def as_number(self, value: str, mask: str) -> None:
        self.negated[value], self.kinds[value] = self.name(mask), "negated"

    def cast_mask(self, value: str, mask: str) -> None:
        if mask in self.choices:
            raise UnknownCodeError(mask)
        self.same(value, mask, "Ints")

    def negative(self, value: str, of: str) -> None:
        if of in self.negated:  # the integer -1 has all bits of a mask
            self.same(value, self.negated[of], "Ints")
            self.negated[value] = self.negated[of]
        else:
            self.require(of, "Floats", "Ints")
            self.put(value, self.kinds[self.name(of)], f"-{self.name(of)}")

    def magnitude(self, value: str, of: str) -> None:
        self.require(of, "Floats", "Ints")
        self.put(value, self.kinds[self.name(of)], f"magnitude({self.name(of)})")

    def square_root(self, value: str, of: str) -> None:
        self.put(value, "Floats", f"root({self.name(of)})")

    def extreme(self, value: str, which: str, left: str, right: str) -> None:
        kind = self.kinds[self.name(left)]
        if kind == "Ints":
            sign = ">" if which == "maximum" else "<"
            a, b = self.name(left), self.name(right)
            self.put(value, kind, f"({a} {sign} {b}) ? {a} : {b}")
        else:
            self.require(left, "Floats")
            self.put(value, kind, f"{which}_of({self.name(left)}, {self.name(right)})")

    def blend(self, value: str, otherwise: str, then: str, mask: str, of: str) -> None:
        kind = "Ints" if of == "int32_t" else "Floats"
        no, yes, where = map(self.name, (otherwise, then, mask))
        if mask in self.choices:
            self.put(value, kind, f"{self.choices[mask]} ? {yes} : {no}")
        elif mask in self.compared and kind == "Ints":
            # Places are all below the limit, but in one vector: a branch that is foreseen.
            self.put(
                value,
                kind,
                f"__builtin_expect(place + LANES <= {self.compared[mask]}, 1) ? {no} : ({where} ? {yes} : {no})",
            )
        else:
            self.put(value, kind, f"{where} ? {yes} : {no}")

    def shift(self, value: str, of: str, operator: str, by: str) -> None:
        source, count = self.name(of), int(self.literals[by])
        if operator == ">>":
            self.shifted[value] = source, count
        self.put(value, "Ints", f"{source} {operator} {count}")

    def both(self, value: str, left: str, right: str) -> None:
        if right in self.negated:
            left, right = right, left
        if left in self.negated:
            self.put(value, "Ints", f"{self.negated[left]} ? {self.name(right)} : Ints{{}}")
        elif left in self.shifted and self.literals.get(right) == str((1 << (32 - self.shifted[left][1])) - 1):
            self.put(value, "Ints", f"logical({self.shifted[left][0]}, {self.shifted[left][1]})")
        else:
            self.put(value, "Ints", f"{self.name(left)} & {self.name(right)}")

    def arithmetic(self, value: str, left: str, operator: str, right: str) -> None:
        kind = self.kinds[self.name(left)]
        if kind not in ("Ints", "Floats") or kind != self.kinds[self.name(right)]:
            raise UnknownCodeError(value)
        self.put(value, kind, f"{self.name(left)} {operator} {self.name(right)}")

    def stored(self, pointer: str, value: str) -> None:
        self.body.append(f"memcpy({pointer} + place, &{self.name(value)}, sizeof {self.name(value)});")


_TMP = r"(tmp\d+)"
RULES: list[tuple[re.Pattern[str], Callable[..., None]]] = [
    (re.compile(pattern), method)
    for pattern, method in (
        (
            r"(\w+_ptr\d+)\[(\(\d+L\)|\(x0\)|\(c10::div_floor_integer\(\(place\), \(\d+L\)\)\))\]",
            _Loop.element,
        ),
        (r"(\w+)::loadu\((\w+) \+ \(place\), .*\)", _Loop.loaded),
        (r"static_cast<(int32_t|float)>\((.*)\)", _Loop.constant),
        (r"std::numeric_limits<float>::(infinity|quiet_NaN)\(\)", _Loop.special),
        (r"place", _Loop.place),
        (rf"c10::convert<int32_t>\({_TMP}\)", _Loop.place),
        (rf"(Ints|Floats)\({_TMP}\)", _Loop.splat),
        (rf"Ints\({_TMP}\) \+ Ints::arange\(0, 1\)", _Loop.count),
        (rf"bits\((Ints|Floats|Halves), {_TMP}\)", _Loop.reinterpreted),
        (rf"convert<float>\({_TMP}\)", _Loop.to_float),
        (rf"convert<int32_t>\({_TMP}\)", _Loop.to_int),
        (rf"convert<u?int8_t>\({_TMP}\)", _Loop.to_bytes),
        (rf"WIDENED {_TMP}", _Loop.to_int),
        (rf"NARROWED {_TMP}", _Loop.narrowed),
        (rf"VecMask<float,1>::from\({_TMP}\)", _Loop.chosen),
        (rf"VecMask<\w+,1>\({_TMP} (==|!=|<|<=|>|>=) {_TMP}\)", _Loop.mask),
        (rf"Ints\(0\) - static_cast<Ints>\({_TMP}\.template cast<int32_t, 1>\(\)\)", _Loop.as_number),
        (rf"{_TMP}\.template cast<\w+,\s*1>\(\)", _Loop.cast_mask),
        (rf"{_TMP}\.neg\(\)", _Loop.negative),
        (rf"{_TMP}\.abs\(\)", _Loop.magnitude),
        (rf"{_TMP}\.sqrt\(\)", _Loop.square_root),
        (rf"(maximum|minimum)\({_TMP}, {_TMP}\)", _Loop.extreme),
        (rf"{_TMP} \? {_TMP} : {_TMP}", _Loop.chosen_scalar),
        (rf"(max_propagate_nan|min_propagate_nan)\({_TMP}, {_TMP}\)", _Loop.extreme_scalar),
        (rf"{_TMP} (==|!=|<|<=|>|>=) {_TMP}", _Loop.compared_scalars),
        (rf"decltype\(tmp\d+\)::blendv\({_TMP}, {_TMP}, {_TMP}\.template cast<(\w+),1>\(\)\)", _Loop.blend),
        (rf"{_TMP} (>>|<<) {_TMP}", _Loop.shift),
        (rf"{_TMP} & {_TMP}", _Loop.both),
        (rf"{_TMP} (\||\^|\+|-|\*|/) {_TMP}", _Loop.arithmetic),
    )
]
"""Expressions of Inductor's, by pattern, and the methods that translate them."""

_STATEMENT = re.compile(r"auto (tmp\d+) = (.*);")
_STORES = (
    re.compile(rf"{_TMP}\.store\((?P<pointer>\w+) \+ \(place\)\);"),
    re.compile(rf"std::memcpy\((?P<pointer>\w+) \+ \(place\), &{_TMP}, \d+\);"),
)


def translated(body: str, place: str = "x0") -> _Loop:
    """Translate the statements of a loop's body.

    Args:
        body: The statements.
        place: Inductor's expression for the place of a vector's first element.

    Raises:
        Exception: A statement that no rule knows.
    """
    loop = _Loop()
    where = re.compile(rf"\b{re.escape(place)}\b")
    for line in filter(None, map(str.strip, body.split("\n"))):
        text = _PART_LOAD.sub(r"\2::loadu(\1, )", where.sub("place", line))
        text = _WIDENED.sub(r"WIDENED \1", _NARROWED.sub(r"NARROWED \1", text))
        for theirs, ours in _CLASSES.items():
            text = text.replace(theirs, ours)
        if (found := _STATEMENT.fullmatch(text)) is None:
            store = next((match for one in _STORES if (match := one.fullmatch(text))), None)
            if store is None:
                raise UnknownCodeError(line)
            loop.stored(store["pointer"], store[1] if store[1].startswith("tmp") else store[2])
            continue
        value, expression = found.groups()
        for pattern, method in RULES:
            if (match := pattern.fullmatch(expression)) is not None:
                method(loop, value, *match.groups())
                break
        else:
            raise UnknownCodeError(line)
    if not {"Ints", "Floats"} & set(loop.kinds.values()):
        raise UnknownCodeError(
            "a vector of a loop that only moves bytes has more of them than one of numbers has lanes"
        )
    return loop
