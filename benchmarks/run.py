"""`make bench`: prepare the demo's model, then run every benchmark; results go to benchmarks/results/."""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "runs/models/smollm2"  # paths are relative: commands are kept in the results

COMMANDS = (
    ["examples/arithmetic/prepare.py", MODEL],
    ["benchmarks/calls.py"],
    ["benchmarks/dcs.py"],
    ["benchmarks/resident.py"],
    ["benchmarks/overlap.py", MODEL],
    ["benchmarks/recovery.py", MODEL],
    ["benchmarks/learning.py", MODEL],
)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for command in COMMANDS:
        print("$ python", *command, flush=True)
        subprocess.run([sys.executable, *command], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
