"""Policy and critic: on disk, in memory, and what the learner computes with them."""
