"""What is promised of the queue; see `actors.targets` for how it is judged."""

from actors.targets import Target

TARGETS = (
    Target(
        what="text rows/s, one producer, times TransferQueue's",
        metric="text1_rows_per_s",
        limit=15,
        at_least=True,
        against="tq",
    ),
    Target(
        what="text rows/s, four producers, times TransferQueue's",
        metric="text4_rows_per_s",
        limit=12,
        at_least=True,
        against="tq",
    ),
    Target(what="CPU-µs a text row, one producer", metric="text1_cpu_us_row", limit=65),
    Target(what="CPU-µs a text row, four producers", metric="text4_cpu_us_row", limit=80),
    Target(what="put of 32 rows, one under way, ms", metric="one_put_ms", limit=1.0),
    Target(what="get of 8 rows, one put under way, ms", metric="one_get_ms", limit=0.15),
    Target(what="put to packed, one put under way, ms", metric="one_age_ms", limit=2.0),
    Target(
        what="10 MB rows/s, times TransferQueue's",
        metric="media_rows_per_s",
        limit=8,
        at_least=True,
        against="tq",
    ),
    Target(
        what="10 MB rows/s, times Ray's", metric="media_rows_per_s", limit=2, at_least=True, against="ray"
    ),
    Target(
        what="10 MB rows/s, times raw shared memory's",
        metric="media_rows_per_s",
        limit=0.65,
        at_least=True,
        against="raw",
    ),
)
