"""Each import contract fails when it is broken on purpose."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BREACHES = {
    "launcher -> relax_actor -> transport": ("transport/plain.py", "import relax_actor.ids"),
    "decisions and maths do no I/O": ("relax_actor/node/lease.py", "import time"),
    "ZeroMQ stays in transport": ("relax_actor/app.py", "import zmq"),
    "no Ray": ("launcher/launch.py", "import ray"),
}


def lint(folder: Path) -> str:
    program = "import sys; from importlinter.cli import lint_imports_command as lint; sys.exit(lint())"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


def test_each_contract_can_fail(tmp_path):
    for name in ("launcher", "relax_actor", "transport"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in BREACHES.values():
        with (tmp_path / file).open("a") as module:
            module.write(f"\n{line}\n")

    said = lint(tmp_path)

    assert f"Contracts: 0 kept, {len(BREACHES)} broken" in said, said
    assert all(f"{name} BROKEN" in said for name in BREACHES), said
