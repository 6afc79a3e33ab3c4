"""From exec of a fresh interpreter to "the engine is up": `python -m actors.cold ray --out FILE`.

Also what the engine's own processes hold and burn while idle, and how long the exit takes. The snippets are
run with `-c` and import nothing but the engine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from actors import procfs

SETTLE_S = 4.0
IDLE_S = 8.0
GONE_DEADLINE_S = 20.0

_RAY = """
import ray
ray.init(address="local", logging_level="warning"{options})
print("UP", flush=True)
input()
ray.shutdown()
"""

SNIPPETS = {
    "python": """
print("UP", flush=True)
input()
""",
    "raw": """
import msgpack, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("ipc://@relax-bench-cold")
print("UP", flush=True)
input()
""",
    # Up is: an actor is ready. It is removed again, so that what idles is the engine alone.
    "ours": """
from relax_actor import Actor, ChildSpec, Supervisor, SupervisorSpec
spec = SupervisorSpec(id="cold", children=(ChildSpec(id="first", actor=Actor),))
with Supervisor(spec) as tree:
    print("UP", flush=True)
    tree.remove_child("first")
    input()
""",
    "ray": _RAY.format(options=", include_dashboard=False"),
    "ray_default": _RAY.format(options=""),
    "xoscar": """
import asyncio, xoscar
async def main():
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=0)
    print("UP", flush=True)
    input()
    await pool.stop()
asyncio.run(main())
""",
    "monarch": """
import monarch.actor
monarch.actor.context()
monarch.actor.this_host()
print("UP", flush=True)
input()
""",
}


def main() -> None:
    """Measure one engine, in this interpreter's environment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=sorted(SNIPPETS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps({"version": "", "errors": {}, **measure(SNIPPETS[args.engine])}))


def measure(snippet: str) -> dict[str, Any]:
    """Start a snippet, let it idle, and let it end."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", snippet], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        _await_up(process)
        facts: dict[str, Any] = {"h_up_s": time.perf_counter() - started}
        time.sleep(SETTLE_S)
        own = procfs.descendants(process.pid)
        facts |= _idle(process.pid, own)
        left = time.perf_counter()
        process.communicate("\n")
        gone = procfs.wait_gone([process.pid, *own], left, GONE_DEADLINE_S)
        facts["h_exit_s"] = max(gone.values())
        facts["h_left"] = len(own) + 1 - len(gone)
    return facts


def _await_up(process: "subprocess.Popen[str]") -> None:
    for line in process.stdout or ():
        if line.startswith("UP"):
            return
    raise RuntimeError(f"the engine did not come up (exit code {process.wait()})")


def _idle(driver: int, own: list[int]) -> dict[str, Any]:
    """Return what the engine's own processes hold, and what they and its driver burn."""
    memory = [procfs.rss_pss_mib(pid) for pid in own]
    before, started = procfs.cpu_s([driver, *own]), time.perf_counter()
    time.sleep(IDLE_S)
    burnt_s = procfs.cpu_s([driver, *own]) - before
    return {
        "h_own_processes": len(own),
        "h_own_rss_mib": sum(rss for rss, _ in memory),
        "h_own_pss_mib": sum(pss for _, pss in memory),
        "h_driver_rss_mib": procfs.rss_pss_mib(driver)[0],
        "h_idle_cpu_pct": burnt_s / (time.perf_counter() - started) * 100,
    }


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
