"""The ledger's limits, out of a run's configuration."""

from relax_actor.config import Config
from relax_actor.transfer_queue.records import LedgerConfig, PartialPolicy

EMPTY_BATCHES = 20
"""Batches' worth of groups that may be dropped in a row before the run is given up as hopeless."""


def ledger_config(config: Config) -> LedgerConfig:
    """Take the ledger's limits out of a run's configuration."""
    return LedgerConfig(
        groups_per_batch=config.groups_per_batch,
        samples_per_prompt=config.rollout.samples_per_prompt,
        max_staleness=config.run.max_staleness,
        total_groups=config.run.steps * config.groups_per_batch,
        min_valid_samples=config.queue.min_valid_samples,
        max_attempts=config.queue.max_attempts,
        prompt_lease_s=config.rollout.lease_s,
        reward_lease_s=config.reward.lease_s,
        batch_lease_s=config.train.lease_s,
        group_deadline_s=config.queue.group_deadline_s,
        partial_timeout_s=config.queue.partial_rollout_timeout_s,
        on_partial_timeout=PartialPolicy(config.queue.on_partial_timeout),
        refill_limit=EMPTY_BATCHES * config.groups_per_batch,
    )
