"""Who reads which sample: each one once, whoever takes part."""
