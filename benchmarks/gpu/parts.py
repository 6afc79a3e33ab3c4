"""A benchmark's parts: each runs whatever became of the others, and a cut-off run keeps what it has."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Parts:
    """Runs parts, and writes after each of them what there is.

    Args:
        result: that parts write into; what they raise is in its `errors`.
        out: the file.
    """

    def __init__(self, result: dict[str, Any], out: Path) -> None:
        self._result, self._out = result, out
        result.setdefault("errors", [])

    def run(self, name: str, part: Callable[[], object]) -> None:
        """Run a part."""
        since = time.monotonic()
        print(f"-- {name}", file=sys.stderr, flush=True)
        try:
            part()
        except BaseException:  # noqa: BLE001 - the others go on
            self._result["errors"].append(f"{name}: {traceback.format_exc()[-1500:]}")
            print(traceback.format_exc(), file=sys.stderr, flush=True)
        print(f"-- {name} took {time.monotonic() - since:.1f} s", file=sys.stderr, flush=True)
        self.save()

    def skip(self, name: str, reason: str) -> None:
        """Say why a part did not run."""
        self._result["errors"].append(f"{name}: {reason}")
        self.save()

    def save(self) -> None:
        """Write what there is."""
        self._out.write_text(json.dumps(self._result, indent=1) + "\n")


def cuda_devices() -> list[str]:
    """Return the names of the GPUs that torch sees."""
    import torch  # noqa: PLC0415 - not every benchmark has it in its own process

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
