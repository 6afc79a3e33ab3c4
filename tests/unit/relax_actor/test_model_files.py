"""A model folder's weights are known by name without being read."""

import numpy as np
from safetensors.numpy import save_file

from relax_actor.model_files import weight_names


def test_the_names_of_all_weights_are_read_from_the_headers(tmp_path):
    save_file({"a": np.zeros(3), "b": np.zeros(())}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"c": np.zeros((0, 2))}, tmp_path / "model-2.safetensors")
    assert weight_names(tmp_path) == {"a", "b", "c"}


def test_a_folder_without_weights_has_no_names(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weight_names(tmp_path) == frozenset()
