"""Put this folder on the path of the environment that runs it, and see whether SGLang's server is there.

Run by `make sglang-env` with the environment's own interpreter.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
# SGLang turns some errors of imports into warnings, so what the tests need is named.
NEEDED = """
import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.srt.models.qwen3, sglang.srt.models.qwen3_moe
import sglang.version, torch
print(f"SGLang {sglang.version.__version__} on torch {torch.__version__}")
"""


def main() -> int:
    """Return 0 where the server can be imported."""
    site = Path(sysconfig.get_paths()["purelib"])
    (site / "sglang_on_cpu.pth").write_text(f"{HERE}\nimport sglang_on_cpu\n", encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NEEDED], capture_output=True, text=True, check=False
    )
    if found.returncode == 0:
        sys.stdout.write(found.stdout.splitlines()[-1] + "\n")
        return 0
    sys.stderr.write(
        f"error: SGLang's server cannot be imported in {sys.prefix}\n{found.stderr}\n"
        "hint: a missing package belongs into tests/sglang/requirements.txt, "
        "or as a stand-in into tests/sglang/shim\n"
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
