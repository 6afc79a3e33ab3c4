"""How good a sample is: reward functions by name, run in processes that can be killed.

`registry` finds a function, `value` says what it may return, `math` has the ones shipped, `worker` is the
process a function runs in, and `pool` looks after several of them.
"""
