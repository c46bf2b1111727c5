"""A discrete-event simulator of training over several sites. Pure: docs/simulator.md."""
