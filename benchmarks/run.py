"""`make bench`: prepare the demo's model, then run every benchmark; results go to benchmarks/results/."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "runs" / "models" / "smollm2"

BENCHMARKS = (
    ["calls.py"],
    ["overlap.py", str(MODEL)],
    ["recovery.py", str(MODEL)],
    ["learning.py", str(MODEL)],
)


def main() -> None:
    prepare = HERE.parent / "examples" / "arithmetic" / "prepare.py"
    commands = [[str(prepare), str(MODEL)], *([str(HERE / name), *args] for name, *args in BENCHMARKS)]
    for command in commands:
        print("$ python", *command, flush=True)
        subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main()
