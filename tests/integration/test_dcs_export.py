"""A stock loader starts from what `relax-actor dcs export` wrote, copied or linked."""

import pytest

from launcher.cli import main
from launcher.runfolder import RunFolder
from relax_actor.dcs import PolicyPublisher
from relax_actor.ids import PolicyVersion
from relax_actor.telemetry import EventLog
from transport.shm import ShmSpace


@pytest.mark.parametrize("options", [[], ["--link"]], ids=["copied", "linked"])
def test_transformers_loads_an_export_bit_for_bit(tmp_path, tiny_model, options):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(tiny_model.path)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.125)
    folder = RunFolder.create(str(tmp_path / "run"), name="x")
    EventLog(folder.events, "head", 1).emit("tree_started", run_id="0011aabb", shm_root=str(tmp_path))
    with PolicyPublisher(ShmSpace("0011aabb", tmp_path), bucket_bytes=32 << 10) as publisher:
        publisher.publish(PolicyVersion(3), 3, trained.named_parameters())

        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "dcs",
                    "export",
                    str(folder.path),
                    "latest",
                    str(tmp_path / "out"),
                    "--model",
                    str(tiny_model.path),
                    *options,
                ]
            )

        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert ended.value.code == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
