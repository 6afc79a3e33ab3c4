"""The whole loop over several hosts that share no memory: rows, weights and prompts all travel."""

import pytest
from loop_hosts import loop_hosts
from loop_run import (
    assert_only_installed_policies_were_sampled,
    assert_trained_in_order,
    assert_trainer_went_on,
    assert_versions_never_go_back,
)

pytestmark = pytest.mark.timeout(180)


def assert_kept_its_promises(run, hosts):
    """I2, I3, I4, I5, I7, I8; that nobody was forgotten is for hosts that come and go to show otherwise."""
    assert run.outcome.exit_code == 0, run.log
    assert len(run.trained) == len(set(run.trained)), "a prompt was trained twice"
    assert all(event["balances"] for event in run.of("ledger"))
    staleness = run.config.run.max_staleness
    assert all(int(age) <= staleness for event in run.of("step") for age in event["staleness"])
    assert_versions_never_go_back(run)
    assert_only_installed_policies_were_sampled(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    hosts.assert_nothing_is_left(run)


@pytest.mark.parametrize("count", [2, 4])
def test_a_run_over_several_hosts_trains_every_prompt_once(run_loop, count):
    """Everybody but the rollouts is on the first host, which has a rollout too."""
    with loop_hosts(count) as hosts:
        run = run_loop(rollout={"replicas": count}, **hosts.settings())
        assert_kept_its_promises(run, hosts)
    assert {event["actor"] for event in run.of("policy_installed")} == {
        f"rollout/{index}" for index in range(count)
    }


def test_the_hosts_make_no_difference_to_what_is_trained(run_loop):
    """With a real engine, deterministic: the weights are those of a run on one host, to the last bit."""
    sections = {
        "run": {"steps": 2, "max_staleness": 0},
        "rollout": {"engine": "transformers", "deterministic": True, "chunk_tokens": 2, "replicas": 2},
    }
    with loop_hosts(2) as hosts:
        run = run_loop(**sections, **hosts.settings(hosts.rollouts_on("b", "b")))
        assert_kept_its_promises(run, hosts)
    assert run.weights == run_loop(**sections).weights
