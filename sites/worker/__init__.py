"""The worker library: what a rank's own script uses to train together with other sites."""
