"""Who waits for a host."""

from relax_actor.supervision.homeless import Homeless


def test_an_actor_waits_until_it_has_a_host():
    homeless = Homeless()
    assert not homeless.settle("rollout/0")
    homeless.wait("rollout/0", "node1", "it has not joined")
    homeless.wait("rollout/1", "node2", "it renewed no lease")
    before = homeless.why
    assert homeless.settle("rollout/0")
    assert dict(homeless.why) == {"rollout/1": "node2: it renewed no lease"}
    assert len(before) == 2, "who looks at it meanwhile sees no change"
