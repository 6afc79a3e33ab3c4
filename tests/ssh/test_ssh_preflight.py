"""The preflight table over real sshds: every host that lacks something is in it, with what helps."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import ssh_hosts

from launcher.hosts import HostEntry
from launcher.options import Launcher, LaunchOptions, RemoteOptions
from launcher.preflight import Wish, examine
from launcher.preflight_table import render_examined, verdicts
from launcher.verdicts import Level
from relax_actor.config import Config, DataConfig, ModelConfig

pytestmark = pytest.mark.timeout(240)


@dataclass
class Doctor:
    """Asks servers."""

    servers: ssh_hosts.Servers
    python: Path
    folder: Path

    def options(self, *entries: HostEntry, ssh: tuple[str, ...] = (), **remote: object) -> LaunchOptions:
        return LaunchOptions(
            launcher=Launcher.SSH,
            hosts=entries,
            ssh=self.servers.options(*ssh, connect_timeout_s=20),
            remote=msgspec.structs.replace(
                RemoteOptions(python=str(self.python), workdir=str(self.folder)), **remote
            ),
        )

    def table(self, options: LaunchOptions, config: Config | None = None, *, is_full: bool = True):
        wish = Wish(options=options, config=config, folder=self.folder / "run", is_full=is_full)
        examined = examine(wish)
        table = verdicts(examined)
        print(render_examined(examined, table))  # noqa: T201 - for whoever looks why it failed
        return examined, table

    def faults(self, *arguments, **words):
        _, table = self.table(*arguments, **words)
        return [(each.check, each.hosts, each.fact) for each in table if each.level is Level.FAILURE]


@pytest.fixture
def doctor(servers, python, tmp_path):
    return Doctor(servers, python, tmp_path)


def test_hosts_answer_whatever_their_shells_say(doctor, servers, pair, tmp_path):
    """A login shell that greets and complains is noise, and no more."""
    noisy = servers.start('ForceCommand echo "Welcome!"; echo oops >&2; eval "$SSH_ORIGINAL_COMMAND"')
    hosts = [*pair, noisy]
    examined, table = doctor.table(doctor.options(*map(servers.entry, hosts)))
    assert list(examined.facts) == [each.address for each in hosts]
    assert (table[0].check, table[0].level, table[0].fact) == ("ssh", Level.OK, "3 hosts answered")
    assert not [each for each in table if each.level is Level.FAILURE]
    assert all(facts.is_shared for facts in examined.facts.values())
    assert not list(tmp_path.glob(".relax-actor-*"))


def test_every_host_that_cannot_be_used_is_in_one_table(doctor, servers, pair, tmp_path):
    gone = servers.start()
    gone.stop()
    quits = servers.start("ForceCommand echo See you tomorrow")
    unknown = servers.start()
    known = tmp_path / "known"
    lines = servers.known_hosts.read_text().splitlines()
    known.write_text("\n".join(line for line in lines if f"[{unknown.address}]" not in line))
    entries = [
        *map(servers.entry, (pair[0], gone, quits, unknown)),
        HostEntry(name="no-such.invalid", slots=1),
    ]
    options = doctor.options(*entries, ssh=(f"UserKnownHostsFile={known}",))
    faults = doctor.faults(options)
    assert [(check, hosts) for check, hosts, _ in faults] == [
        ("ssh", (gone.address,)),
        ("ssh", (quits.address,)),
        ("ssh", (unknown.address,)),
        ("ssh", ("no-such.invalid",)),
    ]
    words = ["nobody listens", "See you tomorrow", "its host key is not known", "its name is not known"]
    assert all(word in fact for word, (_, _, fact) in zip(words, faults, strict=True))


@pytest.mark.parametrize(
    ("remote", "words"),
    [
        ({"python": "/usr/bin/python3"}, "relax-actor is not installed for that interpreter"),
        ({"python": "/no such/python"}, "the Python interpreter is not there"),
        ({"workdir": "/no/such/folder"}, "the working directory is not there"),
        ({"setup": "echo before; false"}, "the setup script failed"),
    ],
    ids=["module", "interpreter", "folder", "setup"],
)
def test_what_is_missing_there_is_named(doctor, servers, pair, remote, words):
    [(check, hosts, fact)] = doctor.faults(doctor.options(servers.entry(pair[0]), **remote))
    assert (check, hosts) == ("ssh", (pair[0].address,))
    assert words in fact


def test_another_version_is_a_failure(doctor, servers, pair, monkeypatch):
    monkeypatch.setattr("launcher.probes.__version__", "99.0")
    [(_, _, fact)] = doctor.faults(doctor.options(servers.entry(pair[0])))
    assert fact.startswith("it has another version of relax-actor\n")


def test_other_code_under_the_same_version_is_a_failure(doctor, servers, pair, monkeypatch):
    monkeypatch.setattr("relax_actor.survey.software.code_digest", lambda: "0123456789ab")
    [(check, _, fact)] = doctor.faults(doctor.options(servers.entry(pair[0])))
    assert check == "software"
    assert "relax-actor's files are others" in fact


def test_a_model_that_one_host_cannot_read_or_has_otherwise(doctor, servers, pair, tmp_path):
    """The hosts have folders of their own at one path."""
    if os.geteuid() != 0 or _run(*APART, "true"):
        pytest.skip("needs the right to mount")
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "weights").write_text("one")
    rows.write_text("{}\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights").write_text("two")
    without = servers.start(before=(*APART, f'mount -t tmpfs tmpfs {model} && exec "$@"', "sh"))
    differs = servers.start(before=(*APART, f'mount --bind {other} {model} && exec "$@"', "sh"))
    config = Config(model=ModelConfig(path=str(model)), data=DataConfig(path=str(rows)))
    options = doctor.options(*map(servers.entry, (pair[0], without, differs)))
    found = [(hosts, fact) for check, hosts, fact in doctor.faults(options, config) if check == "files"]
    assert found == [
        ((without.address,), f"model.path cannot be read: the folder is empty: {model}"),
        ((differs.address,), f"model.path is another one than on {pair[0].address}"),
    ]


APART = ("unshare", "-m", "sh", "-c")


def _run(*command):
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_a_host_that_takes_few_sessions_at_once_is_asked_again(doctor, servers, monkeypatch):
    monkeypatch.setattr("launcher.probing.RETRY_S", 60.0)  # one at a time, and each may be slow
    few = servers.start("MaxStartups 1:100:1")
    entries = [servers.entry(few), *(servers.entry(few, address=f"127.0.1.{n}") for n in range(3))]
    named = [
        msgspec.structs.replace(entry, name=f"alias{index}", address=entry.address or few.address)
        for index, entry in enumerate(entries)
    ]
    options = doctor.options(
        *named, ssh=(f"HostName={few.address}", "HostKeyAlias=any", "StrictHostKeyChecking=no")
    )
    examined, _ = doctor.table(options, is_full=False)
    assert len(examined.facts) == 4


def test_the_command_says_it_all_and_leaves_with_3(servers, pair, python, tmp_path):
    lines = [f"{each.address} slots=1 port={each.port}\n" for each in pair]
    (tmp_path / "hostfile").write_text("".join(lines) + "127.0.0.99 port=1 slots=1\n")
    command = [
        *(sys.executable, "-m", "relax_actor", "doctor", "-H", str(tmp_path / "hostfile"), "--quick"),
        *("--remote-python", str(python), "--identity", str(servers.key)),
        *(f"--ssh-opt={option}" for option in servers.options().options),
    ]
    here = {**os.environ, "PYTHONPATH": str(ssh_hosts.ROOT)}  # the code that `python` runs on the hosts
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120, env=here
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[0].startswith("preflight of 3 hosts, ")
    assert "FAIL  ssh" in done.stdout
    assert "  ok    network" in done.stdout
    assert "found 1 failure on 127.0.0.99" in done.stderr, done.stdout
