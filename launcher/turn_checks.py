"""Whether trainer and rollouts can take turns on their GPUs, by the configuration alone."""

from collections.abc import Callable, Iterator

from relax_actor.config import Config
from relax_actor.errors import ConfigError


def turns(config: Config, where: Callable[[str], str]) -> Iterator[ConfigError]:
    """Yield what `run.colocate` does not go with."""
    if not config.run.colocate:
        return
    option = where("run.colocate")
    if config.run.max_staleness:
        fact = f"has nothing sampled while training, but run.max_staleness is {config.run.max_staleness}"
        yield ConfigError(option, fact, "use run.max_staleness=0 and run.mode=async_on_policy")
    if config.train.stream_micro_batches:
        fact = "has nothing sampled while training, but train.stream_micro_batches trains while it is sampled"
        yield ConfigError(option, fact, "do not stream")
    if config.rollout.spares:
        fact = f"leaves no GPU to spares, but rollout.spares is {config.rollout.spares}"
        yield ConfigError(option, fact, "use rollout.spares=0")
