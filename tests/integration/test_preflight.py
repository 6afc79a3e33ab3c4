"""Hosts are asked through the sessions that their agents would have, and one table says what they lack."""

import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launcher import probes
from launcher.errors import ExitCode, RefusedError
from launcher.launch import Request, launch
from launcher.probes import Terms
from launcher.probing import survey
from relax_actor.node.inband import framed
from relax_actor.supervision.hosts import Host, Session
from relax_actor.survey.records import Question, Targets
from relax_actor.survey.wires import HELLO, Listener, reached

pytestmark = pytest.mark.timeout(120)

HERE = ("env", "X=1")


def everybody(facts):
    return {
        name: Targets(addresses={other: ("127.0.0.1", found.port) for other, found in facts.items()})
        for name in facts
    }


def nobody(_facts):
    return {}


def ask(*hosts, targets=everybody, terms=Terms(), question=Question(listens=True, needs_gpus=False)):  # noqa: B008 - frozen
    return survey(hosts, {host.name: question for host in hosts}, targets, terms)


def test_all_hosts_answer_and_try_to_reach_one_another():
    hosts = [Host(name="a"), *(Host(name=name, prefix=HERE) for name in "bcd")]
    found = ask(*hosts)
    assert found.attempts == found.unreached == {}
    assert sorted(found.facts) == list("abcd")
    assert {facts.node for facts in found.facts.values()} == {os.uname().nodename}
    assert all(abs(skew_s) < 5 for skew_s in found.skew_s.values())


def test_a_way_that_is_closed_is_named():
    def one_is_closed(facts):
        return {name: Targets(addresses={"x": ("127.0.0.1", 9)}, timeout_s=1.0) for name in facts}

    assert ask(Host(name="a"), targets=one_is_closed).unreached == {"a": {"x": "connection refused"}}


def test_a_noisy_shell_an_environment_and_a_setup_script_make_no_difference():
    noisy = ("sh", "-c", 'echo welcome; echo more >&2; exec "$@"', "sh")
    session = Session(env=((b"CUDA_VISIBLE_DEVICES", b"3"),), setup="echo set up; export no_proxy=a,b")
    found = ask(Host(name="a", prefix=noisy, session=session))
    assert found.facts["a"].visible == ("3",)
    assert found.facts["a"].no_proxy == ("a", "b")


@pytest.mark.parametrize(
    ("host", "facts"),
    [
        (Host(name="x", prefix=HERE, python="/no/python"), {"code": 127, "answered": False}),
        (Host(name="x", prefix=("sh", "-c", "echo bye")), {"code": 0, "answered": False}),
        (Host(name="x", session=Session(workdir="/no/folder")), {"refusal": "workdir", "answered": True}),
        (Host(name="x", session=Session(setup="exit 7")), {"refusal": "setup", "answered": True}),
        (Host(name="x", prefix=("sh", "-c", "exec sleep 600")), {"fact": "it did not answer within 15 s"}),
        (
            Host(name="x", prefix=("sh", "-c", "cat > /dev/null & sleep 0.2; kill -9 $$")),
            {"code": -9, "answered": False},
        ),
    ],
    ids=["no interpreter", "a shell that ends", "no folder", "setup fails", "silence", "killed"],
)
def test_a_host_that_cannot_answer_holds_up_nobody(host, facts):
    found = ask(Host(name="a"), host, terms=Terms(open_s=15.0) if "fact" in facts else Terms())
    attempt = found.attempts["x"]
    assert {name: getattr(attempt, name) for name in facts} == facts
    assert list(found.facts) == ["a"]


def test_another_version_is_refused_by_the_host(monkeypatch):
    monkeypatch.setattr(probes, "__version__", "99.0")
    assert ask(Host(name="a")).attempts["a"].refusal == "version"


def test_a_session_that_is_refused_for_want_of_room_is_tried_again(tmp_path):
    crowded = f'if mkdir {tmp_path}/once 2>/dev/null; then echo "reset by peer" >&2; exit 255; fi; exec "$@"'
    prefix = ("sh", "-c", crowded, "sh")
    found = ask(Host(name="a", prefix=prefix, session=Session(retry_on="reset by peer")))
    assert list(found.facts) == ["a"]
    (tmp_path / "once").rmdir()
    assert ask(Host(name="a", prefix=prefix)).attempts["a"].code == 255


def test_a_host_that_is_lost_in_the_middle_is_told():
    def kill_it(facts):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # of another test, and it ends
                if "relax_actor.survey.probe" in process.cmdline():
                    process.kill()
        return everybody(facts)

    found = ask(Host(name="a"), targets=kill_it)
    assert found.facts == {}
    assert found.attempts["a"].answered


def test_nothing_stays_when_the_head_lets_go_before_it_has_asked():
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "relax_actor.survey.probe", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdin.write(framed(Question(listens=True, needs_gpus=False)))
        process.stdin.close()
        assert process.wait(20) == 0
        process.stdout.read()


def test_somebody_else_at_a_port_is_no_way():
    listener = Listener((20000, 29999))
    assert 20000 <= listener.port <= 29999
    assert reached(Targets(addresses={"a": ("127.0.0.1", listener.port)})).failures == {}
    with pytest.raises(OSError, match=r"in use|no port is free"):
        Listener((listener.port, listener.port))
    listener.close()
    assert reached(Targets(addresses={"a": ("no.such.host.invalid", 1)})).failures.keys() == {"a"}


def test_an_echo_is_not_the_answer():
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo():
            peer, _ = server.accept()
            with peer:
                peer.sendall(peer.recv(len(HELLO)))

        thread = threading.Thread(target=echo)
        thread.start()
        address = server.getsockname()[:2]
        assert reached(Targets(addresses={"a": address})).failures == {"a": "somebody else answers there"}
        thread.join()


# -- the commands -----------------------------------------------------------------------------------


def relax(*words, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "relax_actor", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=cwd,
    )
    return done.returncode, done.stdout, done.stderr


def test_doctor_of_this_host(tmp_path):
    code, out, err = relax("doctor", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith("preflight of 1 host, ")
    assert "  ok  disk " in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_of_a_run_says_what_this_host_lacks(tmp_path, tiny_model):
    words = ("--model", tiny_model.path, "--dataset", tiny_model.rows(4))
    code, out, _ = relax("doctor", *words, "--json", cwd=tmp_path)
    found = json.loads(out)
    assert code == 0
    assert found["hosts"]["local"]["paths"]["model.path"]["digest"]
    code, out, err = relax("doctor", *words, f"queue.storage_path={tmp_path / 'no'}", cwd=tmp_path)
    assert code == 3
    assert "this machine" in out
    assert err.startswith("error: `--preflight` found ")


def test_a_launch_on_this_host_alone_shows_its_table_where_it_is_asked_to(tmp_path, tiny_model):
    out = io.StringIO()
    request = Request(
        flags={"--model": str(tiny_model.path), "--dataset": str(tiny_model.rows(40))},
        overrides=("rollout.device=cpu", "train.device=cpu"),
        words={"--dry-run": "remote"},
        dry_run=True,
    )
    assert launch(request, out) == 0
    assert out.getvalue().startswith("preflight of 1 host, ")
    assert "\nactors (" in out.getvalue()


def test_a_host_whose_name_nobody_knows_is_in_the_table_with_the_others(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostfile").write_text("no-such-host.invalid slots=1\nnor-this.invalid slots=1\n")
    request = Request(
        flags={"--model": str(tiny_model.path), "--dataset": str(tiny_model.rows(40))},
        words={"--hostfile": str(tmp_path / "hostfile")},
    )
    out = io.StringIO()
    with pytest.raises(RefusedError) as refusal:
        launch(request, out)
    assert "found 2 failures on no-such-host.invalid,nor-this.invalid" in str(refusal.value)
    assert refusal.value.exit_code is ExitCode.PREFLIGHT
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("preflight of 2 hosts, ")
    assert lines[1].startswith("  FAIL  ssh  no-such-host.invalid: its name is not known here")
    assert not Path("runs").exists()
