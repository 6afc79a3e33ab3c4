"""GPU tests: skipped where there are too few GPUs, and failed where they were promised (REQUIRE_GPUS=n)."""

import os

import pytest


def gpus() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except Exception:  # noqa: BLE001 - no driver, no library: no GPU
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    need, have = marker.args[0], gpus()
    if have >= need:
        return
    if int(os.environ.get("REQUIRE_GPUS", "0")) >= need:
        pytest.fail(f"{need} GPUs were promised by REQUIRE_GPUS, {have} are here")
    pytest.skip(f"needs {need} GPUs, {have} are here")
