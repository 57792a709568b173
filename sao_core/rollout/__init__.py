"""Making rollouts: messages to tokens, tokens to trajectories, and the loop that keeps an engine busy."""
