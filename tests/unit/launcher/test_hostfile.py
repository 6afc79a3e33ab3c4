"""Hostfiles of every kind people have are read, and every mistake in one is shown where it is."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import report
from launcher.hostfile import HostfileError, parse, parse_hosts, read, render
from launcher.hosts import HostEntry, HostRole


def said(text: str) -> list[dict]:
    """Return the hosts of a text, with what is not at its default."""
    return [
        {
            field: value
            for field in HostEntry.__struct_fields__
            if field != "where" and (value := getattr(host, field)) not in ("", 0, None)
        }
        for host in parse(text)
    ]


GOOD = {
    "a name": ("node01", [{"name": "node01"}]),
    "slots": ("node01 slots=8", [{"name": "node01", "slots": 8}]),
    "tabs": ("node01\tslots=8\t\tport=22", [{"name": "node01", "slots": 8, "port": 22}]),
    "leading spaces": ("   node01", [{"name": "node01"}]),
    "no newline at the end and blank lines": ("\n\na\n\nb", [{"name": "a"}, {"name": "b"}]),
    "comments": ("# all\na # this\nb slots=2# that\n #\n", [{"name": "a"}, {"name": "b", "slots": 2}]),
    "CRLF": ("a slots=1\r\nb slots=2\r\n", [{"name": "a", "slots": 1}, {"name": "b", "slots": 2}]),
    "a byte order mark": ("\ufeffa slots=1\n", [{"name": "a", "slots": 1}]),
    "everything": (
        "ubuntu@node02 slots=8 port=2222 addr=10.0.0.2 ifname=eth0 role=trainer",
        [
            {
                "name": "node02",
                "user": "ubuntu",
                "slots": 8,
                "port": 2222,
                "address": "10.0.0.2",
                "interface": "eth0",
                "role": HostRole.TRAINER,
            }
        ],
    ),
    "ranges": (
        "node[03-04,09] slots=8 role=rollout",
        [{"name": f"node{n}", "slots": 8, "role": HostRole.ROLLOUT} for n in ("03", "04", "09")],
    ),
    "GPUs by index": ("a gpus=0,2,4-7", [{"name": "a", "gpus": ("0", "2", "4", "5", "6", "7")}]),
    "GPUs by UUID": (
        "a gpus=GPU-3f1b-77,GPU-88",
        [{"name": "a", "gpus": ("GPU-3f1b-77", "GPU-88")}],
    ),
    "MIG slices": ("a gpus=MIG-GPU-3f/1/0", [{"name": "a", "gpus": ("MIG-GPU-3f/1/0",)}]),
    "IPv6": ("[fd00::12] slots=8", [{"name": "fd00::12", "slots": 8}]),
    "IPv6 with slots": ("[fd00::12]:8", [{"name": "fd00::12", "slots": 8}]),
    "IPv6 with a user": ("me@[fd00:0:0::12]", [{"name": "fd00::12", "user": "me"}]),
    "IPv4": ("10.0.0.1:4", [{"name": "10.0.0.1", "slots": 4}]),
    "IPv6 as an address": ("a addr=[fd00::1]", [{"name": "a", "address": "fd00::1"}]),
    "a bare IPv6 as an address": ("a addr=fd00::1", [{"name": "a", "address": "fd00::1"}]),
    "a name as an address": ("a addr=a.ib.local", [{"name": "a", "address": "a.ib.local"}]),
    "this host alone": ("localhost slots=1", [{"name": "localhost", "slots": 1}]),
    "this host through ssh on several ports": (
        "127.0.0.1 port=2201\n127.0.0.2 port=2202",
        [{"name": "127.0.0.1", "port": 2201}, {"name": "127.0.0.2", "port": 2202}],
    ),
    "this host by an address that others reach": (
        "localhost addr=10.0.0.1\nb",
        [{"name": "localhost", "address": "10.0.0.1"}, {"name": "b"}],
    ),
    "keys in any case and with dashes": ("a Slots=2 max-slots=4", [{"name": "a", "slots": 2}]),
    "DeepSpeed's": (
        "worker-1 slots=4\nworker-2 slots=4\n",
        [{"name": "worker-1", "slots": 4}, {"name": "worker-2", "slots": 4}],
    ),
    "Open MPI's": (
        "# compute\nfoo.example.com\nbar.example.com slots=2\nyow.example.com slots=4 max-slots=4\n",
        [
            {"name": "foo.example.com"},
            {"name": "bar.example.com", "slots": 2},
            {"name": "yow.example.com", "slots": 4},
        ],
    ),
    "MPICH's": (
        "donner\nfoo:2 ifname=eth1\nshakey:3 binding=user:0,1\nterra user=me\n",
        [
            {"name": "donner"},
            {"name": "foo", "slots": 2, "interface": "eth1"},
            {"name": "shakey", "slots": 3},
            {"name": "terra", "user": "me"},
        ],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_hostfile_is_read(name):
    text, hosts = GOOD[name]

    assert said(text) == hosts


NAMES = "letters, digits, `.`, `_` and `-`, a letter or digit first and last"
ASKED = "leave it out, and the host is asked"
GPUS = "indices such as 0,2,4-7, or UUIDs as `nvidia-smi -L` prints them"

BAD = {
    "nothing": ("", "1:1", "names no host", "one host a line, for example node01 slots=8"),
    "comments alone": ("# a\n", "1:1", "names no host", "one host a line, for example node01 slots=8"),
    "an unknown key": ("a slot=8", "1:3", "has `slot`, which is no key", "did you mean slots=?"),
    "a key like none": (
        "a colour=red",
        "1:3",
        "has `colour`, which is no key",
        "the keys are slots, gpus, port, user, addr, ifname, role, max_slots, binding",
    ),
    "no slots at all": ("a slots=0", "1:9", "slots must be 1 to 1024, got 0", ASKED),
    "fewer": ("a slots=-1", "1:9", "slots must be 1 to 1024, got -1", ASKED),
    "a typing mistake in a number": (
        "ok\na slots=8x",
        "2:9",
        "slots must be a whole number, got `8x`",
        ASKED,
    ),
    "spaces around =": (
        "a slots = 8",
        "1:3",
        "has spaces around `=`, or nothing beside it",
        "for example slots=8",
    ),
    "no value": ("a slots=", "1:3", "has spaces around `=`, or nothing beside it", "for example slots=8"),
    "a bare number": ("a 8", "1:3", "has `8`, which is not of the form key=value", "did you mean slots=8?"),
    "two hosts in one line": (
        "a b",
        "1:3",
        "has `b`, which is not of the form key=value",
        "one host a line, then words of the form key=value",
    ),
    "a key twice": ("a port=1 port=2", "1:10", "has `port` twice", "leave one out"),
    "a host twice": (
        "a slots=4\nb\nA slots=4",
        "3:1",
        "names A again, which is in line 1",
        "a host has one line: add up its slots",
    ),
    "a host in a range again": (
        "n3\nn[1-4]",
        "2:1",
        "names n3 again, which is in line 1",
        "a host has one line: add up its slots",
    ),
    "slots twice": ("a:4 slots=4", "1:5", "has `:n` and `slots`", "one of them says how many there are"),
    "slots and GPUs": (
        "a gpus=0 slots=4",
        "1:3",
        "has `slots` and `gpus`",
        "one of them says how many there are",
    ),
    "two users": ("me@a user=you", "1:6", "has `user@` and `user`", "leave one out"),
    "one address for many": (
        "n[1-2] addr=10.0.0.1",
        "1:8",
        "gives one address to 2 hosts",
        "give each host a line of its own",
    ),
    "an unknown role": ("a role=rolout", "1:8", "`rolout` is not a role", "did you mean role=rollout?"),
    "a role like none": ("a role=x", "1:8", "`x` is not a role", "role= is one of trainer, rollout"),
    "a port that is none": ("a port=70000", "1:8", "port must be 1 to 65535, got 70000", ""),
    "an interface that is none": (
        "a ifname=/dev",
        "1:10",
        "`/dev` is not the name of a network interface",
        "",
    ),
    "an address that is none": ("a addr=1.2.3", "1:8", "has `1.2.3`, which is no IPv4 address", ""),
    "an IPv6 address without brackets": (
        "fd00::12",
        "1:1",
        "has more than one colon",
        "an IPv6 address is in brackets: [fd00::12]",
    ),
    "two colons": ("a:1:2", "1:1", "has more than one colon", "host:slots has one"),
    "no IPv6 address in brackets": ("[fd00::zz]", "1:1", "has `[fd00::zz]`, which is no IPv6 address", ""),
    "an open bracket of an address": ("[fd00::1 slots=1", "1:1", "has `[` without `]`", ""),
    "something behind an address": ("[fd00::1]x", "1:10", "has `x` behind an address", ""),
    "an open range": ("n[1-2, 4]", "1:2", "has `[` without `]`", "ranges have no spaces: node[03-06,09]"),
    "a backward range": ("n[2-1]", "1:3", "has the range 2-1, which runs backwards", "write 1-2"),
    "an option of ssh": (
        "-oProxyCommand=x",
        "1:1",
        "has `-oProxyCommand=x`, which is no name of a host",
        NAMES,
    ),
    "no user": ("-l@a", "1:1", "has `-l` where the user's name stands", ""),
    "an address that is too large": ("300.1.1.1", "1:1", "has `300.1.1.1`, which is no IPv4 address", ""),
    "no name before the slots": (":8", "1:1", "has ``, which is no name of a host", NAMES),
    "no slots behind the colon": ("a:", "1:3", "slots must be a whole number, got ``", ASKED),
    "a GPU twice": ("a gpus=0,0", "1:8", "names a GPU twice", ""),
    "numbers beside UUIDs": (
        "a gpus=0,GPU-1",
        "1:8",
        "has numbers beside UUIDs",
        "CUDA takes either in one list, not both",
    ),
    "GPUs that are none": ("a gpus=0,x", "1:10", "has `x` where a GPU stands", GPUS),
    "an empty GPU": ("a gpus=0,", "1:10", "names no GPU", GPUS),
    "a backward range of GPUs": ("a gpus=3-1", "1:8", "has the range 3-1, which runs backwards", "write 1-3"),
    "this host beside others": (
        "localhost\nb",
        "1:1",
        "has localhost beside b, for which it is another host",
        "write this host's own name, or addr= with the address that others reach it by",
    ),
    "this host twice": (
        "localhost\n127.0.0.1",
        "2:1",
        "has 127.0.0.1, which is localhost again",
        "leave one out",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_hostfile_is_refused_with_the_place_of_the_mistake(name):
    text, place, fact, hint = BAD[name]
    line, column = map(int, place.split(":"))

    with pytest.raises(HostfileError) as caught:
        parse(text)

    excerpt = f"  {text.split(chr(10))[line - 1]}\n  {' ' * (column - 1)}^"
    expected = f"`hostfile:{place}` {fact}\n{excerpt}" + (f"\n\nhint: {hint}" if hint else "")
    assert str(caught.value) == expected
    assert caught.value.exit_code == 2


def test_what_no_terminal_shows_is_a_question_mark_in_the_excerpt():
    with pytest.raises(HostfileError) as caught:
        parse("a\x07b\tslots=1")

    assert str(caught.value).split("\n")[1:3] == ["  a?b slots=1", "  ^"]


def test_of_a_long_line_the_part_with_the_mistake_is_shown():
    with pytest.raises(HostfileError) as caught:
        parse("a " + " " * 90 + "slot=8")

    assert str(caught.value).split("\n")[1:3] == [" " * 37 + "slot=8", " " * 37 + "^"]


def test_there_are_forty_hostfiles_and_more():
    assert len(GOOD) + len(BAD) >= 40


def test_everything_that_is_wrong_is_said_at_once_in_the_order_of_the_file():
    with pytest.raises(HostfileError) as caught:
        parse("localhost\na slots=x port=y\nb c\n")

    assert [problem.where for problem in caught.value.problems] == [
        "hostfile:1:1",
        "hostfile:2:9",
        "hostfile:2:16",
        "hostfile:3:3",
    ]


def test_a_list_of_hosts_needs_no_file():
    assert [(host.name, host.slots) for host in parse_hosts("a:8,n[1-2]:4,[fd00::1]:2")] == [
        ("a", 8),
        ("n1", 4),
        ("n2", 4),
        ("fd00::1", 2),
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "a:8,b:x",
            f"`--hosts` slots must be a whole number, got `x`\n  a:8,b:x\n        ^\n\nhint: {ASKED}",
        ),
        ("a,a", "`--hosts` names a again\n  a,a\n    ^\n\nhint: a host has one line: add up its slots"),
        ("", "`--hosts` names no host\n  \n  ^\n\nhint: one host a line, for example node01 slots=8"),
    ],
)
def test_a_mistake_in_a_list_is_shown_in_it(text, error):
    with pytest.raises(HostfileError) as caught:
        parse_hosts(text)

    assert str(caught.value) == error


def test_a_file_is_read_and_named(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2\r\n")

    assert read(path) == (HostEntry(name="a", slots=2, where=f"{path}:1:1"),)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            None,
            (
                "is no hostfile: it does not exist\n\n"
                "hint: nothing is launched without it: give another -H, "
                "or leave it out to run on this host alone"
            ),
        ),
        (b"a\xff", "is not text: byte 1 is 0xff\n\nhint: a hostfile is UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content, error):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(HostfileError) as caught:
        read(path)

    assert report(caught.value) == f"error: `{path}` {error}"


def test_a_folder_is_no_hostfile(tmp_path):
    with pytest.raises(HostfileError, match="cannot be read"):
        read(tmp_path)


def test_a_host_has_a_label_that_actors_and_files_can_have():
    assert HostEntry(name="fd00::12").label == "fd00--12"
    assert HostEntry(name="::1").label == "host--1"
    assert HostEntry(name="node-1.example_x").label == "node-1.example_x"


def test_slots_are_gpus_by_number():
    assert HostEntry(name="a", slots=2).visible == ("0", "1")
    assert HostEntry(name="a", gpus=("3",)).visible == ("3",)
    assert HostEntry(name="a").visible is None


names = st.from_regex(r"[a-z]([a-z0-9.-]{0,6}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name != "localhost"
)
hosts = st.lists(
    st.builds(
        HostEntry,
        name=names | st.ip_addresses(v=6).map(str).filter(lambda text: text != "::1"),
        user=st.sampled_from(["", "me"]),
        port=st.integers(0, 65_535),
        address=st.just("") | names | st.ip_addresses().map(str),
        interface=st.sampled_from(["", "eth0", "ib0.8"]),
        role=st.none() | st.sampled_from(HostRole),
        slots=st.none() | st.integers(1, 1024),
    )
    | st.builds(
        HostEntry,
        name=names,
        gpus=st.lists(st.integers(0, 99).map(str), min_size=1, max_size=4, unique=True).map(tuple)
        | st.lists(st.from_regex(r"(GPU|MIG)-[a-f0-9-]{1,8}", fullmatch=True), min_size=1, unique=True).map(
            tuple
        ),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda host: host.name,
)


@given(hosts)
def test_hosts_that_are_written_are_read_back(hosts):
    again = parse(render(hosts))

    assert [msgspec.structs.replace(host, where="") for host in again] == hosts


@given(st.text() | st.text(alphabet="ab19[]-,:=@. \t\r\n#\ufeff"))
def test_any_text_is_read_or_refused_by_its_own_error(text):
    for reader in (parse, parse_hosts):
        with suppress(HostfileError):
            assert reader(text)
