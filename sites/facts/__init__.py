"""Tells what one machine is like, as `python -m sites.facts`: for `isthmus doctor` and `launch`."""
