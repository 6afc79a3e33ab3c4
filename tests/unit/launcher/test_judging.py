"""What is said of hosts that are not as a run needs them: every line of the table, word for word."""

from pathlib import Path

import msgspec
import pytest

from launcher.errors import ExitCode
from launcher.judging import judge
from launcher.preflight_table import refusal, render
from launcher.verdicts import Case, Level, Verdict, Wanted
from relax_actor.survey.records import Facts, Gpu, GpuProcess, Interface, PathFact

GIB = 1 << 30
GOOD = Facts(
    node="node1",
    python="3.11.7",
    versions={"torch": "2.9.0", "cuda": "12.8", "nccl": "2.27.5"},
    code="c0de",
    driver="570.1",
    gpus=(Gpu(index="0", uuid="GPU-aaaa1111"), Gpu(index="1", uuid="GPU-bbbb2222")),
    memory_bytes=64 * GIB,
    shm_bytes=32 * GIB,
    open_files=(1 << 20, 1 << 20),
    locked_bytes=-1,
    disk_bytes=500 * GIB,
    sync_s=0.002,
    interfaces=(
        Interface(name="eth0", is_up=True, addresses=("10.0.0.1",)),
        Interface(name="ib0", is_up=False),
    ),
    paths={"model.path": PathFact(files=3, size_bytes=15 * GIB, digest="0123456789abcdef")},
)


def facts(**changes) -> Facts:
    return msgspec.structs.replace(GOOD, **changes)


def table(*hosts: Facts, **case) -> list[Verdict]:
    named = {f"node{index}": each for index, each in enumerate(hosts or (GOOD, GOOD), start=1)}
    return judge(Case(facts=named, here=Facts(code="c0de"), **case))


def wrong(*hosts: Facts, **case) -> list[str]:
    return [
        f"{each.level} {each.check}: {','.join(each.hosts)} {each.fact} | {each.hint}"
        for each in table(*hosts, **case)
        if each.level is not Level.OK
    ]


def want(**fields):
    return {"wanted": {"node2": Wanted(**fields)}}


def test_hosts_that_are_as_they_should_be():
    assert [(each.check, each.fact) for each in table()] == [
        ("software", "python 3.11.7, code c0de, torch 2.9.0, cuda 12.8, nccl 2.27.5"),
        ("driver", "570.1"),
        ("GPUs", "2 each"),
        ("memory", "64.0 GiB free or more"),
        ("shared memory", "32.0 GiB free or more"),
        ("limits", "1048576 open files or more"),
        ("disk", "500.0 GiB free or more, on disk within 2.0 ms"),
        ("run folder", "of each host's own; logs and events are handed over"),
        ("host name", "leads to no loopback"),
        ("interface", "up"),
        ("network", "every way that was tried"),
        ("proxies", "none in between"),
        ("files", "model.path 15.0 GiB (01234567)"),
        ("clock", "within 0.0 s"),
        ("leftovers", "none"),
    ]


def said(*hosts: Facts) -> dict[str, str]:
    return {each.check: each.fact for each in table(*hosts)}


def test_what_differs_is_still_said_where_it_is_no_fault():
    mixed = said(facts(is_shared=True), facts(gpus=(), driver="", open_files=(-1, -1)))
    assert mixed["GPUs"] == "2 on 1 hosts, 0 on 1 hosts"
    assert mixed["run folder"] == "shared by node1"
    assert said(facts(is_shared=True))["run folder"] == "the same for all"
    assert said(facts(open_files=(-1, -1)))["limits"] == "any number of open files"


def test_one_host_alone_is_not_asked_about_others():
    alone = {each.check: each.fact for each in judge(Case(facts={"local": facts(paths={}, driver="")}))}
    checks = "software, driver, GPUs, memory, shared memory, limits, disk, files, leftovers"
    assert ", ".join(alone) == checks
    assert (alone["driver"], alone["files"]) == ("none", "nothing was asked")


USED = (Gpu(index="0", processes=(GpuProcess(pid=4711, owner="alice", name="python", used_mib=2048),)),)
HIDDEN = (Gpu(index="0", processes=(GpuProcess(pid=9, used_mib=1),)),)


FAULTS = {
    "other code": (facts(code="beef"), {}),
    "other python": (facts(python="3.12.1"), {}),
    "other torch": (facts(versions=GOOD.versions | {"torch": "2.8.0"}), {}),
    "no nccl": (facts(versions={"torch": "2.9.0", "cuda": "12.8"}), {}),
    "other driver": (facts(driver="535.2"), {}),
    "no driver": (facts(driver="", gpus=()), want(gpus=("0",))),
    "odd list": (facts(oddity="`0,0` names a GPU twice, so none is visible"), {}),
    "no such GPU": (GOOD, want(gpus=("7",))),
    "GPU in use": (facts(gpus=USED), want(gpus=("0",))),
    "GPU in use elsewhere": (facts(gpus=HIDDEN), want(gpus=("0",))),
    "no GPU as named": (facts(gpus=()), want(named_gpus=("0",))),
    "fewer GPUs than slots": (GOOD, want(slots=8)),
    "little memory": (GOOD, want(memory_bytes=100 * GIB)),
    "little shared memory": (facts(shm_bytes=GIB), want(shm_bytes=2 * GIB)),
    "no shared memory": (facts(shm_error="No such file or directory: /shm"), {}),
    "few open files": (facts(open_files=(1024, 1024)), {}),
    "little locked memory": (facts(locked_bytes=65536), {}),
    "read-only disk": (facts(disk_error="Read-only file system: /runs"), {}),
    "full disk": (facts(disk_bytes=GIB), want(disk_bytes=30 * GIB)),
    "slow disk": (facts(sync_s=3.0), {}),
    "name on the loopback": (facts(node="n2", loopback_line="127.0.1.1 n2"), {}),
    "no interface": (GOOD, want(interface="eth9")),
    "interface down": (GOOD, want(interface="ib0")),
    "interface without address": (
        facts(interfaces=(Interface(name="ib0", is_up=True),)),
        want(interface="ib0"),
    ),
    "no way": (
        GOOD,
        {"unreached": {"node2": {"node1": "no answer within 5 s"}}, "addresses": {"node1": "10.0.0.1"}},
    ),
    "proxy": (
        facts(proxies=("http_proxy",), no_proxy=("localhost", ".b.c")),
        {"addresses": {"node1": "10.0.0.1", "x": "a.b.c"}},
    ),
    "unreadable model": (facts(paths={"model.path": PathFact(error="Permission denied: /m/a")}), {}),
    "other model": (facts(paths={"model.path": PathFact(digest="ff")}), {}),
    "clock behind": (GOOD, {"skew_s": {"node2": -7.25}}),
    "clock ahead": (GOOD, {"skew_s": {"node2": 7.25}}),
    "leftovers": (
        facts(leftovers=tuple(f"pid {pid} (rollout/0/1 of run ab)" for pid in range(7))),
        {"run_dir": "runs/x"},
    ),
}
"""What is wrong with the second host, or with the case; `preflight.txt` has what is said of each."""


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_what_helps(name):
    host, case = FAULTS[name]
    said = "\n".join(wrong(GOOD, host, **case)).replace(" | ", "\nhint: ", 1)
    assert said == expected()[name]


def expected():
    text = Path(__file__).with_name("preflight.txt").read_text()
    parts = (part.partition("\n") for part in text.strip().split("## ")[1:])
    return {name: said.strip() for name, _, said in parts}


def test_nothing_else_is_expected():
    assert list(expected()) == list(FAULTS)


def test_hosts_with_the_same_fault_share_a_line():
    lines = wrong(GOOD, facts(sync_s=3.0), facts(sync_s=3.0))
    assert [line.partition(" took")[0] for line in lines] == ["warn disk: node2,node3"]


def test_of_many_ways_some_are_named():
    lost = {f"node{index}": {"node1": "refused"} for index in range(2, 10)}
    [line] = wrong(GOOD, unreached=lost)
    assert line.count("→") == 5
    assert "and 3 more: refused" in line


def test_a_gpu_is_found_by_number_by_uuid_and_by_the_beginning_of_one():
    for name in ("1", "GPU-bbbb2222", "GPU-bbbb", "MIG-which-nobody-lists"):
        assert wrong(GOOD, GOOD, **want(gpus=(name,))) == []
    assert wrong(GOOD, GOOD, **want(gpus=("GPU-cccc",)))


def test_the_table_is_printed_with_hints_under_its_faults():
    no_key = "no key\nPermission denied"
    shown = render(
        [
            Verdict(check="ssh", level=Level.FAILURE, hosts=("node4",), fact=no_key, hint="a key"),
            Verdict(check="disk", fact="enough"),
            Verdict(
                check="clock", level=Level.WARNING, hosts=("node2", "node3"), fact="late", hint="a clock"
            ),
        ],
        4,
        1.24,
    )
    assert shown.splitlines() == [
        "preflight of 4 hosts, 1.2 s",
        "  FAIL  ssh    node4: no key",
        "               Permission denied",
        "               hint: a key",
        "  ok    disk   enough",
        "  warn  clock  node[2-3]: late",
        "               hint: a clock",
    ]


def test_failures_refuse_a_run_and_warnings_do_not():
    warning = Verdict(check="clock", level=Level.WARNING, hosts=("a",))
    failure = Verdict(check="disk", level=Level.FAILURE, hosts=("a",))
    assert refusal([warning, Verdict(check="x")]) is None
    refused = refusal([failure, warning, failure])
    assert refused.exit_code is ExitCode.PREFLIGHT
    assert str(refused) == (
        "`--preflight` found 2 failures on a\n\n"
        "hint: each has its own hint in the table; --preflight off starts all the same"
    )
    assert "found 1 failure\n" in str(refusal([msgspec.structs.replace(failure, hosts=())]))
