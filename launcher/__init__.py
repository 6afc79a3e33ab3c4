"""How a run comes to exist on a host, and how people see and stop it.

`cli` is the command line; `settings` reads the configuration, `checks` says what is wrong with it before
a process starts, `plan` what would be started. A run lives in a `runfolder`; its event log is folded into
a `runstate`, which `console` draws, and turned into numbers and pictures by `metrics` and `report`.
"""
