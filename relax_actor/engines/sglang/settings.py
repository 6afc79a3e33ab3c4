"""How an SGLang server is started: its command line and environment, out of what the run asks for. Pure.

Nothing here is tuned for one machine: what a machine lacks comes by `args`, which are last and so win.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from relax_actor.node import preload

UNINIT = "uninit"
"""What a server calls weights that are no policy's."""

SPARE_TOKENS = 8
"""SGLang's context is by so much longer than ours: it keeps a few tokens of every request for itself."""

QUICK_START = Path(__file__).with_name("quick_start")
"""The folder that SGLang's interpreter runs for a quick start."""

MEETING_S = 600
"""How long nodes wait for one another, and for a collective; torch's own choice with NCCL."""

CPU_KV_TOKENS = 16_384
"""What its cache holds on a CPU, where models are small and memory is the run's."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server serves, and on what."""

    model: str
    """A Hugging Face model folder; its weights are not read."""
    python: str
    """The interpreter that SGLang is installed for."""
    context_tokens: int
    """Of prompt and response together."""
    slots: int
    """Requests in flight at once."""
    seed: int = 0
    dtype: str = "bfloat16"
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES is to have them; empty is the CPU."""
    tp: int = 1
    """Of all nodes together."""
    nodes: int = 1
    node: int = 0
    """Which of them it is; the first one alone answers."""
    meeting: str = ""
    """Address and port where the nodes meet, in the first one; see `meeting_address`."""
    address: str = ""
    """Of its host, as the other nodes reach it."""
    mem_fraction: float = 0.0
    """Share of a GPU's memory for weights and cache; 0 is SGLang's own choice."""
    deterministic: bool = False
    memory_saver: bool = False
    routed_experts: bool = False
    reads_text: bool = False
    """Whether it has the tokenizer, to find stop strings."""
    stream_tokens: int = 0
    """Tokens after which a request in flight is heard of; 0 hears of it at its end."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    keep_fds: tuple[int, ...] = ()
    """Descriptors that it inherits, such as the lock of its GPUs."""
    quick_start: bool = True
    """By `relax_actor.engines.sglang.quick_start`, which imports once and less."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens on loopback: nobody else may choose."""

    http: int
    nccl: int


def meeting_address(host: str, port: int) -> str:
    """Return a place to meet as SGLang takes it, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def command(settings: ServerSettings, ports: Ports) -> list[str]:
    """Return the words of the command line."""
    words = [
        settings.python,
        *((str(QUICK_START),) if settings.quick_start else ("-m", "sglang.launch_server")),
    ]
    words += ["--model-path", settings.model, "--host", "127.0.0.1"]
    words += ["--port", str(ports.http), "--nccl-port", str(ports.nccl)]
    words += ["--tp-size", str(settings.tp), "--dtype", settings.dtype]
    words += ["--random-seed", str(settings.seed % 2**31)]
    words += ["--load-format", "dummy", "--weight-version", UNINIT]
    words += ["--skip-server-warmup", "--enable-metrics"]
    words += ["--context-length", str(settings.context_tokens + SPARE_TOKENS)]
    words += ["--max-running-requests", str(settings.slots + 1)]  # one is for asking whether it lives
    return [*words, *_nodes(settings), *_switches(settings), *_device(settings), *settings.args]


def environment(settings: ServerSettings, own: Mapping[str, str], *, own_python: str) -> dict[str, str]:
    """Return the server's environment.

    Args:
        settings: of the server.
        own: of this process; the mark by which a dead actor's processes are found is in it.
        own_python: this process' interpreter; another one is not told our module path.
    """
    # Compiling SGLang's modules anew at each start costs more than all else of it.
    kept_back = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"} if settings.quick_start else {"PYTHONPATH"}
    passed = {name: value for name, value in own.items() if name not in kept_back}
    if settings.python == own_python and "PYTHONPATH" in own:
        passed["PYTHONPATH"] = own["PYTHONPATH"]
    return {
        **passed,
        **_constant(),
        **_threadless(settings),
        **_devices(settings),
        **_host(settings),
        **settings.env,
    }


def _nodes(settings: ServerSettings) -> list[str]:
    if settings.nodes == 1:
        return []
    words = ["--nnodes", str(settings.nodes), "--node-rank", str(settings.node)]
    return [*words, "--dist-init-addr", settings.meeting, "--dist-timeout", str(MEETING_S)]


def _switches(settings: ServerSettings) -> list[str]:
    words: list[str] = []
    if settings.mem_fraction:
        words += ["--mem-fraction-static", f"{settings.mem_fraction:g}"]
    if settings.stream_tokens:
        words += ["--incremental-streaming-output", "--stream-interval", str(settings.stream_tokens)]
    for wanted, word in (
        (settings.deterministic, "--enable-deterministic-inference"),
        (settings.memory_saver, "--enable-memory-saver"),
        (settings.routed_experts, "--enable-return-routed-experts"),
        (not settings.reads_text, "--skip-tokenizer-init"),
    ):
        words += [word] if wanted else []
    return words


def _device(settings: ServerSettings) -> list[str]:
    if settings.gpus:
        # Both use NVLink multicast, which hosts of virtual machines do not have.
        multicast = ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        return multicast if settings.tp > 1 else []
    words = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    # Without `sleep-on-idle` a server that has nothing to do takes a core from those that have.
    words += ["--grammar-backend", "none", "--disable-cuda-graph", "--sleep-on-idle"]
    return [*words, "--max-total-tokens", str(CPU_KV_TOKENS), "--mem-fraction-static", "0.1"]


def _constant() -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",  # with its 5 s a pooled connection is closed under a request
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by `SPARE_TOKENS`, which no position reaches
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",
        "SGLANG_NUMA_BIND_V2": "0",  # a process binds itself, so that it need not be a new one
        "SPT_NOENV": "1",  # a process that names itself leaves its environment alone, with our mark in it
        "no_proxy": "*",
        "NO_PROXY": "*",
    }


def _host(settings: ServerSettings) -> dict[str, str]:
    """Return what SGLang would otherwise take from the way to the internet, if there is one."""
    return {"SGLANG_HOST_IP": settings.address} if settings.nodes > 1 and settings.address else {}


def _threadless(settings: ServerSettings) -> dict[str, str]:
    """Return what keeps imported libraries from starting threads, which a quick start's fork cannot have."""
    names = ("OPENBLAS_NUM_THREADS", "JE_ARROW_MALLOC_CONF") if settings.quick_start else ()
    return {name: preload.ENVIRONMENT[name] for name in names}


def _devices(settings: ServerSettings) -> dict[str, str]:
    if settings.gpus:
        return {"CUDA_VISIBLE_DEVICES": ",".join(settings.gpus)}
    cores = "|".join(map(str, range(settings.tp)))
    one = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**one, "SGLANG_CPU_OMP_THREADS_BIND": cores} if settings.tp > 1 else one
