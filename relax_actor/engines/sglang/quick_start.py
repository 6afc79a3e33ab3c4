"""Start SGLang's server quickly: it is imported once, and of its 250 model modules one.

    python quick_start.py ARGUMENTS OF sglang.launch_server

Run by SGLang's interpreter, which need not have our packages: nothing here is imported but the standard
library and, when it runs, SGLang. A start is mostly imports, and SGLang does them twice: in its main process
and again in each that it spawns. Here the main process imports, and before it touches CUDA, which does not
survive a fork, forks a twin of itself. What SGLang spawns after that is forked from the twin, which is the
fork server of `multiprocessing`. To SGLang it looks spawned: the start method keeps its name, the child gets
its parent's environment, its arguments come pickled.

Modules ask what GPU there is while they are imported, which would touch CUDA. So another process asks, and
they get its answers. Where CUDA is touched nevertheless, or a thread was started, or anything else is not as
expected, nothing is forked: the server starts as SGLang starts it, and its log says why.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import multiprocessing.context
import os
import re
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, popen_forkserver, spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

SERVER = "sglang.launch_server"
IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
"""What main process, schedulers and detokenizer import."""
SKIPPED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
ALL_MODELS = ("--model-impl", "--speculative", "--json-model-override-args")
"""Words of the command line that may lead to another model class than the configuration's."""

TITLE = "sglang::twin"
PR_SET_PDEATHSIG = 1
CUDA_ERROR_NOT_INITIALIZED = 3
_ENTRY = re.compile(r"^EntryClass\b[^=\n]*=\s*(\w+|[\[(][^\])]*[\])])", re.MULTILINE)


def main(words: Sequence[str]) -> None:
    """Become SGLang's server with these arguments."""
    began = time.monotonic()
    if sys.path[0] == str(Path(__file__).parent):
        sys.path[0] = os.getcwd()  # as with `python -m`; what lies beside this file is not SGLang's business
    sys.dont_write_bytecode = False
    models = skip_models(words)
    culprit = import_all(IMPORTED)
    obstacle = culprit or why_not()
    if obstacle:
        say(f"imported in {time.monotonic() - began:.1f} s; processes are spawned, for {obstacle}")
    else:
        twin = fork_twin()
        say(f"imported in {time.monotonic() - began:.1f} s, {models}; process {twin} forks the others")
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def say(what: str) -> None:
    """Write a line as SGLang's log has them."""
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] quick start: {what}\n")
    sys.stderr.flush()


# Which model modules are imported


def entry_classes(source: str) -> tuple[str, ...]:
    """Return the classes that a model module offers, by its source."""
    return tuple(name for entry in _ENTRY.findall(source) for name in re.findall(r"\w+", entry))


def modules_to_skip(architecture: str, sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that do not define a model class; none at all if it is found nowhere.

    Args:
        architecture: the class, or nothing.
        sources: of each module of `sglang.srt.models`, by its last name.
    """
    others = tuple(name for name, source in sources.items() if architecture not in entry_classes(source))
    return others if len(others) < len(sources) else ()


def skip_models(words: Sequence[str]) -> str:
    """Tell SGLang which model modules it need not import; return what was decided, in words."""
    if SKIPPED_MODELS in os.environ or os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return "model modules as the environment says"
    sources = _model_sources()
    skipped = modules_to_skip(_architecture(words), sources)
    if not skipped:
        return "all model modules"
    os.environ[SKIPPED_MODELS] = ",".join(skipped)
    return f"{len(sources) - len(skipped)} of {len(sources)} model modules"


def plain_architecture(config: Mapping[str, Any]) -> str:
    """Return the class of a plain language model, by its configuration; nothing for any other model.

    Others may be served by more classes than the one named, or by another.
    """
    architectures = config.get("architectures") or [""]
    plain = len(architectures) == 1 and architectures[0].endswith("ForCausalLM")
    return architectures[0] if plain and not {"vision_config", "quantization_config"} & set(config) else ""


def _architecture(words: Sequence[str]) -> str:
    if any(word.startswith(ALL_MODELS) for word in words):
        return ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        config = Path(words[words.index("--model-path") + 1], "config.json")
        return plain_architecture(json.loads(config.read_text(encoding="utf-8")))
    return ""


def _model_sources() -> dict[str, str]:
    spec = importlib.util.find_spec("sglang")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in Path(folder, "srt", "models").glob("*.py")]
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


# Imports that leave CUDA alone


def import_all(names: Iterable[str]) -> str:
    """Import modules; return who touched CUDA meanwhile, in words, or nothing."""
    gc.disable()  # it frees nothing of modules, and looks at all of them again and again
    try:
        with gpu_answers() as touched:
            for name in names:
                importlib.import_module(name)
    finally:
        gc.freeze()  # what is forked then shares these pages for longer
        gc.enable()
    return "".join(touched[:1])


@contextlib.contextmanager
def gpu_answers() -> Iterator[list[str]]:
    """Have questions about GPUs answered out of another process; yields who touched CUDA nevertheless."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU, without CUDA
    cuda = importlib.import_module("torch").cuda
    touched: list[str] = []
    if not cuda.is_available():
        yield touched
        return
    answers = _Answers(cuda)
    real = {name: getattr(cuda, name) for name in ("_lazy_init", *answers.replaced)}

    def lazy_init() -> None:
        if not cuda.is_initialized():
            touched.append(f"CUDA was initialized by {_caller()}")
        real["_lazy_init"]()

    for name, function in {**answers.replaced, "_lazy_init": lazy_init}.items():
        setattr(cuda, name, function)
    try:
        yield touched
    finally:
        for name, function in real.items():
            setattr(cuda, name, function)
        answers.close()


class _Answers:
    """What `torch.cuda` says of each GPU, asked for in a process of its own."""

    def __init__(self, cuda: Any) -> None:
        self.replaced: dict[str, Callable[..., Any]] = {
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None: (self._of(device).major, self._of(device).minor),
            "get_device_name": lambda device=None: self._of(device).name,
            "get_device_properties": lambda device=None: self._of(device),
        }
        self._known: list[SimpleNamespace] = []
        self._read, write = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _tell(cuda, write, parent)
        os.close(write)

    def close(self) -> None:
        """Reap the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._read)

    def _of(self, device: Any) -> SimpleNamespace:
        if not self._known:
            with open(self._read, "rb", closefd=False) as file:
                self._known = [SimpleNamespace(**each) for each in json.loads(file.read())]
        index = getattr(device, "index", device)
        if isinstance(index, str):
            index = int(index.rpartition(":")[2]) if ":" in index else 0
        return self._known[index or 0]


def _tell(cuda: Any, write: int, parent: int) -> NoReturn:
    """Write the properties of all GPUs, and end."""
    try:
        die_with(parent)
        each = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
        plain = [{name: getattr(one, name) for name in dir(one) if name[0] != "_"} for one in each]
        os.write(write, json.dumps(plain, default=str).encode())
    finally:
        os._exit(0)


def _caller() -> str:
    """Return the innermost place that is not of torch or of this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and f"{os.sep}torch{os.sep}" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return "somebody unknown"


# The twin


def why_not() -> str:
    """Return why a twin of this process would not be like new, or nothing."""
    threads = [Path("/proc/self/task", task, "comm") for task in os.listdir("/proc/self/task")]
    if len(threads) > 1:
        return "there are other threads: " + ", ".join(path.read_text().strip() for path in threads)
    if importlib.import_module("torch").cuda.is_initialized() or _driver_is_up():
        return "CUDA was initialized while modules were imported"
    if list(inspect.signature(forkserver.main).parameters)[:3] != ["listener_fd", "alive_r", "preload"] or (
        sys.version_info >= (3, 14)
    ):
        return f"the fork server of Python {sys.version.split()[0]} is an unknown one"
    return ""


def _driver_is_up() -> bool:
    """Return whether anybody has called cuInit here, past torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)


def fork_twin() -> int:
    """Fork the twin, and have what is spawned from now on forked from it; return its pid."""
    parent = os.getpid()
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if not pid:
            os.close(alive_w)
            _serve(listener.detach(), alive_r, parent)
    os.close(alive_r)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid
    _Quick.install()
    return pid


class _Quick:
    """A process that SGLang spawns: forked from the twin, unless it asks for what only a new one can have."""

    @classmethod
    def install(cls) -> None:
        """Be what the start method `spawn` means in this process."""
        process: Any = multiprocessing.context.SpawnProcess
        plain, owner = process._Popen, os.getpid()
        executable, preload = spawn.get_executable(), os.environ.get("LD_PRELOAD")

        def popen(process_obj: Any) -> Any:
            new = spawn.get_executable() != executable or os.environ.get("LD_PRELOAD") != preload
            if new or os.getpid() != owner:
                return plain(process_obj)
            return _with_environment(popen_forkserver.Popen, process_obj)

        process._Popen = staticmethod(popen)


def _with_environment(popen: Any, process_obj: Any) -> Any:
    """Start a process that gets this one's environment, which a fork server alone does not do."""
    real = spawn.get_preparation_data

    def data(name: str) -> dict[str, Any]:
        return {**real(name), "environ": dict(os.environ)}

    spawn.get_preparation_data = data
    try:
        return popen(process_obj)
    finally:
        spawn.get_preparation_data = real


def _serve(listener: int, alive_r: int, parent: int) -> NoReturn:
    """Be the twin: fork what is asked for until the main process ends, and die with it."""
    try:
        die_with(parent)
        # SGLang's processes report a failure to their parent; that is this one, and meant is its parent.
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(parent, signal.SIGQUIT))
        importlib.import_module("setproctitle").setproctitle(TITLE)
        real, twin = spawn.prepare, os.getpid()

        def prepare(data: dict[str, Any]) -> None:
            die_with(twin)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            _replace_environment(data.pop("environ"))
            real(data)

        spawn.prepare = prepare
        forkserver.main(listener, alive_r, [])
    finally:
        os._exit(0)


def _replace_environment(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, at once if it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
