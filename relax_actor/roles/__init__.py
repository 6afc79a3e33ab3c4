"""The actors of a run: prompts, queue, rollout, reward, trainer. They meet in `relax_actor.cast` only."""
