"""A model module."""


class SmallForCausalLM:
    """One model class."""


EntryClass = [SmallForCausalLM]
