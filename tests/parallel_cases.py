"""What tools/test_parallel.py runs on each rank: `python parallel_cases.py STRATEGY,... ARGUMENTS OF train_lm.py`.

One process group for all strategies, because starting a rank takes longer than training on it does here. Each trains
twice: NAME.csv, and NAME-again.csv from the checkpoint that the first left after nine steps.
"""

from __future__ import annotations

import sys

from commands import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))


def main() -> None:
    import parallel
    import ranks
    import train_lm
    from harness import make_folder

    names, *arguments = sys.argv[1:]
    with ranks.joined("cpu"):
        for name in names.split(","):
            for file in (name, f"{name}-again"):
                args = train_lm.parse(["--parallel", name, *arguments, "--save-every", "9"])
                make_folder(args.csv.parent)
                args.resume = args.csv.with_name(f"saved-{name}")
                args.csv = args.csv.with_name(f"{file}.csv")
                parallel.train_on_ranks(args)


if __name__ == "__main__":
    main()
