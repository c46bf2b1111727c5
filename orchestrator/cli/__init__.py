"""The command line. What it promises: docs/cli.md."""
