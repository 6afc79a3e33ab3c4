"""What a zygote may import: threads and devices are found and named; the user's environment comes back."""

import gc
import os
import subprocess
import sys

import pytest

from relax_actor.node import preload

STARTS_A_THREAD = """
import threading
forever = threading.Event()
threading.Thread(target=forever.wait, name="pool of starter", daemon=True).start()
"""
STARTS_A_NATIVE_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
made = ctypes.c_ulong()
libc.pthread_create(ctypes.byref(made), None, libc.pause, None)
libc.pthread_setname_np(made, b"native-pool")
"""
TOUCHES_A_DEVICE = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
"""
STARTS_AND_JOINS = """
import threading
thread = threading.Thread(target=int)
thread.start()
thread.join()
"""


@pytest.fixture
def load(tmp_path):
    """Return how the import of made-up modules goes in a process of their own."""

    def load(**modules):
        for name, code in modules.items():
            (tmp_path / f"{name}.py").write_text(code)
        program = (
            "import sys; from relax_actor.node import preload; done = preload.load(sys.argv[1:]);"
            "print(done.error, done.unfit, sep='|')"
        )
        path = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-c", program, *modules]
        said = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
        return said.stdout.strip()

    return load


def test_what_starts_no_thread_is_fit(load):
    assert load(plain="", brief=STARTS_AND_JOINS) == "|"


def test_the_module_that_starts_a_thread_is_named_and_the_thread(load):
    said = load(plain="", starter=STARTS_A_THREAD, after="")
    assert said == "|importing starter started threads, which a fork would lose: pool of starter"


def test_a_thread_of_a_library_is_known_by_the_kernels_name(load):
    said = load(native=STARTS_A_NATIVE_THREAD)
    assert said == "|importing native started threads, which a fork would lose: native-pool"


def test_a_thread_that_ends_before_the_last_import_does_not_matter(load):
    first = STARTS_A_THREAD + "thread = threading.enumerate()[-1]\n"
    assert load(starter=first, ender="import starter\nstarter.forever.set()\nstarter.thread.join()\n") == "|"


def test_the_module_that_touches_a_device_is_named(load):
    said = load(plain="", touching=TOUCHES_A_DEVICE)
    assert (
        said
        == "|importing touching touched a device, which does not survive a fork: torch.cuda is initialized"
    )


def test_a_module_that_cannot_be_imported_is_an_error(load):
    assert load(broken="1 / 0") == "the zygote could not import broken: ZeroDivisionError: division by zero|"


def test_an_open_file_of_cuda_is_a_device_in_use(monkeypatch):
    monkeypatch.setattr(os, "readlink", lambda _path: "/dev/nvidia-uvm")
    assert preload._device_in_use() == "/dev/nvidia-uvm is open"


def test_a_file_that_only_nvml_opens_is_none(monkeypatch):
    monkeypatch.setattr(os, "readlink", lambda _path: "/dev/nvidiactl")
    assert preload._device_in_use() == ""


def test_a_thread_that_ends_while_it_is_looked_at_has_no_name():
    assert preload._kernel_name(2**30) == "one that has ended"


def test_the_users_own_values_come_back(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    for name, value in preload.environment().items():
        monkeypatch.setenv(name, value)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["TORCH_WARM_POOL"] == "0"
    preload.restore_environment()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "TORCH_WARM_POOL" not in os.environ
    assert not [name for name in os.environ if name.startswith(preload.SAVED)]


def test_nobody_looks_for_garbage_while_modules_are_imported_but_afterwards(tmp_path, monkeypatch):
    (tmp_path / "makes_much.py").write_text(
        "import gc\n"
        "before = gc.get_stats()[0]['collections']\n"
        "kept = [[] for _ in range(100_000)]\n"
        "assert gc.get_stats()[0]['collections'] == before\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_threshold()
    assert preload.load(["makes_much"]).error == ""
    assert gc.get_threshold() == before


def test_a_module_may_say_itself_when_to_look_for_garbage(tmp_path, monkeypatch):
    (tmp_path / "has_its_own_way.py").write_text("import gc; gc.set_threshold(12_345, 7, 8)")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_threshold()
    try:
        preload.load(["has_its_own_way"])
        assert gc.get_threshold() == (12_345, 7, 8)
    finally:
        gc.set_threshold(*before)
