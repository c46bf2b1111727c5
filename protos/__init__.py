"""The wire contract: control and exchange messages, frames, errors."""
