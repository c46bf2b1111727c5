"""How long a step and its exchange take by closed forms, and where a step went. Pure."""
