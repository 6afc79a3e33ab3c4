"""Which model modules of SGLang a quick start imports, by their sources."""

import pytest

from relax_actor.engines.sglang.quick_start.models import entry_classes, modules_to_skip, plain_architecture

SOURCES = {
    "qwen3": "class A: ...\nEntryClass = Qwen3ForCausalLM\n",
    "llama": "EntryClass = [\n    LlamaForCausalLM,\n    PhiForCausalLM,  # the same\n]\n",
    "utils": "def helper(): ...\n",
}


@pytest.mark.parametrize(
    ("source", "classes"),
    [
        ("EntryClass = One", ("One",)),
        ("x = 1\nEntryClass: list[type] = [One, Two]\n", ("One", "Two")),
        ("EntryClass = (\n    One,\n    Two,\n)\n", ("One", "Two")),
        ("    EntryClass = One", ()),
        ("EntryClasses = One", ()),
        ("# EntryClass = One", ()),
    ],
)
def test_the_classes_that_a_module_offers_are_read_off_its_source(source, classes):
    assert entry_classes(source) == classes


@pytest.mark.parametrize(
    ("architecture", "skipped"),
    [
        ("Qwen3ForCausalLM", ("llama", "utils")),
        ("PhiForCausalLM", ("qwen3", "utils")),
        ("NewForCausalLM", ()),
        ("", ()),
    ],
)
def test_all_modules_are_skipped_but_the_one_that_is_needed(architecture, skipped):
    assert modules_to_skip(architecture, SOURCES) == skipped


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, ""),
        ({"architectures": ["AForCausalLM", "BForCausalLM"]}, ""),
        ({"architectures": ["AForCausalLM"], "vision_config": {}}, ""),
        ({"architectures": ["MixtralForCausalLM"], "quantization_config": {"quant_method": "fp8"}}, ""),
        ({"architectures": None}, ""),
        ({}, ""),
    ],
)
def test_only_a_plain_language_model_is_known_by_its_configuration(config, architecture):
    assert plain_architecture(config) == architecture
