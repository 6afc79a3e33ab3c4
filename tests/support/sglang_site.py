"""Where the tests find an interpreter with SGLang, and what they do where there is none."""

import os
from pathlib import Path

import pytest

VARIABLE = "RELAX_ACTOR_SGLANG_PYTHON"
OURS = Path(__file__).parents[2] / ".venv-sglang"


def interpreter() -> Path | None:
    """Return the interpreter that runs SGLang, if there is one."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return OURS / "bin" / "python" if (OURS / "ready").exists() else None


def demand_sglang() -> None:
    """Skip the test without SGLang, or fail it where SGLang was promised (REQUIRE_SGLANG=1)."""
    if interpreter() is not None:
        return
    if os.environ.get("REQUIRE_SGLANG") == "1":
        pytest.fail(f"SGLang was promised by REQUIRE_SGLANG; {OURS.name} is not ready: make sglang-env")
    pytest.skip(f"needs SGLang: `make sglang-env`, or {VARIABLE}=PYTHON")
