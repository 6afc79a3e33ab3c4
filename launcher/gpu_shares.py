"""How many GPUs trainer and rollouts get, and how many rollouts that makes. Pure."""

from launcher.options import GpuOptions, Layout
from launcher.placing import TRAINER_GPUS, gpus_each
from relax_actor.config import Config
from relax_actor.errors import ConfigError


def replicas(config: Config, asked: GpuOptions, *, given: str = "") -> int:
    """Return how many rollouts a run has.

    Args:
        config: the run's.
        asked: GPUs by number.
        given: what an error calls `rollout.replicas` where somebody set it; empty otherwise.

    Raises:
        ConfigError: the numbers do not go together.
    """
    _check_trainer(config, asked)
    option, gpus = _for_rollouts(asked)
    if not gpus:
        return config.rollout.replicas
    each = gpus_each(config)
    if gpus % each:
        fact = f"leaves {gpus} GPUs to rollouts, which take {each} each (rollout.tensor_parallel)"
        raise ConfigError(option, fact, f"leave them a multiple of {each}")
    made = gpus // each
    if given and made != config.rollout.replicas:
        fact = f"makes {made} rollouts, but `{given}` is {config.rollout.replicas}"
        raise ConfigError(option, fact, "leave one of the two out")
    return made


def _check_trainer(config: Config, asked: GpuOptions) -> None:
    if asked.train > TRAINER_GPUS:
        fact = f"is {asked.train}, but backend `{config.train.backend}` trains on one GPU"
        raise ConfigError("--train-gpus", fact, "leave it out")


def _for_rollouts(asked: GpuOptions) -> tuple[str, int]:
    """Return the option that says how many GPUs rollouts have, and how many; 0 where none does.

    Raises:
        ConfigError: nothing is left to them.
    """
    if asked.rollout or not asked.total:
        return "--rollout-gpus", asked.rollout
    left = asked.total if asked.layout is Layout.COLOCATE else asked.total - TRAINER_GPUS
    if left < 1:
        hint = "--mode colocate has both on the same GPUs"
        raise ConfigError("--gpus", f"is {asked.total}, which leaves none to rollouts", hint)
    return "--gpus", left
