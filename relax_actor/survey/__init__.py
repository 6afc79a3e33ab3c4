"""What a host is and has, found before a run starts there: facts only, nobody judges them here.

`records` is what is asked and answered; `host` asks all of it; `probe` is the process that does so at the far
end of a session. Nothing heavy is imported: torch and its like are looked up, not loaded.
"""
