"""Link flags with which a library that is made here loads where glibc is older.

A new glibc has new versions of old functions: `dlopen` of 2.34, since it moved from libdl into libc, or `exp` of 2.29.
The linker takes the newest. So stubs of libdl, libpthread, librt and libm stand first on the link line, which offer
each such function in its newest version up to a ceiling; what is linked against them asks for that version, of the
library that has it on an old machine. On a new one those libraries still answer for it.

Two names have no older version, and an object defines them instead, hidden:
    __libc_single_threaded              (glibc 2.32) false, so that libstdc++ always counts references atomically
    std::__throw_bad_array_new_length   (GCC 11) throws, as libstdc++'s own does
auditwheel then says whether anything else is too new.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

Version = tuple[int, ...]

# The library of today that is read, the one that had the functions, their names, and whether the stub has its other
# functions, too: it has to where the names of both are the same, because the linker then leaves out the second.
# NOTE: of libm only those that take what they took: totalorder, too, has a new version, and other arguments.
MOVED = (
    ("libc.so.6", "libdl.so.2", re.compile("dl[a-z]+"), False),
    ("libc.so.6", "libpthread.so.0", re.compile("(pthread|sem)_.+"), False),
    ("libc.so.6", "librt.so.1", re.compile("(shm|timer|mq|aio)_.+"), False),
    ("libm.so.6", "libm.so.6", re.compile("exp2?|log2?|pow|hypot|fmod"), True),
)

OBJECT = """
#include <new>
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}
"""


def parse(version: str) -> Version:
    return tuple(map(int, version.split(".")))


def bindings(symbols: str, ceiling: Version, names: re.Pattern[str], whole: bool) -> dict[str, str]:
    """The version to take of each function in what `readelf -W --dyn-syms` prints.

    Of `names`, where the newest version is above the ceiling, the newest that is not. With `whole`, also the newest
    version of every function where that is not above it.
    """
    newest: dict[str, Version] = {}
    older: dict[str, list[Version]] = defaultdict(list)
    for name, is_newest, text in re.findall(r" I?FUNC .* (\w+)@(@?)GLIBC_([\d.]+)", symbols):
        version = parse(text)
        if is_newest:
            newest[name] = version
        elif version <= ceiling:
            older[name].append(version)
    chosen = {}
    for name, version in sorted(newest.items()):
        if version <= ceiling and whole:
            chosen[name] = version
        elif version > ceiling and older[name] and names.fullmatch(name):
            chosen[name] = max(older[name])
    return {name: ".".join(map(str, version)) for name, version in chosen.items()}


def make_stub(soname: str, functions: dict[str, str], folder: Path) -> Path:
    """A shared library that defines these names in these versions, and does nothing."""
    nodes = defaultdict(list)
    for name, version in functions.items():
        nodes[version].append(name)
    script = folder / f"{soname}.map"
    script.write_text(
        "".join(f"GLIBC_{version} {{ global: {'; '.join(names)}; }};\n" for version, names in nodes.items())
    )
    source = folder / f"{soname}.s"
    source.write_text("".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in functions) + "ret\n")
    library = folder / soname
    link = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{soname},--version-script,{script}", "-o", library, source]
    subprocess.run(link, check=True)
    return library


def link_flags(ceiling: str, folder: Path) -> list[str]:
    """Makes stubs and the object in `folder`; returns what stands before all else on a link line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "absent.cpp").write_text(OBJECT)
    item = folder / "absent.o"
    subprocess.run(["c++", "-O2", "-fPIC", "-c", folder / "absent.cpp", "-o", item], check=True)
    stubs = []
    for today, soname, names, whole in MOVED:
        library = subprocess.run(["cc", f"-print-file-name={today}"], capture_output=True, text=True, check=True).stdout
        read = ["readelf", "-W", "--dyn-syms", library.strip()]
        symbols = subprocess.run(read, capture_output=True, text=True, check=True).stdout
        if functions := bindings(symbols, parse(ceiling), names, whole):
            stubs.append(str(make_stub(soname, functions, folder)))
    return [str(item), "-Wl,--push-state,--no-as-needed", *stubs, "-Wl,--pop-state"]
