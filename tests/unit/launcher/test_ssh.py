"""How hosts are reached through ssh: the command, the environment, the causes of failures."""

import os
import shlex
import subprocess
import sys

import pytest

from launcher import over_hosts, ssh
from launcher.errors import ExitCode
from launcher.hosts import HostEntry
from launcher.options import Launcher, LaunchOptions, NetworkOptions, RemoteOptions, SshOptions
from launcher.ssh_causes import Attempt, SshCause, SshError, explain
from relax_actor import network
from relax_actor.placement import Placement


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Take back what a launch sets in this process."""
    for name in ("no_proxy", "NO_PROXY", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def test_the_command_is_constant_and_the_users_options_go_first():
    entry = HostEntry(name="fd00::12", port=2222, user="me", address="fd00::12")
    options = SshOptions(port=22, identity="/keys/id", options=("ProxyJump=gate",), connect_timeout_s=7)
    assert shlex.join(ssh.prefix(entry, options)) == (
        "ssh -T -o BatchMode=yes -o ProxyJump=gate -o ConnectTimeout=7 -o ServerAliveInterval=5 "
        "-o ServerAliveCountMax=3 -o ControlMaster=no -o ClearAllForwardings=yes -o RemoteCommand=none "
        "-p 2222 -l me -i /keys/id fd00::12 -- exec"
    )
    assert ssh.prefix(HostEntry(name="node1"), SshOptions(port=2022))[-6:-3] == (
        "RemoteCommand=none",
        "-p",
        "2022",
    )


@pytest.mark.parametrize("path", ["/opt/my env/bin/python", "/a'b\"c/$HOME/`id`/;x", "/plain"])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_any_path_of_an_interpreter_passes_a_shell(path, shell):
    command = f"printf %s {ssh.quoted(path)}"
    assert subprocess.run([shell, "-c", command], capture_output=True, text=True, check=True).stdout == path


def test_a_home_folder_is_the_remote_ones():
    assert ssh.quoted("~/my env/bin/python") == "~/'my env/bin/python'"


def test_values_are_bytes_and_what_is_no_text_stays_as_it_is():
    remote = RemoteOptions(env=(("A", "é"), ("B", os.fsdecode(b"\xff\x00"[:1]))))
    assert ssh.environment(remote) == ((b"A", "é".encode()), (b"B", b"\xff"))


def options_of(*entries, **network_options):
    return LaunchOptions(
        launcher=Launcher.SSH,
        hosts=entries,
        remote=RemoteOptions(workdir="/work dir", env=(("KEY", "secret"),)),
        network=NetworkOptions(**network_options),
    )


def test_hosts_get_their_addresses_sessions_and_folders(tmp_path):
    here = HostEntry(name="localhost", slots=1)
    there = HostEntry(name="node1", address="127.0.0.9", interface="eth7")
    reached = over_hosts.hosts_of(options_of(here, there, interface="lo", ports=(20000, 20100)), tmp_path)
    local, remote = reached.hosts
    assert (local.name, local.prefix, dict(local.session.env)) == ("localhost", (), {b"KEY": b"secret"})
    assert (remote.address, remote.python) == ("127.0.0.9", sys.executable)
    assert remote.run_dir == str(tmp_path / "hosts" / "node1")
    assert dict(remote.session.env) == {b"KEY": b"secret", b"RELAX_ACTOR_PORTS": b"20000-20100"}
    assert (remote.session.workdir, remote.session.interface) == ("/work dir", "eth7")
    assert {"node1", "127.0.0.9", reached.address} <= set(remote.session.no_proxy)
    assert reached.address == "127.0.0.1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert "node1" in os.environ["no_proxy"]


def test_the_head_is_where_the_user_says_or_where_most_routes_begin(tmp_path):
    there = HostEntry(name="node1", address="127.0.0.9")
    assert over_hosts.hosts_of(options_of(there, master_addr="10.1.1.1"), tmp_path).address == "10.1.1.1"
    assert over_hosts.hosts_of(options_of(there), tmp_path).address == network.source_address("127.0.0.9")


def test_hosts_are_in_the_order_of_the_placement_and_only_ssh_makes_any(tmp_path):
    entries = [HostEntry(name=name, address="127.0.0.9") for name in ("a", "b", "c")]
    placement = Placement(hosts=("b", "a"), seats=())
    options = options_of(*entries)
    reached = over_hosts.reach(options, tmp_path, placement)
    assert [host.name for host in reached.hosts] == ["b", "a", "c"]
    assert over_hosts.reach(LaunchOptions(), tmp_path, placement).hosts == ()


def test_a_name_that_nobody_knows_is_told_with_what_helps():
    with pytest.raises(SshError, match=r"(?s)its name is not known here.*addr=10.0.0.2.*hint: use its IP"):
        over_hosts.address_of(HostEntry(name="nowhere.invalid"), SshOptions())


def test_without_ssh_a_name_is_what_it_is(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert over_hosts.address_of(HostEntry(name="127.0.0.7", port=1), SshOptions()) == "127.0.0.7"


SAID = [
    ("ssh: Could not resolve hostname x: Name or service not known", SshCause.NAME),
    ("ssh: connect to host x port 22: Connection refused", SshCause.REFUSED),
    ("ssh: connect to host x port 22: Connection timed out", SshCause.TIMEOUT),
    ("ssh: connect to host x port 22: No route to host", SshCause.ROUTE),
    ("me@x: Permission denied (publickey).", SshCause.KEY),
    ("Received disconnect from x port 22:2: Too many authentication failures", SshCause.KEY),
    ("WARNING: UNPROTECTED PRIVATE KEY FILE!\nme@x: Permission denied (publickey).", SshCause.IDENTITY),
    ("No ED25519 host key is known for x\nHost key verification failed.", SshCause.HOST_KEY_UNKNOWN),
    (
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
        SshCause.HOST_KEY_CHANGED,
    ),
    ("kex_exchange_identification: Connection closed by remote host", SshCause.RESET),
    ("Connection timed out during banner exchange", SshCause.RESET),
    ("Timeout, server x not responding.", SshCause.LOST),
    ("command-line: line 0: Bad configuration option: nosuch", SshCause.OPTION),
    ("/opt/python: No module named relax_actor", SshCause.NO_PACKAGE),
    ("bash: line 1: exec: /opt/python: cannot execute: required file not found", SshCause.NO_PYTHON),
    ("Segmentation fault", SshCause.UNKNOWN),
]


@pytest.mark.parametrize(("output", "cause"), SAID, ids=[cause.value for _, cause in SAID])
def test_a_cause_is_told_by_what_was_said(output, cause):
    error = explain(Attempt(host="node1", code=255, output=f"Welcome to node1\n{output}\n"))
    assert error.cause is cause
    assert str(error).startswith(f"node1: {error.fact}\n  ")
    assert "HOST" not in error.hint
    assert any(line in str(error) for line in output.splitlines())


@pytest.mark.parametrize(
    ("attempt", "cause"),
    [
        (Attempt(host="x", code=127, output="not here"), SshCause.NO_PYTHON),
        (Attempt(host="x", code=0, output="bye"), SshCause.SHELL_NOISE),
        (Attempt(host="x", code=None), SshCause.TIMEOUT),
        (Attempt(host="x", code=3), SshCause.UNKNOWN),
        (Attempt(host="x", code=255, answered=True), SshCause.LOST),
        (Attempt(host="x", code=0, answered=True), SshCause.UNKNOWN),
        (Attempt(host="x", refusal="workdir", fact="no such folder"), SshCause.WORKDIR),
        (Attempt(host="x", refusal="what comes later", fact="?"), SshCause.UNKNOWN),
    ],
)
def test_an_exit_code_counts_only_where_it_can_be_nobody_elses(attempt, cause):
    assert explain(attempt).cause is cause


def test_every_cause_has_its_fact_and_hint():
    for cause in SshCause:
        assert SshError("node1", cause, "").hint
        assert str(SshError("node1", cause, "")).count("\n\nhint: ") == 1


JOINED = {"kind": "host_joined", "host": "node-1"}
FAILED = {"kind": "host_not_reached", "host": "node-1", "code": 255, "output": "Connection refused"}


def test_only_the_last_word_on_a_host_is_told():
    options = LaunchOptions(launcher=Launcher.SSH, hosts=(HostEntry(name="node:1"),))
    assert [error.host for error in over_hosts.problems([FAILED, FAILED], options)] == ["node:1"]
    assert not over_hosts.problems([FAILED, JOINED], options)
    assert not over_hosts.problems([FAILED], LaunchOptions())


def test_what_slurm_says_of_a_host_is_not_taken_for_ssh():
    options = LaunchOptions(launcher=Launcher.SLURM, hosts=(HostEntry(name="node:1"),))
    assert str(over_hosts.problems([FAILED], options)[0]).startswith("`srun to node:1`: ")


@pytest.mark.parametrize(
    ("kinds", "code", "expected"),
    [
        (["host_not_reached"], 1, ExitCode.PREFLIGHT),
        (["host_not_reached", "host_joined", "child_spawned"], 1, 1),
        (["child_spawned", "host_lost"], 4, ExitCode.HOST_LOST),
        (["host_not_reached", "host_joined", "child_spawned"], 0, 0),
        (["host_not_reached"], 130, 130),
    ],
)
def test_the_exit_code_tells_a_host_from_the_run(kinds, code, expected):
    assert over_hosts.exit_code([{"kind": kind} for kind in kinds], code) == expected
