"""The quick start of SGLang's server, with a toy for SGLang: tests/sglang starts the real one by it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from relax_actor.engines.sglang.settings import QUICK_START

TOY = Path(__file__).parents[1] / "support" / "toy_sglang"
DEADLINE_S = 20.0


class Play:
    """A running toy, and what it said of itself."""

    def __init__(self, process: subprocess.Popen, log: Path) -> None:
        self.process, self.log = process, log
        self.said = json.loads(process.stdout.readline())
        self.child = self.said["child"]

    @property
    def forked(self) -> bool:
        """Whether the child has what its main process imported."""
        return self.child["imported_in"] == self.said["main"]

    def all(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]


@pytest.fixture
def play(tmp_path):
    """Start a toy that does `what` while it is imported."""
    started = []

    def start(what: str = "", *words: str) -> Play:
        log = tmp_path / f"log-{len(started)}"
        environment = {"TOY": what, "TOLD_EARLY": "yes", "PYTHONPATH": str(TOY), "TMPDIR": str(tmp_path)}
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(QUICK_START), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        started.append(process)
        return Play(process, log)

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@contextmanager
def all_end(processes: list[psutil.Process]) -> Iterator[None]:
    yield
    until = time.monotonic() + DEADLINE_S
    while any(process.is_running() and process.status() != "zombie" for process in processes):
        assert time.monotonic() < until, processes
        time.sleep(0.01)


def model(folder: Path, **config) -> tuple[str, str]:
    (folder / "config.json").write_text(json.dumps(config))
    return "--model-path", str(folder)


def test_what_the_server_spawns_is_forked_with_all_that_was_imported(play):
    toy = play("", "--port", "7")
    assert toy.forked
    assert toy.said["method"] == "spawn"
    assert toy.said["arguments"] == ["--port", "7"]
    assert toy.child["parent"] != toy.said["main"]
    assert "forks the others" in toy.log.read_text()


def test_a_forked_process_has_the_environment_of_its_parent_at_that_time(play):
    child = play().child
    assert child["TOLD_LATE"] == "yes"
    assert "TOLD_EARLY" not in child


def test_modules_learn_about_gpus_without_cuda_and_without_a_thread(play):
    toy = play("gpu")
    assert toy.said["gpu"] == {"capability": [9, 0], "name": "Toy 1", "memory": 5, "triton": 101}
    assert toy.said["touched"] is False
    assert toy.forked


def test_a_function_that_a_module_kept_asks_cuda_after_the_imports(play):
    assert play("gpu").said["kept"] == 1


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("gpu touch", "CUDA was initialized by .*http_server.py:"),
        ("gpu mute", "CUDA was initialized by .*http_server.py:"),
        ("touch", "CUDA was initialized by .*http_server.py:"),
        ("past torch", "CUDA was initialized while modules were imported"),
        ("thread", "there are other threads: "),
    ],
)
def test_a_process_that_cannot_be_forked_is_spawned_and_the_log_says_why(play, what, why):
    toy = play(what)
    assert not toy.forked
    assert toy.child["TOLD_LATE"] == "yes"
    assert re.search(rf"processes are spawned: {why}", toy.log.read_text())


def test_a_process_that_needs_another_library_preloaded_is_new(play):
    assert not play("preload").forked


def test_only_the_module_of_the_model_is_imported(play, tmp_path):
    toy = play("", *model(tmp_path, architectures=["SmallForCausalLM"]))
    assert set(toy.said["skipped"].split(",")) == {"__init__", "other", "registry"}
    assert "1 of 4 model modules" in toy.log.read_text()


def test_all_model_modules_are_imported_where_the_model_is_found_in_none(play, tmp_path):
    assert play("", *model(tmp_path, architectures=["NewForCausalLM"])).said["skipped"] is None


def test_when_the_twin_is_killed_what_it_forked_ends_and_the_server_is_told(play):
    toy = play()
    os.kill(toy.child["parent"], signal.SIGKILL)
    assert toy.process.stdout.readline().startswith(b"ended ")


def test_when_the_main_process_is_killed_all_end(play):
    toy = play()
    with all_end(toy.all()):
        toy.process.kill()


def test_when_a_forked_process_is_killed_the_server_learns_of_what(play):
    toy = play()
    os.kill(toy.child["pid"], signal.SIGKILL)
    assert toy.process.stdout.readline() == b"ended -9\n"


def test_a_signal_to_the_parent_of_a_forked_process_reaches_the_main_process(play):
    toy = play()
    os.kill(toy.child["parent"], signal.SIGQUIT)
    assert toy.process.stdout.readline() == b"quit\n"


def test_no_socket_of_the_twin_is_left_behind(play, tmp_path):
    toy = play()
    with all_end(toy.all()):
        toy.process.kill()
    assert not list(tmp_path.glob("twin-*"))
