"""How isthmus is built: a backend for pip, uv and others, which compiles some of its modules."""
