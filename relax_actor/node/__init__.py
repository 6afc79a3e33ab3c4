"""The process on each host that starts, watches and reaps actors.

`keeper` is its parent, which fences and sweeps; `lease` and `line` are what it has with the head.
`agent` decides nothing: it carries out the head's commands and reports kernel facts. `zygote` is the
single-threaded process that forks actors in milliseconds, `process` the Linux calls both need.
"""
