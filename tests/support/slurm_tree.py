"""A supervision tree over all hosts of an allocation; run inside one by tests/slurm.

`python slurm_tree.py FOLDER`: starts a counter on each host, writes `ready.json` there once they answer, and
waits for the file `end`, for TERM, or to be killed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from sample_actors import Counter

from launcher.options import Launcher, LaunchOptions
from launcher.slurm_hosts import allocation, hosts_of, survey
from relax_actor.supervision.spec import Backoff, ChildSpec, SupervisorSpec
from relax_actor.supervision.supervisor import Supervisor


def main(folder: Path) -> None:
    """Run until told to end; then nothing is left."""
    given = allocation(os.environ)
    options = LaunchOptions(launcher=Launcher.SLURM, hosts=survey(given))
    hosts, address = hosts_of(options, given, folder, os.environ)
    spec = SupervisorSpec(
        id="root",
        backoff=Backoff(base_s=0.02, cap_s=0.1),
        children=tuple(ChildSpec(id=f"on-{host.name}", actor=Counter, hosts=(host.name,)) for host in hosts),
    )
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with Supervisor(spec, run_dir=folder, hosts=hosts, address=address) as tree:
        found = {}
        for host in hosts:
            ref = tree.ref(f"on-{host.name}", Counter)
            child = ref.ask(Counter.spawn_child).result()
            found[host.name] = {"pid": ref.ask(Counter.where).result()[0], "child": child}
        (folder / "ready.tmp").write_text(json.dumps({"run_id": tree.run_id, "actors": found}))
        (folder / "ready.tmp").rename(folder / "ready.json")
        while not ended and not (folder / "end").exists():
            time.sleep(0.05)
    (folder / "done").write_text(json.dumps(ended))


main(Path(sys.argv[1]))
