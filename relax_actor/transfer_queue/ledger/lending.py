"""Prompts on loan to rollouts."""

from collections.abc import Mapping

from relax_actor.ids import GroupId, Holder, PolicyVersion
from relax_actor.protocol import PromptLease
from relax_actor.transfer_queue.events import PromptLeased
from relax_actor.transfer_queue.ledger.groups import RowState
from relax_actor.transfer_queue.ledger.sharing import Shares
from relax_actor.transfer_queue.ledger.taking import Taker

NOBODY: Mapping[Holder, int] = {}


class PromptLender(Taker):
    """A ledger as a rollout that asks for prompts sees it."""

    @property
    def has_prompts(self) -> bool:
        """Whether there are samples that any rollout may take."""
        return None in self._state.index.waiting

    def lease_prompts(
        self,
        holder: Holder,
        version: PolicyVersion,
        max_samples: int,
        now: float,
        others: Mapping[Holder, int] = NOBODY,
    ) -> list[PromptLease]:
        """Lend samples to a rollout that has installed the newest policy version (I4).

        Lowest groups first. A group is sampled by one rollout at a time; where `max_samples` ends within a
        group, the rest stays reserved for the same rollout until it has put what it got. Beyond that a
        rollout gets its share of what there is; see `sharing.py`.

        Args:
            holder: the rollout.
            version: what it has installed.
            max_samples: how many it can take.
            now: seconds of the queue's clock.
            others: rollouts that ask, too, and how many samples each can take.
        """
        if not self._admits(holder, now) or not self._is_newest(version):
            return []
        if others and self.has_prompts:
            return self._lease_share(holder, version, max_samples, others)
        leases: list[PromptLease] = []
        while max_samples > 0 and (group_id := self._state.index.next_waiting(holder)) is not None:
            leases.append(self._lease_prompt(holder, group_id, version, max_samples))
            max_samples -= len(leases[-1].missing)
        return leases

    def _lease_share(
        self, holder: Holder, version: PolicyVersion, max_samples: int, others: Mapping[Holder, int]
    ) -> list[PromptLease]:
        """Lend what is reserved for this rollout, and of all else its share."""
        own = self._state.index.waiting.get(holder)
        reserved = [] if own is None else own.smallest(max_samples)
        leases: list[PromptLease] = []
        for group_id in reserved:
            if max_samples > 0:
                leases.append(self._lease_prompt(holder, group_id, version, max_samples))
                max_samples -= len(leases[-1].missing)
        for group_id in self._share(holder, version, max_samples, others) if max_samples > 0 else ():
            leases.append(self._lease_prompt(holder, group_id, version, max_samples))
            max_samples -= len(leases[-1].missing)
        return leases

    def _share(
        self, holder: Holder, version: PolicyVersion, max_samples: int, others: Mapping[Holder, int]
    ) -> list[GroupId]:
        rooms = {holder: max_samples, **others}
        plenty = sum(rooms.values()) + len(rooms) * self.config.samples_per_prompt  # some rows are reserved
        is_plenty = self._state.rows[RowState.WAITING] >= plenty
        loads = None if is_plenty else {each: self._state.leases.running(each.name) for each in rooms}
        shares = Shares(rooms, loads, me=holder)
        mine = []
        for group_id in self._state.index.waiting[None].ascending():
            if shares.is_over:
                break
            group = self._state.groups[group_id]
            favourite = group.sampled_by if group.sampled_at == version else None
            if shares.is_mine(group.count(RowState.WAITING), favourite):
                mine.append(group_id)
        return mine

    def _lease_prompt(
        self, holder: Holder, group_id: GroupId, version: PolicyVersion, max_samples: int
    ) -> PromptLease:
        group, lease_id = self._state.groups[group_id], self._state.leases.next_id
        rows = tuple(group.indices(RowState.WAITING)[:max_samples])
        self._emit(
            PromptLeased(
                lease_id=lease_id,
                holder=holder,
                group_id=group_id,
                rows=rows,
                version=version,
                since_s=self._now_s,
                until_s=self._now_s + self.config.prompt_lease_s,
                group_until_s=self._now_s + self.config.sampling_deadline_s,
            )
        )
        chunks = (group.rows[index].chunk for index in rows)
        return PromptLease(
            lease_id=lease_id,
            group=group.prompt,
            missing=rows,
            policy_version=version,
            chunks=tuple(chunk for chunk in chunks if chunk is not None),
        )
