"""The engine `sglang`: one SGLang server, a subprocess of the rollout, spoken to over HTTP on loopback."""
