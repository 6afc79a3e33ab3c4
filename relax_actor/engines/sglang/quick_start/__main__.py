"""Runs `start` of this folder, as a package of its own."""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path[0] = str(HERE.parent)
start = importlib.import_module(f"{HERE.name}.start")
sys.path[0] = str(Path.cwd())  # as with `python -m`; what lies beside us is not SGLang's business
start.main(sys.argv[1:])
