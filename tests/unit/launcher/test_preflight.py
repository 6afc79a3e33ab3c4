"""Who is asked before a launch, and how what they answer becomes a table. Nobody is asked here."""

import msgspec
import pytest

from launcher.hostplan import HostsPlan, PlannedHost
from launcher.hosts import HostEntry, HostRole
from launcher.judging_hosts import usable_gpus
from launcher.options import Launcher, LaunchOptions, NetworkOptions, Preflight, Rehearsal, SlurmOptions
from launcher.placing import first_host
from launcher.plan import make_plan
from launcher.preflight import Examined, Wish, is_wanted
from launcher.preflight_table import verdicts
from launcher.probing import Surveyed
from launcher.slurm_words import SlurmError
from launcher.ssh_causes import SshCause, SshError
from launcher.verdicts import Level
from relax_actor.survey.records import Facts, Gpu, Interface

NAMED = (HostEntry(name="a", slots=1), HostEntry(name="b", slots=2, role=HostRole.ROLLOUT))
UNNAMED = (HostEntry(name="a"),)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({}, False),
        ({"preflight": Preflight.FULL}, True),
        ({"launcher": Launcher.SSH, "hosts": NAMED}, True),
        ({"launcher": Launcher.SSH, "hosts": NAMED, "preflight": Preflight.OFF}, False),
        ({"launcher": Launcher.SSH, "hosts": UNNAMED, "preflight": Preflight.OFF}, True),
        ({"launcher": Launcher.SSH, "hosts": NAMED, "rehearsal": Rehearsal.LOCAL}, False),
        ({"preflight": Preflight.OFF, "rehearsal": Rehearsal.REMOTE}, True),
        ({"launcher": Launcher.SLURM, "slurm": SlurmOptions(submit=True)}, False),
    ],
)
def test_hosts_are_asked_where_there_is_something_to_ask(options, answer):
    assert is_wanted(LaunchOptions(**options)) is answer


def test_the_first_host_is_known_before_anybody_is_asked():
    assert first_host(NAMED) == "a"
    assert first_host(NAMED[1:]) == ""


def test_gpus_are_those_that_the_environment_leaves():
    gpus = (Gpu(index="0"), Gpu(index="1"))
    assert usable_gpus(Facts(gpus=gpus)) == ("0", "1")
    assert usable_gpus(Facts(gpus=gpus, visible=("GPU-a",))) == ("GPU-a",)
    assert usable_gpus(Facts(visible=("0",))) == ()


def examined(tmp_path, launcher, **fields):
    options = LaunchOptions(launcher=launcher, hosts=NAMED, network=NetworkOptions(interface="eth0"))
    return Examined(wish=Wish(options=options, folder=tmp_path), surveyed=Surveyed(), **fields)


def test_who_did_not_answer_comes_first(tmp_path):
    slurm = {"a": SlurmError("srun to a", "srun: error: Invalid partition name specified: x")}
    [line] = verdicts(examined(tmp_path, Launcher.SLURM, refusals=slurm))
    assert (line.check, line.level, line.hosts) == ("srun", Level.FAILURE, ("a",))
    assert "--partition" in line.hint
    ssh = {"a": SshError("a", SshCause.KEY, "Permission denied"), "b": SshError("b", SshCause.NAME, "")}
    first, second = verdicts(examined(tmp_path, Launcher.SSH, refusals=ssh))
    assert first.fact == "it accepts none of your keys\nPermission denied"
    assert second.fact == "its name is not known here"


def test_what_a_run_needs_of_each_host_is_in_its_plan(tmp_path, config, monkeypatch):
    monkeypatch.setattr("relax_actor.survey.software.code_digest", lambda: "c0de")
    eth0 = (Interface(name="eth0", is_up=True, addresses=("10.0.0.1",)),)
    facts = Facts(code="c0de", disk_bytes=1 << 40, interfaces=eth0, gpus=(Gpu(index="0"),), driver="1")
    hosts = tuple(
        PlannedHost(
            name=name,
            gpus=("1",),
            actors=(),
            actor_gpus={"rollout/0": ("1",)},
            spare_rollouts=0,
            memory_bytes=0,
            shm_bytes=5,
        )
        for name in ("a",)
    )
    plan = make_plan(config, rows=1)
    plan = msgspec.structs.replace(plan, hosts=HostsPlan(hosts=hosts))
    table = verdicts(examined(tmp_path, Launcher.SSH, facts={"a": facts, "b": facts}), plan)
    assert (table[0].check, table[0].fact) == ("ssh", "2 hosts answered")
    faults = {each.check: (each.hosts, each.fact) for each in table if each.level is Level.FAILURE}
    assert faults == {
        "GPUs": (("a",), "has no GPU 1; there are 0"),
        "shared memory": (("a",), "has 0 B free, the run needs 5 B"),
    }
