"""The trainer that ships: a byte-level GPT, the text it learns, and the loop under torchrun."""
