"""Stand-ins for CUDA's libraries, so that PyPI's torch for Linux runs without them.

That torch is linked with CUDA and needs its libraries to be imported, three gigabytes for each version, though nothing here calls them.
For each library that is missing a shared object is made that has its name and the functions that torch looks up, all of which return
100, CUDA's number for "no device". torch then finds no device, as on every machine without one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

_LIBRARY = re.compile(r"lib(?:cu|nccl|nv)\w*\.so\S*")
_FUNCTION = re.compile(r"^((?:__cuda|cu|nccl|nvrtc|nvJitLink|nvshmem)\w*)(?:@@?(\S+))? U", re.MULTILINE)
_REQUIRED_FROM = re.compile(r"\s*required from (\S+):")
_VERSION = re.compile(r"\s*0x\w+ 0x\w+ \d+ (\S+)")


def stand_in(folder: Path) -> list[str]:
    """Make stand-ins in the folder of torch's libraries, where they look first; returns their names, none if torch needs none.

    Raises:
        subprocess.CalledProcessError: The C compiler, ``nm`` or ``objdump`` fails.
        FileNotFoundError: There is none.
    """
    libraries = sorted(str(path) for path in folder.glob("*.so*") if not _LIBRARY.fullmatch(path.name))
    headers = _said("objdump", "-p", *libraries)
    needed = sorted({name for name in re.findall(r"NEEDED\s+(\S+)", headers) if _LIBRARY.fullmatch(name)})
    versions = _versions(headers)
    functions: dict[str, set[str]] = {}
    for name, version in _FUNCTION.findall(_said("nm", "-D", "--undefined-only", "--format=posix", *libraries)):
        functions.setdefault(version, set()).add(name)
    for library in needed:
        wanted = {version: functions.get(version, set()) for version in versions.get(library, ())}
        # Those without a version are looked for in all libraries.
        _make(folder / library, wanted or {library: functions.get("", set())})
    return needed


def _versions(headers: str) -> dict[str, list[str]]:
    """The symbol versions that are required of each library, from what ``objdump -p`` prints."""
    found: dict[str, list[str]] = {}
    library = None
    for line in headers.splitlines():
        if begins := _REQUIRED_FROM.match(line):
            library = begins[1]
        elif library is not None and (version := _VERSION.match(line)):
            found.setdefault(library, []).append(version[1])
        else:
            library = None
    return {name: sorted(set(versions)) for name, versions in found.items()}


def _make(library: Path, functions: dict[str, set[str]]) -> None:
    names = sorted({name for of_version in functions.values() for name in of_version})
    source = "\n".join(f"int {name}(void) {{ return 100; }}" for name in names)
    script = "\n".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(of_version))} }};"
        for version, of_version in functions.items()
    )
    with tempfile.NamedTemporaryFile("w", suffix=".map", encoding="utf-8") as versions:
        versions.write(script)
        versions.flush()
        # `-w`: some names are those of functions that the compiler knows with other types.
        flags = [
            "-shared",
            "-fPIC",
            "-w",
            "-x",
            "c",
            "-",
            f"-Wl,-soname,{library.name}",
            f"-Wl,--version-script,{versions.name}",
        ]
        subprocess.run(["cc", *flags, "-o", str(library)], input=source, text=True, check=True, capture_output=True)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
