"""The files that `isthmus init` writes: NAME.topology.yaml and NAME.job.yaml of each preset."""
