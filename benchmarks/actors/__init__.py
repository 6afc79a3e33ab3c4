"""`make bench-actors`: the same work on our actors, on Ray, xoscar and Monarch, and on raw sockets.

`harness` is the work, written once against `harness.Engine`; `ours`, `raw`, `ray_peer`, `monarch_peer` and
`xoscar_peer` are the engines; `run` interleaves them, `targets` judges, `table` prints Markdown.
"""
