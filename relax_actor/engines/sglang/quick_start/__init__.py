"""Starts SGLang's server quickly: it is imported once, and of its 250 model modules one.

    python FOLDER ARGUMENTS OF sglang.launch_server

SGLang's interpreter runs this folder. It need not have our packages, so nothing here is imported but the
standard library, these modules by relative names and, when it runs, SGLang.

A start is mostly imports, and SGLang does them twice: in its main process and again in each that it spawns.
Here the main process imports and then forks a twin of itself, before it touches CUDA, which does not survive
a fork. What SGLang spawns from then on is forked from the twin, the fork server of `multiprocessing`. To
SGLang it looks spawned: the start method keeps its name, the child has the environment of its parent at that
time, its arguments come pickled.

Modules ask what GPU there is while they are imported, which would touch CUDA. So another process asks, and
they get its answers. Where CUDA is touched nevertheless, or a thread was started, or anything else is not as
expected, nothing is forked: processes are spawned as ever, and the log says why.
"""
