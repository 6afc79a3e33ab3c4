"""`make bench-queue`: the same rows through our queue, TransferQueue, Ray, multiprocessing and raw memory.

`work` is the rows and what is measured of them, `harness` one unit, `ours`, `raw`, `mpq`, `ray_peer` and
`tq_peer` the engines; `run` interleaves them, `targets` says what is promised.
"""
