"""Whether replicas can be spread over several hosts. Pure."""

from collections.abc import Callable, Iterator

from relax_actor.config import Config
from relax_actor.errors import ConfigError


def spread_problems(config: Config, where: Callable[[str], str]) -> Iterator[ConfigError]:
    """Yield what stands in the way, if they are to be.

    Args:
        config: of the run.
        where: what errors call an option.
    """
    rollout, option = config.rollout, where("rollout.hosts_per_replica")
    hosts = rollout.hosts_per_replica
    if rollout.tensor_parallel % hosts:
        fact = f"is {hosts}, which does not divide rollout.tensor_parallel, {rollout.tensor_parallel}"
        yield ConfigError(option, fact, "each host has as many GPUs of a replica")
    if hosts > 1 and rollout.spares:
        fact = f"is {hosts}, but rollout.spares is {rollout.spares}"
        yield ConfigError(option, fact, "a spare is a server on one host; leave rollout.spares out")
    if hosts > 1 and config.run.colocate:
        fact = f"is {hosts}, but trainer and rollouts take turns (run.colocate)"
        yield ConfigError(option, fact, "give each GPUs of its own, or use one host")
