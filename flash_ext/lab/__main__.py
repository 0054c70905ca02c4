"""``python -m flash_ext.lab``: lists the lessons; ``run NAME`` runs one, ``show NAME`` prints its kernels.

Counts need no GPU; times do. What the extra ``lab`` installs is needed, but to import flash_ext.lab.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

NEEDED = ("matplotlib", "numpy", "rich", "tyro")


def main(argv: Sequence[str] | None = None) -> None:
    if absent := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(
            f"error: {', '.join(absent)} not installed; install flash_ext with its extra lab, in a clone "
            "pip install --no-build-isolation -e '.[lab]', of a wheel pip install 'FILE.whl[lab]'"
        )
    from flash_ext.lab import commands

    commands.run((sys.argv[1:] if argv is None else argv) or ["list"])


if __name__ == "__main__":
    main()
