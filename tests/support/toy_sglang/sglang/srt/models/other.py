"""Another model module."""


class OtherForCausalLM:
    """One model class."""


EntryClass = OtherForCausalLM
