"""From the words of a launch to what will be started: settings, hosts, placement and plan. Starts nothing."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.asking import ask
from launcher.checks import check_config
from launcher.errors import RefusedError
from launcher.gpu_shares import replicas
from launcher.hosts import HostEntry
from launcher.options import GpuOptions, Launcher, LaunchOptions, Order
from launcher.placing import PlacementError, needs_of, place, rooms
from launcher.plan import Plan, make_plan
from launcher.settings import Settings, read
from launcher.slurm_hosts import in_allocation
from launcher.stalls import Room
from relax_actor.data.dataset import load_dataset
from relax_actor.devices import host_gpus
from relax_actor.errors import ConfigError
from relax_actor.placement import Placement
from relax_actor.supervision.hosts import LOCAL
from relax_actor.visible import visible_gpus

AskHosts = Callable[[Settings, LaunchOptions], Mapping[str, Sequence[str]]]
"""Returns the GPUs of the hosts, by label; raises what keeps a launch from going ahead."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that may go ahead."""

    settings: Settings
    options: LaunchOptions
    placement: Placement | None  # None: nobody said anything of hosts or GPUs
    plan: Plan

    @property
    def is_alone(self) -> bool:
        """Whether this host is the only one."""
        return self.options.launcher is Launcher.LOCAL


def prepare(
    config_path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, str | None],
    words: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    rehearse: bool = False,
    ask_hosts: AskHosts | None = None,
) -> Prepared:
    """Read, check, place and plan a launch.

    Args:
        config_path: see `settings.read`, as for the next two.
        overrides: the same.
        flags: the same.
        words: about hosts; see `asking.ask`.
        environ: of this process.
        rehearse: whether this host need not have the GPUs that are asked for.
        ask_hosts: asks them for their GPUs; None: nobody is asked.

    Raises:
        RefusedError: what is wrong, with settings and with hosts at once.
        SlurmError: the hosts of an allocation cannot be asked.
        SelectionError: a host was named that is not in the allocation.
    """
    settings, options = _both(config_path, overrides, flags, words, environ)
    options = in_allocation(options, environ, rehearse=rehearse)
    settings = _with_replicas(settings, options.gpus)
    problems = check_config(settings.config, settings.where)
    if problems:
        raise RefusedError(problems)
    found = ask_hosts(settings, options) if ask_hosts is not None else {}
    there = _rooms(options, environ, found, rehearse=rehearse)
    placement = _placed(settings, options, there)
    said = bool(options.hosts) or options.gpus != GpuOptions()
    return Prepared(
        settings=settings,
        options=options,
        placement=placement if said or options.launcher is not Launcher.LOCAL else None,
        plan=make_plan(
            settings.config,
            rows=len(load_dataset(settings.config.data).rows),
            options=options,
            rooms=there,
            placement=placement,
        ),
    )


def _both(
    config_path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, str | None],
    words: Mapping[str, Any],
    environ: Mapping[str, str],
) -> tuple[Settings, LaunchOptions]:
    problems: list[ConfigError] = []
    settings = options = None
    try:
        settings = read(config_path, overrides, flags)
    except RefusedError as error:
        problems += error.problems
    try:
        options = ask(words, environ)
    except RefusedError as error:
        problems += error.problems
    if settings is None or options is None:
        raise RefusedError(problems)
    return settings, options


def _with_replicas(settings: Settings, asked: GpuOptions) -> Settings:
    """Have as many rollouts as there are GPUs for them, where somebody said how many."""
    config, option = settings.config, "rollout.replicas"
    given = settings.where(option) if ("rollout", "replicas") in settings.given else ""
    made = replicas(config, asked, given=given)
    rollout = msgspec.structs.replace(config.rollout, replicas=made)
    return msgspec.structs.replace(settings, config=msgspec.structs.replace(config, rollout=rollout))


def _rooms(
    options: LaunchOptions,
    environ: Mapping[str, str],
    found: Mapping[str, Sequence[str]],
    *,
    rehearse: bool,
) -> tuple[Room, ...]:
    """Return what is known of the hosts.

    Args:
        options: name them.
        environ: of this process.
        found: the GPUs of those that were asked.
        rehearse: whether this host need not have the GPUs that are asked for.
    """
    if options.launcher is not Launcher.LOCAL:
        return rooms(options.hosts, found)
    here = options.hosts[0] if options.hosts else HostEntry(name=LOCAL.name)
    here = msgspec.structs.replace(here, name=LOCAL.name)
    gpus = gpus_here(environ)
    is_elsewhere = rehearse and not gpus and options.gpus != GpuOptions()
    return rooms([here], {} if is_elsewhere else {here.label: gpus})


def gpus_here(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs of this host by the names that CUDA_VISIBLE_DEVICES has for them."""
    count = host_gpus(environ)
    named = visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    return tuple(map(str, range(count))) if named is None else named[:count]


def _placed(settings: Settings, options: LaunchOptions, there: Sequence[Room]) -> Placement | None:
    if not there:  # an allocation, which is asked when the run starts
        return None
    alone = options.launcher is Launcher.LOCAL
    order = Order.PACK if alone else options.gpus.order
    needs = needs_of(settings.config, there, options.gpus, shares=alone and options.gpus == GpuOptions())
    try:
        return place(msgspec.structs.replace(needs, order=order), there)
    except PlacementError as error:
        raise RefusedError([error]) from None
