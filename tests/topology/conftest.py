"""Property tests: the same examples each time, and no clock in the verdict."""

from hypothesis import settings

settings.register_profile("isthmus", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("isthmus")
