"""A griffe extension for the reference: what docstrings say in Sphinx's markup becomes Markdown, links and MathML.

Docstrings keep Sphinx's roles (``:func:`adamw```), which editors and ``help()`` show as they stand. The site is made of Markdown, in which
roles and formulas would appear raw. The extension also shows ``scale_by_adam = ScaleByAdam`` as the class with its arguments, under the
name that users type.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[2]
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`(~?)([\w.]+)`")
INLINE_FORMULA = re.compile(r":math:`([^`]+)`")
FORMULA = re.compile(r"^([ \t]*)\.\. math::[ \t]*\n((?:\1[ \t]+\S.*\n?|[ \t]*\n)+)", re.MULTILINE)


ENTRY = re.compile(r"^::: (?P<name>[\w.]+)$(?P<options>(?:\n    .*)*)", re.MULTILINE)
MEMBERS = re.compile(r"^ +members: (?:\[(?P<some>.*)\]|(?P<all>true)|false)$", re.MULTILINE)


def rendered() -> dict[str, set[str] | None]:
    """The names that the pages of the reference show, in order, and of each the members that it shows; None: all with a docstring."""
    found: dict[str, set[str] | None] = {}
    for page in sorted(Path(__file__).parent.glob("*.md")):
        for entry in ENTRY.finditer(page.read_text(encoding="utf-8")):
            members = MEMBERS.search(entry["options"])
            shown = None if members is None or members["all"] else set(re.findall(r"\w+", members["some"] or ""))
            found[entry["name"]] = shown
    return found


class Docstrings(griffe.Extension):
    """Translates the docstrings of each package that is loaded."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:  # noqa: ARG002  # griffe passes its loader, too
        """Translate all docstrings of ``pkg``, and replace second names of classes by the classes."""
        if not self._names:
            self._names = _names_by_path()
        _visit(pkg, self._names)


def _names_by_path() -> dict[str, str]:
    """The name under which the reference shows each object, and each documented member of a class, by the path of its definition."""
    collection = griffe.ModulesCollection()
    for package, folder in (("everybit", "core"), ("everybit_torch", "adapters")):
        griffe.load(package, search_paths=[ROOT / folder], modules_collection=collection, resolve_aliases=True)
    names = {}
    for name, shown in rendered().items():
        found: Any = collection[name]
        target = found.final_target if found.is_alias else found
        path = _class_named(target) or target.path
        names[path] = name
        if target.kind is griffe.Kind.CLASS:
            for member, value in target.all_members.items():
                documented = not value.is_alias and value.has_docstring and not member.startswith("_")
                if documented and (shown is None or member in shown):
                    names[value.path] = f"{name}.{member}"
    return names


def _class_named(found: Any) -> str | None:
    """The class that ``scale_by_adam = ScaleByAdam`` names; None of any other object."""
    if found.kind is griffe.Kind.ATTRIBUTE and isinstance(found.value, griffe.ExprName):
        value = found.parent.members.get(found.value.name)
        if value is not None and value.kind is griffe.Kind.CLASS:
            return str(value.path)
    return None


def _visit(found: Any, names: dict[str, str]) -> None:
    if found.docstring is not None:
        found.docstring.value = _markdown(found.docstring.value, found, names)
    for name, member in list(found.members.items()):
        if member.is_alias:
            continue
        if _class_named(member) is not None:
            found.set_member(name, griffe.Alias(name, found.members[member.value.name], parent=found))
        else:
            _visit(member, names)


def _markdown(text: str, where: Any, names: dict[str, str]) -> str:
    text = FORMULA.sub(lambda match: f"{match[1]}{_mathml(match[2], 'block')}\n\n", text)
    text = INLINE_FORMULA.sub(lambda match: _mathml(match[1], "inline"), text)
    return ROLE.sub(lambda match: _link(match[2], bool(match[1]), where, names), text)


def _mathml(formula: str, display: str) -> str:
    return convert(" ".join(formula.split()), display=display)


def _link(name: str, short: bool, where: Any, names: dict[str, str]) -> str:
    """A link to an object that the reference shows, or its name alone."""
    shown = name.rpartition(".")[2] if short else name
    path = _resolved(name, where)
    while path not in names and "." in path:
        path = path.rpartition(".")[0]  # a field that its class's own text describes
    return f"[`{shown}`][{names[path]}]" if path in names else f"`{shown}`"


def _resolved(name: str, where: Any) -> str:
    """The path of what ``name`` means in the scope of ``where``; the name itself if that is not known."""
    first, dot, rest = name.partition(".")
    scope = where
    while scope is not None:
        if scope.kind is griffe.Kind.CLASS and first in scope.members:
            return f"{scope.path}.{name}"
        scope = scope.parent
    try:
        return f"{where.resolve(first)}{dot}{rest}"
    except griffe.NameResolutionError:
        return name
