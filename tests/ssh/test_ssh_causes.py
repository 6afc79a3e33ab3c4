"""Why a host cannot be reached, told of real failures of a real sshd."""

import signal

import pytest
from sample_actors import Counter

from launcher.hosts import HostEntry
from launcher.options import Launcher, LaunchOptions
from launcher.over_hosts import problems
from launcher.ssh_causes import SshCause, SshError
from relax_actor import ChildSpec, Supervisor, SupervisorSpec
from relax_actor.errors import StartFailed
from relax_actor.telemetry import read_events

pytestmark = pytest.mark.timeout(180)


def cause_of(
    reach, servers, tmp_path, server, *options, ssh=None, connect_timeout_s=20, join_timeout_s=60.0, **remote
):
    """Try to start a tree on a host; return why that failed, and the words of the whole error."""
    entries = [servers.entry(server)]
    ssh = ssh or servers.options(*options, connect_timeout_s=connect_timeout_s)
    reached = reach(entries=entries, ssh=ssh, **remote)
    spec = SupervisorSpec(id="root", children=(ChildSpec(id="counter", actor=Counter),))
    tree = Supervisor(
        spec,
        run_dir=tmp_path / "run",
        hosts=reached.hosts,
        address=reached.address,
        join_timeout_s=join_timeout_s,
    )
    with pytest.raises(StartFailed, match="0 of 1 hosts joined"), tree:
        pass
    options = LaunchOptions(launcher=Launcher.SSH, hosts=tuple(entries))
    [error] = problems(read_events(tmp_path / "run" / "events.jsonl")[0], options)
    assert error.host == entries[0].name
    assert "hint: " in str(error)
    return error.cause, str(error)


def test_a_name_that_nobody_knows(servers, reach):
    with pytest.raises(SshError, match=r"no-such-host\.invalid: its name is not known here"):
        reach(entries=[HostEntry(name="no-such-host.invalid")], ssh=servers.options())


def test_a_port_where_nobody_listens(servers, pair, reach, tmp_path):
    server = servers.start()
    server.stop()
    cause, text = cause_of(reach, servers, tmp_path, server)
    assert cause is SshCause.REFUSED
    assert "--ssh-port" in text


def test_a_host_key_that_is_not_known(servers, pair, reach, tmp_path):
    nobody = tmp_path / "nobody"
    cause, text = cause_of(reach, servers, tmp_path, pair[0], f"UserKnownHostsFile={nobody}")
    assert cause is SshCause.HOST_KEY_UNKNOWN
    assert f"ssh {pair[0].address} true" in text


def test_a_host_key_that_has_changed(servers, pair, reach, tmp_path):
    other = (servers.folder / "stranger.pub").read_text().split()[1]
    known = tmp_path / "known"
    known.write_text(f"[{pair[0].address}]:{pair[0].port} ssh-ed25519 {other}\n")
    cause, text = cause_of(reach, servers, tmp_path, pair[0], f"UserKnownHostsFile={known}")
    assert cause is SshCause.HOST_KEY_CHANGED
    assert "ssh-keygen -R" in text


def test_a_key_that_is_not_accepted(servers, pair, reach, tmp_path):
    options = servers.options()
    ssh = type(options)(options=options.options, identity=str(servers.folder / "stranger"))
    cause, text = cause_of(reach, servers, tmp_path, pair[0], ssh=ssh)
    assert cause is SshCause.KEY
    assert "ssh-copy-id" in text


def test_a_host_that_does_not_answer(servers, pair, reach, tmp_path):
    server = servers.start()
    for process in [*server.sessions, server.process]:
        process.send_signal(signal.SIGSTOP)  # the kernel still takes the connection
    cause, _ = cause_of(reach, servers, tmp_path, server, connect_timeout_s=3, join_timeout_s=20.0)
    server.stop()
    assert cause in {SshCause.TIMEOUT, SshCause.RESET}


def test_an_option_that_ssh_does_not_know(servers, pair, reach, tmp_path):
    cause, _ = cause_of(reach, servers, tmp_path, pair[0], "NoSuchOption=1")
    assert cause is SshCause.OPTION


def test_an_interpreter_that_is_not_there(servers, pair, reach, tmp_path):
    cause, text = cause_of(reach, servers, tmp_path, pair[0], python="/no such/python")
    assert cause is SshCause.NO_PYTHON
    assert "/no such/python" in text


def test_an_interpreter_without_relax_actor(servers, pair, reach, tmp_path):
    cause, text = cause_of(reach, servers, tmp_path, pair[0], python="/usr/bin/python3")
    assert cause is SshCause.NO_PACKAGE
    assert "--venv" in text


def test_a_login_shell_that_ends_before_anything_is_started(servers, reach, tmp_path):
    server = servers.start("ForceCommand echo See you tomorrow")
    cause, text = cause_of(reach, servers, tmp_path, server)
    assert cause is SshCause.SHELL_NOISE
    assert "See you tomorrow" in text


def test_a_working_directory_that_is_not_there(servers, pair, reach, tmp_path):
    cause, text = cause_of(reach, servers, tmp_path, pair[0], workdir="/no/such/folder")
    assert cause is SshCause.WORKDIR
    assert "/no/such/folder" in text


def test_a_setup_script_that_fails(servers, pair, reach, tmp_path):
    cause, text = cause_of(reach, servers, tmp_path, pair[0], setup="echo before; false")
    assert cause is SshCause.SETUP
    assert "exit code 1" in text


def test_another_version_of_relax_actor(servers, pair, reach, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_actor.__version__", "99.0")
    cause, text = cause_of(reach, servers, tmp_path, pair[0])
    assert cause is SshCause.VERSION
    assert "the head 99.0" in text
