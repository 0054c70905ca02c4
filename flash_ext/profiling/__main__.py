"""The commands of flash_ext.profiling: ``python -m flash_ext.profiling nsys | memory | numerics | plan``, each with
--help.

They need the extra ``profiling``; importing flash_ext.profiling does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from flash_ext.profiling import memory, nsys, plan
from flash_ext.profiling.numerics import Row, numerics


def numerics_table(rows: list[Row]) -> str:
    """Markdown, which reads well on a terminal, too."""
    from tabulate import tabulate

    errors = ["" if row.error is None else f"{row.error:.1e}" for row in rows]
    cells = [(r.case, r.values, r.accumulator, r.result, e, r.why) for r, e in zip(rows, errors, strict=True)]
    header = ("case", "values", "computed in", "result", "relative error", "why")
    return tabulate(cells, header, "github", disable_numparse=True)


def run_numerics(device: Literal["cpu", "cuda"] = "cpu", out: Path | None = None) -> None:
    """Shows where half precision loses accuracy.

    Args:
        device: whose arithmetic
        out: FILE.md, to write the table there, too
    """
    text = numerics_table(numerics(device))
    print(text)
    if out:
        out.write_text(text + "\n")


def later(command: Callable[..., None]) -> Callable[..., Any]:
    """The same arguments, but the call is returned: within tyro a ValueError would pass for a wrong argument."""
    return functools.wraps(command)(lambda *args, **options: functools.partial(command, *args, **options))


def main(argv: Sequence[str] | None = None) -> None:
    commands = {
        "nsys": later(nsys.main),
        "memory": later(memory.main),
        "numerics": later(run_numerics),
        "plan": later(plan.main),
    }
    about = "Profiling of PyTorch programs; each command has --help."
    try:
        import tyro
    except ModuleNotFoundError:
        sys.exit(
            "error: tyro is not installed; install flash_ext with its extra profiling, in a clone "
            "pip install --no-build-isolation -e '.[profiling]', of a wheel pip install 'FILE.whl[profiling]'"
        )
    config, prog = (tyro.conf.DisallowNone,), "python -m flash_ext.profiling"
    run = tyro.extras.subcommand_cli_from_dict(commands, args=argv, prog=prog, description=about, config=config)
    try:
        run()
    except (nsys.NsysError, memory.SnapshotError, plan.PlanError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
