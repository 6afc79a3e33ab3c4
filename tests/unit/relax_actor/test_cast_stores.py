"""Which hosts of a run get a store."""

from relax_actor import cast
from relax_actor.config import Config, DataConfig, DcsConfig, ModelConfig
from relax_actor.supervision.spec import SupervisorSpec
from relax_actor.supervision.spec_checks import validate


def config(**dcs):
    return Config(model=ModelConfig(path="x"), data=DataConfig(path="x"), dcs=DcsConfig(**dcs))


def test_one_host_has_no_store():
    assert cast.stores(config(), []) == cast.stores(config(), ["a"]) == []


def test_each_of_several_hosts_has_one_that_stays_there_in_the_order_of_the_hosts():
    specs = cast.stores(config(keep=3, budget_bytes=7, patience_s=2.0), ["a", "b", "c"], env={"X": "1"})
    assert [(spec.id, spec.hosts, spec.env) for spec in specs] == [
        (f"store-{index}", (host,), {"X": "1"}) for index, host in enumerate("abc")
    ]
    chain = ("store-0", "store-1", "store-2")
    given = {
        "chain": chain,
        "stages": False,
        "keep": 3,
        "budget_bytes": 7,
        "patience_s": 2.0,
        "relay": "chain",
    }
    assert all(spec.args == given for spec in specs)
    validate(SupervisorSpec(id="run", children=tuple(specs)))


def test_stores_that_form_a_group_start_where_torch_is_imported():
    specs = cast.stores(config(relay="group"), ["a", "b"])
    assert [(spec.args["relay"], spec.zygote) for spec in specs] == [("group", "torch")] * 2
    assert {spec.zygote for spec in cast.stores(config(), ["a", "b"])} == {"default"}
