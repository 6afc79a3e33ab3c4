"""The ledger's limits, out of a run's configuration."""

from relax_actor.config import Config
from relax_actor.transfer_queue.rules import LedgerConfig, PartialPolicy

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
        refill_limit=max(EMPTY_BATCHES, 2 * config.queue.max_refills) * config.groups_per_batch,
        filters_zero_variance=config.train.filter_groups == "zero_variance",
        surplus_groups=config.staleness_window - config.groups_per_batch * (config.run.max_staleness + 1),
        max_refills=config.queue.max_refills,
        trains_short_batches=config.queue.on_short_batch == "train",
    )
