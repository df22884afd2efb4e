"""Writes the loops of a step on a CPU in the vector types of the compiler itself: the same operations, the same bits, in less time.

Inductor's loops make every constant anew in each pass, read scalars and pointers again, make masks into vectors and back, and have the
tail in the same loop. Here a loop's body is translated, and the tail, as Inductor wrote it, comes behind the loop. Compilers then keep
masks as masks, and shift logically in one instruction.

A kernel has several loops where blocks have a scale: over elements, or over rows of a block each. A loop with a statement that no rule
knows, and one of another shape, stays as Inductor wrote it. Code around the loops stays, too.
"""

from __future__ import annotations

import re

from everybit_torch.torch_internals.cpp_statements import NAMESPACE, UnknownCodeError, translated

_PARALLEL = "#pragma omp parallel"
_LOOP = re.compile(
    r"#pragma omp for[^\n]*\n\s*for\(int64_t x0=static_cast<int64_t>\(0L\); x0<static_cast<int64_t>\((?P<length>[^\n;]*)\);"
    r" x0\+=static_cast<int64_t>\((?P<step>\d+)L\)\)\n\s*(?=\{)"
)
"""The head of a loop that threads share."""

_WHOLE_VECTORS = re.compile(r"\{\s*\{\s*if\(C10_LIKELY[^\n]*\n\s*(?=\{)")
_LAST_ELEMENTS = re.compile(r"\s*if\(C10_UNLIKELY[^\n]*\n\s*(?=\{)")
_ROW = re.compile(
    r"\{\s*for\(int64_t x1=static_cast<int64_t>\(0L\); x1<static_cast<int64_t>\((?P<width>\d+)L\);"
    r" x1\+=static_cast<int64_t>\((?P<lanes>\d+)L\)\)\n\s*(?=\{)"
)
"""What stands in a loop: bodies for whole vectors and for the last few elements, or a loop over the elements of a row."""

_ARGUMENT = re.compile(r"\b(?:in|out|in_out)_ptr\d+\b|\bks\d+\b")
"""Arguments of a kernel that loops use: pointers and lengths. Each thread has its own, or it reads them again in each pass."""


def rewritten(source: str) -> str:
    """Return the C++ of a kernel with its loops in vector types; those of which the shape or a statement is not known are as they were."""
    if source.count(_PARALLEL) != 1 or 'extern "C"' not in source:
        return source
    pieces, end, own = list[str](), 0, set[str]()
    for found in _LOOP.finditer(source):
        block, after = _block(source, found.end())
        try:
            loop = _rows(found, block) if found["step"] == "1" else _vectors(found, block, source[after:])
        except Exception:  # of another form than the rules know: a name that is missing, a number that is none
            continue
        pieces += [source[end : found.start()], loop]
        end = after
        own.update(_ARGUMENT.findall(block + found["length"]))
    if not pieces:
        return source
    text = "".join([*pieces, source[end:]]).replace('extern "C"', NAMESPACE + 'extern "C"', 1)
    return text.replace(_PARALLEL, f"{_PARALLEL} firstprivate({', '.join(sorted(own))})", 1)


def _block(source: str, begin: int) -> tuple[str, int]:
    """The text from a brace to the brace that closes it, and where it ends."""
    depth = 0
    for brace in re.compile("[{}]").finditer(source, begin):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return source[begin : brace.end()], brace.end()
    raise UnknownCodeError("braces")


def _inside(head: re.Pattern[str], text: str) -> tuple[re.Match[str], str, str]:
    """The head with which a text begins, the block behind it with its braces, and what follows."""
    found = head.match(text)
    if found is None:
        raise UnknownCodeError(text)
    block, end = _block(text, found.end())
    return found, block, text[end:]


def _require_end(text: str) -> None:
    if text.replace("}", "").strip():
        raise UnknownCodeError(text)


def _vectors(found: re.Match[str], block: str, rest: str) -> str:
    """A loop over elements, with the last few of them behind it."""
    _, body, after = _inside(_WHOLE_VECTORS, block)
    tail = "{}"
    if _LAST_ELEMENTS.match(after):
        _, tail, after = _inside(_LAST_ELEMENTS, after)
    _require_end(after)
    loop, lanes = translated(body[1:-1]), found["step"]
    # Behind the last loop of the region all threads meet anyway. Behind others, what the last few elements are may be read.
    barrier = "" if re.match(r"\s*\}\n\s*\}\n", rest) else "\n        #pragma omp barrier"
    return f"""{{
        using namespace everybit_loops;
        const int64_t length = {found["length"]};
        const int64_t whole = length / {lanes} * {lanes};
        {_lines(loop.once)}
        #pragma omp for nowait
        for (int64_t place = 0; place < whole; place += {lanes})
        {{
        {_lines(loop.body)}
        }}
        if (whole < length && tid == omp_get_num_threads() - 1)
        {{
            const int64_t x0 = whole;
            {tail}
        }}{barrier}
        }}"""


def _rows(found: re.Match[str], block: str) -> str:
    """A loop over rows of a known number of whole vectors."""
    row, elements, after = _inside(_ROW, block)
    _, body, rest = _inside(_WHOLE_VECTORS, elements)
    _require_end(after + rest)
    if int(row["width"]) % int(row["lanes"]):
        raise UnknownCodeError(row[0])
    loop = translated(body[1:-1], f"x1 + {row['width']}L*x0")
    return f"""{{
        using namespace everybit_loops;
        const int64_t length = {found["length"]};
        {_lines(loop.once)}
        #pragma omp for
        for (int64_t x0 = 0; x0 < length; x0++)
        {{
        {_lines(loop.row)}
        for (int64_t place = {row["width"]} * x0; place < {row["width"]} * (x0 + 1); place += {row["lanes"]})
        {{
        {_lines(loop.body)}
        }}
        }}
        }}"""


def _lines(statements: list[str]) -> str:
    return "\n        ".join(statements)
