"""A replica that is killed now and then: how soon the next one is current, what the trainer notices."""

import os
import signal
import statistics
import time
from collections import defaultdict
from typing import Any, NamedTuple

from common import spread
from gpu_bench import BenchReplica, BenchTrainer

from relax_actor import Supervisor
from relax_actor.errors import RelaxError


class Storm(NamedTuple):
    """How long it is calm, then stormy, and how often something is killed then."""

    calm_s: float
    storm_s: float
    kill_every_s: float


def storm(tree: Supervisor, plan: Storm) -> dict[str, Any]:
    """Train for a while with the replica following, then as long with the replica killed now and then."""
    trainer = tree.ref("trainer", BenchTrainer).within(plan.calm_s + plan.storm_s)
    replica = tree.ref("replica", BenchReplica).within(10)
    replica.ask(BenchReplica.follow).result()
    pid = tree.pid("trainer")
    calm = trainer.ask(BenchTrainer.train, plan.calm_s).result()
    calm_installs = replica.ask(BenchReplica.followed).result()
    training = trainer.ask(BenchTrainer.train, plan.storm_s)
    started = time.monotonic()
    kills = []
    while (next_s := started + plan.kill_every_s * (len(kills) + 1)) < started + plan.storm_s:
        time.sleep(max(0.0, next_s - time.monotonic()))
        kills.append(kill(tree, replica, until_s=next_s + 0.9 * plan.kill_every_s))
    wild = training.result()
    return {
        "calm_seconds": plan.calm_s,
        "storm_seconds": plan.storm_s,
        "calm_step_s": spread(calm),
        "storm_step_s": spread(wild),
        "change_frac": round(statistics.median(wild) / statistics.median(calm) - 1, 5),
        "trainer_pid_unchanged": tree.pid("trainer") == pid,
        "installs_in_calm": len(calm_installs),
        "install_in_calm_s": spread([seconds for _, _, seconds, _ in calm_installs])
        if calm_installs
        else None,
        "kills": kills,
        "current_again_s": current_again(kills),
    }


def kill(tree: Supervisor, replica: Any, until_s: float) -> dict[str, Any]:
    """Kill the replica; return how soon its next incarnation has the current version, and by which route."""
    pid = tree.pid("replica")
    if pid is None:
        return {"failure": "there was no replica to kill"}
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    failure = "nothing was installed in time"
    while time.monotonic() < until_s:
        try:
            installs_ = replica.within(2).ask(BenchReplica.followed).result()
        except RelaxError as error:  # it is not there again
            failure = str(error)
        else:
            for version, route, seconds, at in installs_:
                if at > killed and not route.startswith("failed"):
                    again = {"current_again_s": round(at - killed, 4), "install_s": round(seconds, 4)}
                    return {**again, "route": route, "version": version}
                failure = route
        time.sleep(0.02)
    return {"failure": failure[:300]}


def current_again(kills: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of seconds from kill to current version, by route."""
    by_route = defaultdict(list)
    for row in kills:
        if "route" in row:
            by_route[row["route"]].append(row["current_again_s"])
    return {route: spread(values) for route, values in by_route.items()}
