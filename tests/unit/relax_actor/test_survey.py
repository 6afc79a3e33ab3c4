"""What a host says of itself, in folders and words of the test's own."""

import os
import resource
import subprocess
import sys
import time

import pytest

from relax_actor import limits
from relax_actor.node.strays import VARIABLE
from relax_actor.survey import files, gpus, host, software, wires
from relax_actor.survey.records import Gpu, GpuProcess, Question

SMI = {
    "--query-gpu": "0, GPU-a, NVIDIA H200, 143771, 5\n1, GPU-b, NVIDIA H200, 143771, [N/A]\n\nodd\n",
    "--query-compute-apps": "GPU-b, {pid}, 1024, /usr/bin/python3\nGPU-b, 4000000, 7, [Not Found]\n",
}


def smi(command):
    option = command[-1].partition("=")[0]
    return SMI[option].format(pid=os.getpid())


def test_gpus_and_who_uses_them():
    first, second = gpus.gpus(smi)
    assert first == Gpu(index="0", uuid="GPU-a", name="NVIDIA H200", total_mib=143771, used_mib=5)
    mine, hidden = second.processes
    assert (mine.pid, mine.name, mine.used_mib) == (os.getpid(), "python3", 1024)
    assert mine.owner == gpus.owner_of(os.getpid()) != ""
    assert hidden == GpuProcess(pid=4000000, name="[Not Found]", used_mib=7)


def test_without_the_tool_or_where_it_fails_there_are_none(monkeypatch, tmp_path):
    def fails(command):
        raise subprocess.CalledProcessError(9, command)

    assert gpus.gpus(fails) == ()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.gpus() == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    assert gpus.gpus() == ()


def test_an_owner_without_a_name_is_a_number(monkeypatch):
    def nobody(_uid):
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert gpus.owner_of(os.getpid()) == str(os.getuid())


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / ".cache").write_text("x")
    (model / "sub" / "a.bin").write_bytes(bytes(range(256)) * 1024)
    return model


@pytest.mark.parametrize("is_full", [False, True])
def test_equal_folders_have_equal_digests(folder, tmp_path, is_full):
    fact = files.fact_of(str(folder), is_full=is_full)
    assert (fact.files, fact.size_bytes, fact.error) == (2, 2 + 256 * 1024, "")
    twin = tmp_path / "twin"
    folder.rename(twin)
    (twin / ".cache").unlink()
    assert files.fact_of(str(twin), is_full=is_full) == fact
    (twin / "config.json").write_text("[]")
    assert files.fact_of(str(twin), is_full=is_full).digest != fact.digest


def test_a_quick_digest_looks_at_the_ends_of_files_only(folder):
    quick, full = (files.fact_of(str(folder), is_full=is_full).digest for is_full in (False, True))
    file = folder / "sub" / "a.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert files.fact_of(str(folder), is_full=False).digest == quick
    assert files.fact_of(str(folder), is_full=True).digest != full


def test_what_cannot_be_read_says_why(folder, tmp_path):
    assert files.fact_of(str(tmp_path / "no"), is_full=True).error.startswith("No such file or directory: ")
    (tmp_path / "empty").mkdir()
    assert "the folder is empty" in files.fact_of(str(tmp_path / "empty"), is_full=True).error
    (folder / "loop").symlink_to(folder / "loop")
    assert "symbolic link" in files.fact_of(str(folder), is_full=True).error
    assert files.fact_of(str(folder / "config.json"), is_full=True).files == 1


def test_a_canary_leaves_nothing(tmp_path):
    since_s = time.monotonic()
    took_s, error = files.canary(tmp_path)
    assert error == ""
    assert 0 < took_s <= time.monotonic() - since_s
    assert list(tmp_path.iterdir()) == []
    assert files.canary(tmp_path / "no")[1].startswith("No such file or directory")


def test_a_disk_that_loses_what_is_written_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("os.write", lambda _fd, data: len(data))
    assert "is not whole" in files.canary(tmp_path)[1]


def test_the_nearest_folder_that_is_there(tmp_path):
    assert files.nearest(str(tmp_path / "a" / "b")) == tmp_path
    assert files.sees(str(tmp_path / "a"), "x") is False
    (tmp_path / "a").write_text("x")
    assert files.sees(str(tmp_path / "a"), "x")
    assert not files.sees(str(tmp_path / "a"), "y")
    assert not files.sees("", "")


def test_the_line_that_leads_a_name_to_the_loopback(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.0.0.2 n2\n# 127.0.1.1 n1\n127.0.1.1\tn1 n1.b # me\n::1 n3\n")
    assert wires.loopback_line("n1", hosts) == "127.0.1.1\tn1 n1.b # me"
    assert wires.loopback_line("n3", hosts) == "::1 n3"
    assert wires.loopback_line("n2", hosts) == ""
    assert wires.loopback_line("n2", tmp_path / "no") == ""


def test_interfaces_that_are_up_and_those_whose_state_nobody_knows(tmp_path):
    assert any(each.name == "lo" and each.is_up for each in wires.interfaces())
    assert not any(each.is_up for each in wires.interfaces(tmp_path))


def test_proxies_are_named_and_their_values_are_not():
    environ = {"http_proxy": "http://u:secret@p", "ALL_PROXY": "x", "https_proxy": "", "NO_PROXY": "a, .b,"}
    assert wires.proxies(environ) == (("http_proxy", "ALL_PROXY"), ("a", ".b"))
    assert wires.proxies({}) == ((), ())


def test_software_is_looked_up_and_not_imported():
    script = (
        "import sys; from relax_actor.survey import software; v = software.versions(); "
        "assert 'torch' not in sys.modules; print(v.get('torch'), software.code_digest())"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(software.versions().get("torch")), software.code_digest()]


def test_the_cuda_of_torch_is_read_from_its_own_file(monkeypatch, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    for text, version in (
        ("cuda: Optional[str] = '12.8'\n", "12.8"),
        ('cuda = "13.0"\n', "13.0"),
        ("cuda: Optional[str] = None\n", None),
    ):
        (package / "version.py").write_text(text)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert software.versions().get("cuda") == version
    (package / "version.py").unlink()
    assert "cuda" not in software.versions()


def test_a_driver_is_known_by_its_own_word(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "_DRIVER", tmp_path / "version")
    assert software.driver() == ""
    (tmp_path / "version").write_text("570.1\n")
    assert software.driver() == "570.1"


def test_everything_is_answered(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    facts = host.facts_of(Question(run_dir=str(tmp_path / "runs"), shm_root=str(tmp_path)), port=7)
    assert facts.node == os.uname().nodename
    assert (facts.port, facts.visible) == (7, ())
    assert "names a GPU twice" in facts.oddity
    assert facts.memory_bytes > 0
    assert facts.shm_bytes > 0
    assert facts.disk_bytes > 0
    assert facts.disk_error == facts.shm_error == ""
    missing = host.facts_of(Question(shm_root=str(tmp_path / "no"), needs_gpus=False))
    assert missing.shm_error == f"No such file or directory: {tmp_path / 'no'}"


def test_processes_of_an_earlier_run_are_found_by_its_mark():
    environ = os.environ | {VARIABLE: "0badcafe/rollout/3/2"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environ, stdin=subprocess.PIPE) as process:
        facts = host.facts_of(Question(run_ids=("0badcafe", "00000000"), needs_gpus=False))
        process.communicate(b"\n")
    assert facts.leftovers == (f"pid {process.pid} (rollout/3/2 of run 0badcafe)",)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ((100, 500), (500, 500)),
        ((100, -1), (limits.ENOUGH, -1)),
        ((500, 500), (500, 500)),
        ((-1, -1), (-1, -1)),
    ],
)
def test_open_files_are_raised_as_far_as_is_allowed(monkeypatch, now, then):
    state = [now]
    monkeypatch.setattr(resource, "getrlimit", lambda _which: state[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _which, new: state.__setitem__(0, new))
    assert limits.raise_open_files() == then


def test_a_limit_that_cannot_be_raised_stays(monkeypatch):
    def refuse(_which, _new):
        raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda _which: (100, 500))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert limits.raise_open_files() == (100, 500)
