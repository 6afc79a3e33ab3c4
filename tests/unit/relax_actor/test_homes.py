"""Who runs where: a placement as the places in a tree's specs, and when a run has lost too many hosts."""

import pytest

from relax_actor import cast, homes
from relax_actor.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from relax_actor.homes import LoopHosts
from relax_actor.placement import Placement, Seat, UnplacedError
from relax_actor.supervision.spec import ChildSpec, Home, SpecError, SupervisorSpec
from relax_actor.supervision.spec_checks import validate

SPARE = Seat(actor="", host="c", gpus=("1",))


def seat(actor, host, *gpus):
    return Seat(actor=actor, host=host, gpus=gpus)


def placement(*seats, spares=()):
    return Placement(hosts=("a", "b", "c"), seats=seats, spares=spares)


def config(**rollout):
    return Config(model=ModelConfig(path="x"), data=DataConfig(path="x"), rollout=RolloutConfig(**rollout))


def rollouts(replicas):
    return ChildSpec(id="rollout", actor="m:R", replicas=replicas, always_indexed=True)


def test_rollouts_are_dealt_to_the_hosts_and_all_else_is_on_the_first():
    spread = homes.spread(config(replicas=3), ["a", "b"])
    assert spread.hosts == ("a", "b")
    assert [(each.actor, each.host) for each in spread.seats] == [
        ("trainer", "a"),
        ("rollout/0", "a"),
        ("rollout/1", "b"),
        ("rollout/2", "a"),
    ]


def test_parts_are_dealt_to_other_hosts_than_their_rollouts():
    spread = homes.spread(config(engine="sglang", replicas=2, hosts_per_replica=2), ["a", "b", "c"])
    assert [(each.actor, each.host) for each in spread.seats] == [
        ("trainer", "a"),
        ("rollout/0", "a"),
        ("part/0", "b"),
        ("rollout/1", "c"),
        ("part/1", "a"),
    ]


def test_the_parts_of_a_replica_have_the_next_numbers():
    assert homes.members_of(0, 1) == ("rollout/0",)
    assert homes.members_of(1, 3) == ("rollout/1", "part/2", "part/3")


def test_a_replica_is_on_as_many_hosts_as_it_is_spread_over():
    over_two = config(hosts_per_replica=2)
    homes.check_replicas(config(), None)
    homes.check_replicas(over_two, placement(seat("rollout/0", "a"), seat("part/0", "b")))
    with pytest.raises(SpecError, match="is 2, and there is one host"):
        homes.check_replicas(over_two, None)
    with pytest.raises(SpecError, match="and its parts are on a, a: not all differ"):
        homes.check_replicas(over_two, placement(seat("rollout/0", "a"), seat("part/0", "a")))
    with pytest.raises(UnplacedError, match="part/0"):
        homes.check_replicas(over_two, placement(seat("rollout/0", "a")))


def test_spare_places_are_shared_by_rollouts_and_parts_by_their_numbers():
    spares = tuple(seat("", "c", str(n)) for n in range(5))
    seats = (seat("rollout/0", "a", "0"), seat("part/0", "b", "0"), seat("part/1", "b", "1"))
    placed = placement(*seats, spares=spares)
    parts = ChildSpec(id="part", actor="m:P", replicas=2, always_indexed=True)
    assert [home.devices for home in homes.settled(rollouts(1), placed).homes] == [("0",), ("0",), ("3",)]
    assert [home.devices for home in homes.settled(parts, placed).homes] == [
        ("0",),
        ("1",),
        ("1",),
        ("2",),
        ("4",),
    ]
    with pytest.raises(UnplacedError, match="part/0"):
        homes.settled(parts, placement(seat("rollout/0", "a")))


def test_each_replica_sees_its_own_gpus_and_so_does_whoever_takes_a_spare_place():
    placed = placement(seat("rollout/0", "a", "0", "1"), seat("rollout/1", "b", "GPU-1f"), spares=(SPARE,))
    settled = homes.settled(rollouts(2), placed)
    assert settled.homes == (
        Home(host="a", devices=("0", "1"), env={"CUDA_VISIBLE_DEVICES": "0,1"}),
        Home(host="b", devices=("GPU-1f",), env={"CUDA_VISIBLE_DEVICES": "GPU-1f"}),
        Home(host="c", devices=("1",), env={"CUDA_VISIBLE_DEVICES": "1"}),
    )


def test_who_is_not_placed_is_on_the_first_host_unless_it_is_a_rollout():
    placed = placement(seat("rollout/0", "b"), seat("reward/1", "b"))
    queue = homes.settled(ChildSpec(id="queue", actor="m:Q"), placed)
    assert queue.homes == (Home(host="a"),)
    with pytest.raises(UnplacedError, match="rollout/1"):
        homes.settled(rollouts(2), placed)
    with pytest.raises(UnplacedError, match="reward/0"):
        homes.settled(ChildSpec(id="reward", actor="m:W", replicas=2), placed)


def test_hosts_with_rollouts_have_a_store_and_the_first_one_too():
    placed = placement(seat("rollout/0", "c"), seat("rollout/1", "c"))
    hosts = homes.loop_hosts(placed)
    assert hosts.stores == {"a": "store-0", "c": "store-1"}
    assert [hosts.has_rows(host) for host in "abc"] == [True, False, False]
    assert [hosts.store(host) for host in "ac"] == ["store-0", "store-1"]
    assert [hosts.rollouts_on(host, 9) for host in "ac"] == [1, 2]
    assert list(homes.loop_hosts(placement(spares=(SPARE,))).stores) == ["a", "c"]


def test_on_one_host_all_replicas_share_it():
    hosts = LoopHosts()
    assert hosts.has_rows("local")
    assert hosts.store("local") == "store-0"
    assert hosts.rollouts_on("local", 5) == 5


@pytest.mark.parametrize(
    ("seats", "spares", "crosses"),
    [
        ((seat("rollout/0", "a"),), (), False),
        ((seat("rollout/0", "b"),), (), True),
        ((seat("rollout/0", "a"),), (SPARE,), True),
        ((seat("rollout/0", "a"), seat("part/0", "b")), (), False),
    ],
)
def test_rows_cross_hosts_where_some_actor_is_or_may_be_elsewhere(seats, spares, crosses):
    assert homes.crosses_hosts(placement(*seats, spares=spares)) is crosses


def test_what_reads_rows_in_place_must_be_where_they_are():
    homes.check(placement(seat("trainer", "a"), seat("rollout/0", "b")))
    with pytest.raises(SpecError, match=r"trainer.*is on b; it runs on the first host, a"):
        homes.check(placement(seat("trainer", "b")))


def test_an_actor_computes_on_the_gpus_it_was_given_or_on_the_cpu():
    on_gpus = homes.on_devices(config(), placement(seat("trainer", "a", "3"), seat("rollout/0", "b", "5")))
    assert (on_gpus.train.device, on_gpus.rollout.device) == ("cuda:0", "cuda:0")
    on_cpu = homes.on_devices(config(), placement(seat("rollout/0", "b")))
    assert (on_cpu.train.device, on_cpu.rollout.device) == ("cpu", "cpu")


def test_a_run_goes_on_with_its_least_replicas_and_not_below():
    lost = {"rollout/1": "b: cut off", "store-1": "b: cut off"}
    assert homes.why_hopeless(config(replicas=2), lost) == ""
    assert homes.why_hopeless(config(replicas=2, min_replicas=2), lost) == (
        "1 of 2 rollout replicas have a host, fewer than 2: b: cut off"
    )
    assert homes.why_hopeless(config(replicas=1), {"rollout/0": "b: cut off"}).startswith("0 of 1")
    assert homes.why_hopeless(config(), {"queue": "a: gone"}) == "queue has no host: a: gone"


def test_a_replica_whose_part_has_no_host_has_none():
    over_two = config(replicas=2, hosts_per_replica=2, min_replicas=2)
    assert homes.why_hopeless(over_two, {"part/1": "b: cut off"}) == (
        "1 of 2 rollout replicas have a host, fewer than 2: b: cut off"
    )
    assert homes.why_hopeless(over_two, {"part/1": "b", "rollout/1": "c"}).startswith("1 of 2")


def test_a_run_goes_on_while_some_reward_actor_has_a_host():
    two = Config(model=ModelConfig(path="x"), data=DataConfig(path="x"), reward=RewardConfig(replicas=2))
    assert homes.why_hopeless(two, {"reward/0": "b: gone"}) == ""
    assert homes.why_hopeless(two, {"reward/0": "b: gone", "reward/1": "b: gone"})


def test_the_tree_of_a_run_over_hosts_has_everybody_at_home(tiny_model):
    base = Config(
        model=ModelConfig(path=str(tiny_model.path)),
        data=DataConfig(path=str(tiny_model.rows(4))),
        rollout=RolloutConfig(replicas=2),
    )
    spec = cast.tree(base, placement=placement(seat("rollout/0", "a"), seat("rollout/1", "b")))
    validate(spec)
    where = {child.id: tuple(home.host for home in child.homes) or child.hosts for child in leaves(spec)}
    assert where == {
        "queue": ("a",),
        "dock": ("a",),
        "prompts": ("a",),
        "reward": ("a",),
        "store-0": ("a",),
        "store-1": ("b",),
        "rollout": ("a", "b"),
        "trainer": ("a",),
    }
    assert "dock" not in {child.id for child in leaves(cast.tree(base))}


def test_the_tree_of_replicas_over_hosts_starts_their_parts_first(tiny_model):
    base = Config(
        model=ModelConfig(path=str(tiny_model.path)),
        data=DataConfig(path=str(tiny_model.rows(4))),
        rollout=RolloutConfig(engine="sglang", replicas=2, tensor_parallel=4, hosts_per_replica=2),
    )
    seats = (seat("rollout/0", "a", "0", "1"), seat("part/0", "b", "0", "1"))
    seats += (seat("rollout/1", "c", "0", "1"), seat("part/1", "a", "2", "3"))
    spec = cast.tree(base, placement=placement(*seats))
    validate(spec)
    (group,) = [child for child in spec.children if child.id == "rollouts"]
    parts, rollout = group.children
    assert (parts.id, parts.replicas, rollout.id, rollout.elastic) == ("part", 2, "rollout", None)
    assert [home.host for home in parts.homes] == ["b", "a"]
    assert [home.devices for home in parts.homes] == [("0", "1"), ("2", "3")]
    assert group.intensity.restarts == 40
    with pytest.raises(SpecError, match="there is one host"):
        cast.tree(base)


def leaves(spec):
    for child in spec.children:
        yield from leaves(child) if isinstance(child, SupervisorSpec) else (child,)
