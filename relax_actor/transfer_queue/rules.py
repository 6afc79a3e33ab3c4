"""The limits that a ledger decides by."""

from enum import StrEnum

import msgspec


class PartialPolicy(StrEnum):
    """What becomes of a group that is not sampled in time."""

    WAIT = "wait"  # nothing, up to the group's deadline
    DROP = "drop"
    FINISH = "finish"  # samples end with the tokens of their chunks; those without one are dropped


class LedgerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The limits a ledger decides by."""

    groups_per_batch: int
    samples_per_prompt: int
    max_staleness: int
    total_groups: int  # train groups the run needs: steps * groups_per_batch
    min_valid_samples: int
    max_attempts: int
    prompt_lease_s: float
    reward_lease_s: float
    batch_lease_s: float
    group_deadline_s: float
    refill_limit: int = 1000  # groups dropped since the last trained batch before the run is hopeless
    partial_timeout_s: float = 300.0  # from a group's first lease, where `on_partial_timeout` is not `wait`
    on_partial_timeout: PartialPolicy = PartialPolicy.WAIT
    filters_zero_variance: bool = False
    surplus_groups: int = 0  # sampled beyond what batches need
    max_refills: int = 3  # batches' worth of filtered groups that are replaced before a batch goes short
    trains_short_batches: bool = True  # else the step is skipped

    @property
    def sampling_deadline_s(self) -> float:
        """How long after its first lease a group is looked at: is it sampled?"""
        if self.on_partial_timeout is PartialPolicy.WAIT:
            return self.group_deadline_s
        return min(self.partial_timeout_s, self.group_deadline_s)

    @property
    def is_in_order(self) -> bool:
        """Whether each batch is always the same, whoever is done first: no group may be passed over."""
        return self.max_staleness == 0 and self.surplus_groups == 0

    @property
    def window(self) -> int:
        """Train groups that may be unfinished or untrained at once."""
        return self.groups_per_batch * (self.max_staleness + 1) + self.surplus_groups

    @property
    def max_filtered(self) -> int:
        """Groups filtered for one batch that are replaced; further ones are not."""
        return self.groups_per_batch * self.max_refills
