"""The TransferQueue: prompts, samples and rewards, from who has them to who needs them."""
