"""What is moved to host memory and back is the same to the last bit, and the same objects."""

import torch

from relax_actor.trainers.torch_offload import Offload


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def train(steps, *, moving):
    net = model()
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)
    moved = lambda: [*net.parameters(), *(v for state in adam.state.values() for v in state.values())]  # noqa: E731
    offload = Offload(moved, "cpu")
    for step in range(steps):
        if moving:
            offload.offload()
            offload.onload()
        adam.zero_grad()
        net(torch.full((5, 3), float(step))).square().sum().backward()
        adam.step()
    return net.state_dict()


def test_training_goes_on_bit_for_bit():
    still, moved = train(4, moving=False), train(4, moving=True)
    assert all(torch.equal(still[name], moved[name]) for name in still)


def test_what_is_moved_leaves_its_memory_and_stays_the_same_object():
    net = model()
    weight = net[0].weight
    value, before = weight.detach().clone(), weight.data_ptr()
    offload = Offload(net.parameters, "cpu")
    offload.offload()
    assert net[0].weight is weight
    assert weight.data_ptr() != before
    host = weight.data_ptr()
    offload.offload()  # again: nothing
    assert weight.data_ptr() == host
    offload.onload()
    assert weight.data_ptr() != host
    assert torch.equal(weight, value)


def test_host_memory_is_used_again_and_that_of_what_is_gone_is_freed():
    tensors = [torch.ones(4), torch.ones(2)]
    offload = Offload(lambda: tensors, "cpu")
    offload.offload()
    first = tensors[0].data_ptr()
    offload.onload()
    del tensors[1]
    offload.offload()
    assert tensors[0].data_ptr() == first
    assert len(offload._kept) == 1


def test_what_starts_in_host_memory_moves_at_the_first_onload():
    tensor = torch.ones(4)
    offload = Offload(lambda: [tensor], "cpu", is_offloaded=True)
    before = tensor.data_ptr()
    offload.offload()
    assert tensor.data_ptr() == before
    offload.onload()
    assert tensor.data_ptr() != before
