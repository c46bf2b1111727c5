"""What a training script sees: `join`, and the `Site` that it returns."""
