"""Every actor gets a place that nobody else has, or it is said what is missing."""

import itertools
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gpu_shares import replicas
from launcher.hostfile import parse
from launcher.hosts import HostRole
from launcher.options import GpuOptions, Layout, Order
from launcher.placing import PlacementError, needs_of, place, rooms, store_hosts
from launcher.stalls import Needs, Room
from relax_actor.errors import ConfigError
from relax_actor.homes import members_of


def placed(hostfile: str, **needs) -> list[str]:
    """Return who is where, as `actor@host:gpus`; spares have no name."""
    placement = place(Needs(**needs), rooms(parse(hostfile), {}))
    seats = (*placement.seats, *placement.spares)
    return [f"{seat.actor}@{seat.host}" + (f":{','.join(seat.gpus)}" if seat.gpus else "") for seat in seats]


def test_the_trainer_has_the_first_gpu_of_the_first_host_and_rollouts_the_others():
    assert placed("a:2\nb:2", replicas=3, gpus_each=1, trainer_gpus=1) == [
        "trainer@a:0",
        "rollout/0@a:1",
        "rollout/1@b:0",
        "rollout/2@b:1",
    ]


def test_a_group_of_gpus_is_never_split_over_hosts_and_what_is_left_is_spare():
    assert placed("a:8\nb:8\nc:3", replicas=2, gpus_each=4, trainer_gpus=1) == [
        "trainer@a:0",
        "rollout/0@a:1,2,3,4",
        "rollout/1@b:0,1,2,3",
        "@b:4,5,6,7",
    ]


def test_a_rollout_over_hosts_has_as_many_gpus_on_each_of_them():
    assert placed("a:1\nb:4\nc:4\nd:4\ne:4", replicas=3, gpus_each=2, trainer_gpus=1, hosts_each=2) == [
        "trainer@a:0",
        "rollout/0@b:0,1",
        "part/0@c:0,1",
        "rollout/1@b:2,3",
        "part/1@c:2,3",
        "rollout/2@d:0,1",
        "part/2@e:0,1",
        "@d:2,3",
        "@e:2,3",
    ]


def test_a_rollout_over_three_hosts_has_two_parts():
    assert placed("a:3\nb:2\nc:2", replicas=1, gpus_each=2, trainer_gpus=1, hosts_each=3) == [
        "trainer@a:0",
        "rollout/0@a:1,2",
        "part/0@b:0,1",
        "part/1@c:0,1",
    ]


def test_a_rollout_over_hosts_needs_no_gpus_but_hosts():
    seats = placed("a\nb", replicas=2, hosts_each=2)
    assert seats[:5] == ["trainer@a", "rollout/0@a", "part/0@b", "rollout/1@a", "part/1@b"]


@given(
    gpus=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    replicas=st.integers(1, 4),
    hosts_each=st.integers(2, 3),
    gpus_each=st.integers(1, 3),
    order=st.sampled_from(Order),
)
def test_no_gpu_is_given_twice_and_no_host_to_one_rollout(gpus, replicas, hosts_each, gpus_each, order):
    there = [Room(host=f"h{n}", gpus=tuple(map(str, range(count)))) for n, count in enumerate(gpus)]
    needs = Needs(replicas=replicas, gpus_each=gpus_each, hosts_each=hosts_each, order=order)
    try:
        placement = place(needs, there)
    except PlacementError:
        return
    given_out = [(seat.host, gpu) for seat in (*placement.seats, *placement.spares) for gpu in seat.gpus]
    assert len(given_out) == len(set(given_out))
    for replica in range(replicas):
        seats = [placement.seat(name) for name in members_of(replica, hosts_each)]
        assert len({seat.host for seat in seats}) == hosts_each
        assert {len(seat.gpus) for seat in seats} == {gpus_each}


def test_colocated_rollouts_have_the_trainers_gpus_too():
    seats = placed("a:2", replicas=2, gpus_each=1, trainer_gpus=1, layout=Layout.COLOCATE)

    assert seats == ["trainer@a:0", "rollout/0@a:0", "rollout/1@a:1"]


def test_hosts_are_packed_or_spread_over():
    hosts = "a:4\nb:4"
    needs = {"replicas": 2, "gpus_each": 1, "trainer_gpus": 1}

    assert placed(hosts, **needs, order=Order.PACK)[1:3] == ["rollout/0@a:1", "rollout/1@a:2"]
    assert placed(hosts, **needs, order=Order.SPREAD)[1:3] == ["rollout/0@a:1", "rollout/1@b:0"]


def test_names_of_gpus_are_passed_on_as_they_are():
    assert placed("a gpus=GPU-1,MIG-GPU-2/1/0\nb gpus=7,3", replicas=2, gpus_each=1, trainer_gpus=1) == [
        "trainer@a:GPU-1",
        "rollout/0@a:MIG-GPU-2/1/0",
        "rollout/1@b:7",
        "@b:3",
    ]


def test_roles_keep_hosts_for_one_side():
    hosts = "a:1 role=rollout\nb:2\nc:1 role=trainer"

    assert placed(hosts, replicas=2, gpus_each=1, trainer_gpus=1) == [
        "trainer@c:0",
        "rollout/0@a:0",
        "rollout/1@b:0",
        "@b:1",
    ]
    assert place(Needs(replicas=1), rooms(parse(hosts), {})).hosts == ("c", "a", "b")


def test_without_gpus_a_slot_is_a_rollout():
    assert placed("a:1\nb:2", replicas=2, order=Order.PACK) == [
        "trainer@a",
        "rollout/0@a",
        "rollout/1@b",
        "@b",
    ]


def test_without_slots_a_host_takes_any_number_and_has_room_for_those_of_a_lost_one():
    assert placed("a\nb", replicas=3) == [
        "trainer@a",
        "rollout/0@a",
        "rollout/1@a",
        "rollout/2@b",
        "@a",
        "@a",
        "@b",
    ]


def test_a_host_that_was_not_asked_yet_takes_rollouts_without_saying_on_which_gpu():
    assert placed("a:2\nb", replicas=2, gpus_each=1, trainer_gpus=1) == [
        "trainer@a:0",
        "rollout/0@a:1",
        "rollout/1@b",
        "@b",
    ]


def test_hosts_that_were_asked_have_what_they_said_and_no_more_than_their_line_allows():
    entries = parse("a slots=1\nb\nc gpus=3\nd slots=2")
    found = {"a": ("0", "1"), "b": ("0", "1"), "c": ("0", "1", "2", "3"), "d": ()}

    assert [(room.gpus, room.slots) for room in rooms(entries, found)] == [
        (("0",), 1),
        (("0", "1"), None),
        (("3",), None),
        ((), 2),
    ]


def test_one_host_alone_shares_its_gpus_where_there_are_too_few():
    room = Room(host="local", gpus=("0", "1", "2"))
    needs = Needs(replicas=5, gpus_each=1, trainer_gpus=1, shares=True)

    gpus = [seat.gpus for seat in place(needs, [room]).seats]

    assert gpus == [("0",), ("1",), ("2",), ("1",), ("2",), ("1",)]


def test_the_only_gpu_is_everybodys():
    needs = Needs(replicas=2, gpus_each=1, trainer_gpus=1, shares=True)

    assert {seat.gpus for seat in place(needs, [Room(host="local", gpus=("0",))]).seats} == {("0",)}


@pytest.mark.parametrize(
    ("hostfile", "needs", "error"),
    [
        (
            "a:8\nb:8",
            {"replicas": 6, "gpus_each": 4, "trainer_gpus": 1},
            (
                "`rollout/3` needs 4 GPUs of one host; the largest free set is 3 on a\n\n"
                "hint: lower rollout.replicas (now 6) or rollout.tensor_parallel, or add hosts"
            ),
        ),
        (
            "a:1",
            {"replicas": 1, "gpus_each": 1, "trainer_gpus": 1},
            (
                "`rollout/0` needs 1 GPU of one host; none is free\n\n"
                "hint: lower rollout.replicas (now 1) or rollout.tensor_parallel, or add hosts"
            ),
        ),
        (
            "a:1",
            {"replicas": 1, "gpus_each": 1, "trainer_gpus": 2},
            (
                "`trainer` needs 2 GPUs of a, which has 1\n\n"
                "hint: put a host with GPUs first, or set train.device=cpu"
            ),
        ),
        (
            "a:1 role=rollout\nb:1 role=rollout",
            {"replicas": 1},
            (
                "`trainer` has no host: all 2 are reserved for rollouts\n\n"
                "hint: take role=rollout from one line of the hostfile, or give one role=trainer"
            ),
        ),
        (
            "a:1\nb:1",
            {"replicas": 3},
            (
                "`rollout/2` needs a slot; the 2 hosts have 2\n\n"
                "hint: lower rollout.replicas (now 3), or raise slots= of a host"
            ),
        ),
        (
            "a:9\nb:2",
            {"replicas": 1, "gpus_each": 4, "hosts_each": 2},
            (
                "`rollout/0` needs 2 hosts with 4 GPUs each (rollout.hosts_per_replica); "
                "only a has so many free\n\n"
                "hint: lower rollout.replicas (now 1) or rollout.hosts_per_replica, or add hosts"
            ),
        ),
        (
            "a",
            {"replicas": 1, "hosts_each": 2},
            (
                "`rollout/0` needs 2 hosts with a slot each (rollout.hosts_per_replica); "
                "only a has so many free\n\n"
                "hint: lower rollout.replicas (now 1) or rollout.hosts_per_replica, or add hosts"
            ),
        ),
        (
            "a:1\nb:1",
            {"replicas": 1, "gpus_each": 4, "hosts_each": 2},
            (
                "`rollout/0` needs 2 hosts with 4 GPUs each (rollout.hosts_per_replica); "
                "0 of 2 have so many free\n\n"
                "hint: lower rollout.replicas (now 1) or rollout.hosts_per_replica, or add hosts"
            ),
        ),
        (
            "a:4 role=trainer",
            {"replicas": 1, "gpus_each": 1, "trainer_gpus": 1},
            (
                "`rollout/0` needs 1 GPU of one host; none is free\n\n"
                "hint: lower rollout.replicas (now 1) or rollout.tensor_parallel, or add hosts"
            ),
        ),
    ],
)
def test_what_is_missing_is_said_by_name_and_number(hostfile, needs, error):
    with pytest.raises(PlacementError) as caught:
        placed(hostfile, **needs)

    assert str(caught.value) == error


def test_stores_are_where_rollouts_may_be():
    needs = Needs(replicas=1, gpus_each=1, trainer_gpus=1)

    assert store_hosts(place(needs, rooms(parse("a:2"), {}))) == ("a",)
    assert store_hosts(place(Needs(replicas=1), rooms(parse("a"), {}))) == ()
    spread = Needs(replicas=1, gpus_each=1, trainer_gpus=1, hosts_each=2)
    assert store_hosts(place(spread, rooms(parse("a:1\nb:1\nc:1"), {}))) == ("a", "b"), "a part needs none"
    assert store_hosts(place(needs, rooms(parse("a:1\nb:1\nc:1 role=trainer"), {}))) == ("c", "a", "b")


def of(config, **sections):
    for section, values in sections.items():
        changed = msgspec.structs.replace(getattr(config, section), **values)
        config = msgspec.structs.replace(config, **{section: changed})
    return config


def test_auto_is_a_gpu_where_a_host_has_some_or_somebody_asks_for_some(config):
    some, none = rooms(parse("a:1\nb"), {}), rooms(parse("a"), {"a": ()})

    assert (
        needs_of(config, some, GpuOptions()).gpus_each,
        needs_of(config, some, GpuOptions()).trainer_gpus,
    ) == (1, 1)
    assert needs_of(config, none, GpuOptions()).gpus_each == 0
    assert needs_of(config, none, GpuOptions(rollout=2)).gpus_each == 1


def test_what_computes_on_the_cpu_needs_no_gpu(config):
    some = rooms(parse("a:1"), {})
    cpu = of(config, rollout={"device": "cpu"}, train={"device": "cpu"})
    scripted = of(config, rollout={"engine": "scripted"}, train={"device": "cuda"})

    assert needs_of(cpu, some, GpuOptions()).gpus_each == needs_of(cpu, some, GpuOptions()).trainer_gpus == 0
    assert needs_of(scripted, some, GpuOptions(), shares=True) == Needs(
        replicas=1, gpus_each=0, trainer_gpus=1, shares=True
    )


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (GpuOptions(), 1),
        (GpuOptions(rollout=6), 6),
        (GpuOptions(total=8), 7),
        (GpuOptions(total=8, layout=Layout.COLOCATE), 8),
        (GpuOptions(train=1), 1),
    ],
)
def test_gpus_by_number_make_rollouts(config, asked, count):
    assert replicas(config, asked) == count


@pytest.mark.parametrize(
    ("asked", "given", "error"),
    [
        (
            GpuOptions(rollout=6),
            "rollout.replicas",
            (
                "`--rollout-gpus` makes 6 rollouts, but `rollout.replicas` is 1\n\n"
                "hint: leave one of the two out"
            ),
        ),
        (
            GpuOptions(total=1),
            "",
            "`--gpus` is 1, which leaves none to rollouts\n\nhint: --mode colocate has both on the same GPUs",
        ),
        (
            GpuOptions(train=2),
            "",
            "`--train-gpus` is 2, but backend `torch` trains on one GPU\n\nhint: leave it out",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(config, asked, given, error):
    with pytest.raises(ConfigError) as caught:
        replicas(config, asked, given=given)

    assert str(caught.value) == error


def test_gpus_that_do_not_divide_are_refused(config, monkeypatch):
    monkeypatch.setattr("launcher.gpu_shares.gpus_each", lambda _: 4)

    assert replicas(config, GpuOptions(rollout=8)) == 2
    with pytest.raises(ConfigError, match="leaves 7 GPUs to rollouts, which take 4 each"):
        replicas(config, GpuOptions(total=8))


def test_a_thousand_hosts_are_placed_in_no_time():
    """In function calls, which other processes do not make more: a million of them take about 0.3 s."""
    there = rooms(parse("node[0001-1000] slots=8"), {})
    calls = itertools.count()
    sys.setprofile(lambda *_: next(calls))
    try:
        placement = place(Needs(replicas=7999, gpus_each=1, trainer_gpus=1), there)
    finally:
        sys.setprofile(None)

    assert next(calls) // 2 < 600_000  # and returns
    assert len({(seat.host, seat.gpus) for seat in placement.seats}) == 8000


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, *HostRole])), min_size=1, max_size=8),
    st.integers(0, 12),
    st.integers(1, 4),
    st.sampled_from(Order),
)
def test_no_gpu_is_given_away_twice(sizes, count, each, order):
    there = [
        Room(host=f"h{index}", role=role, gpus=tuple(map(str, range(gpus))))
        for index, (gpus, role) in enumerate(sizes)
    ]
    try:
        placement = place(Needs(replicas=count, gpus_each=each, trainer_gpus=1, order=order), there)
    except PlacementError:
        return

    used = [(seat.host, gpu) for seat in (*placement.seats, *placement.spares) for gpu in seat.gpus]
    assert len(used) == len(set(used))
    assert [seat.actor for seat in placement.seats] == ["trainer", *(f"rollout/{n}" for n in range(count))]
    assert all(len(seat.gpus) == each for seat in (*placement.seats[1:], *placement.spares))
    roles = {room.host: room.role for room in there}
    assert roles[placement.hosts[0]] is not HostRole.ROLLOUT
    assert all(roles[seat.host] is not HostRole.TRAINER for seat in (*placement.seats[1:], *placement.spares))
