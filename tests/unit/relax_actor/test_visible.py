"""A list of visible GPUs means what CUDA makes of it, and its names stay as they are."""

import pytest

from relax_actor.visible import oddity, scheduled_gpus, visible_gpus

CASES = [
    (None, None),
    ("", ()),
    (" ", ()),
    ("-1", ()),
    ("NoDevFiles", ()),
    ("0", ("0",)),
    ("0,2", ("0", "2")),
    (" 0, 1", ("0", "1")),
    ("3,1", ("3", "1")),
    ("0,0", ()),
    ("0,-1,1", ("0",)),
    ("0,x,1", ("0",)),
    ("0,", ("0",)),
    ("GPU-8932f937-d72c", ("GPU-8932f937-d72c",)),
    ("GPU-a,GPU-b", ("GPU-a", "GPU-b")),
    ("GPU-a,GPU-a", ()),
    ("GPU-a,0", ("GPU-a",)),
    ("MIG-GPU-a/1/0,MIG-b", ("MIG-GPU-a/1/0", "MIG-b")),
    ("junk", ()),
    ("²", ()),
]


@pytest.mark.parametrize(("text", "gpus"), CASES)
def test_a_list_is_read_as_cuda_reads_it(text, gpus):
    assert visible_gpus(text) == gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,1", ""),
        ("", ""),
        ("-1", ""),
        ("GPU-a", ""),
        ("0,0", "`0,0` names a GPU twice, so none is visible"),
        ("0,x,1", "`0,x,1` ends at `x`, so 0 is visible"),
        ("junk", "`junk` ends at `junk`, so none is visible"),
    ],
)
def test_what_is_silently_dropped_is_said(text, words):
    assert oddity(text) == words


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({}, None),
        ({"SLURM_JOB_GPUS": "4-6,7", "CUDA_VISIBLE_DEVICES": "0,1"}, ("4", "5", "6", "7")),
        ({"SLURM_STEP_GPUS": "4", "SLURM_JOB_GPUS": "4,5"}, ("4",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, ("GPU-a",)),
        ({"SLURM_JOB_GPUS": "GPU-a,GPU-b"}, ("GPU-a", "GPU-b")),
    ],
)
def test_a_schedulers_list_comes_first(env, gpus):
    assert scheduled_gpus(env) == gpus
