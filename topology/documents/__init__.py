"""The way from a user's documents to what a run uses: load, resolve, check, place."""
